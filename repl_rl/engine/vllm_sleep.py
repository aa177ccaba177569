"""Sleep mode of vLLM, which leaves its GPU memory to the trainer during an update."""

import asyncio
from typing import Protocol


class Sleeper(Protocol):
    """Methods of `AsyncLLM` for its sleep mode."""

    async def sleep(self, level: int) -> None: ...

    async def wake_up(self) -> object: ...


class Nap:
    """Sleep state of one vLLM; repeated calls have no effect.

    Sleep of level 1 moves weights to the host's memory and drops keys and values.
    """

    def __init__(self, llm: Sleeper, wanted: bool) -> None:
        """Take vLLM, awake. False as `wanted` disables both methods."""
        self._llm = llm
        self._wanted = wanted
        self._asleep = False
        self._turn = asyncio.Lock()

    async def begin(self) -> None:
        """Put vLLM to sleep. No session may be open."""
        async with self._turn:
            if self._wanted and not self._asleep:
                await self._llm.sleep(level=1)
                self._asleep = True

    async def end(self) -> None:
        """Wake vLLM, if it sleeps."""
        async with self._turn:
            if self._asleep:
                await self._llm.wake_up()
                self._asleep = False
