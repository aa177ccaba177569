"""vLLM asleep: its memory on the GPU is the trainer's while the policy is updated."""

import asyncio
from typing import Protocol


class Sleeper(Protocol):
    """What of `AsyncLLM` can sleep."""

    async def sleep(self, level: int) -> None: ...

    async def wake_up(self) -> object: ...


class Nap:
    """Puts vLLM to sleep and wakes it, each once, whoever asks how often. Level 1: weights wait in the host's memory,
    keys and values are dropped."""

    def __init__(self, llm: Sleeper, wanted: bool) -> None:
        """`wanted`: False makes both do nothing."""
        self._llm = llm
        self._wanted = wanted
        self._asleep = False
        self._turn = asyncio.Lock()

    async def begin(self) -> None:
        """Go to sleep. No session may be open."""
        async with self._turn:
            if self._wanted and not self._asleep:
                await self._llm.sleep(level=1)
                self._asleep = True

    async def end(self) -> None:
        """Be awake."""
        async with self._turn:
            if self._asleep:
                await self._llm.wake_up()
                self._asleep = False
