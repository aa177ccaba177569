"""vLLM sleeps between rollouts and is awake whenever it is needed. What sleep frees on a GPU is not tested here."""

import asyncio
from pathlib import Path

import pytest

from repl_rl.engine import EngineOptions, Vllm, open_engine
from repl_rl.engine.vllm_subprocess import SleepMode
from repl_rl.errors import ConfigError


class Recorder:
    def __init__(self) -> None:
        self.calls: list[str] = []

    async def sleep(self, level: int) -> None:
        await asyncio.sleep(0)
        self.calls.append(f"sleep {level}")

    async def wake_up(self) -> None:
        await asyncio.sleep(0)
        self.calls.append("wake")


def test_it_falls_asleep_once_and_wakes_once_however_many_sessions_open() -> None:
    llm = Recorder()

    async def step() -> None:
        nap = SleepMode(llm, enabled=True)
        await nap.wake()
        await nap.enter()
        await nap.enter()
        await asyncio.gather(*(nap.wake() for _ in range(8)))
        await nap.enter()

    asyncio.run(step())
    assert llm.calls == ["sleep 1", "wake", "sleep 1"]


def test_without_the_option_it_never_sleeps() -> None:
    llm = Recorder()

    async def step() -> None:
        nap = SleepMode(llm, enabled=False)
        await nap.enter()
        await nap.wake()

    asyncio.run(step())
    assert llm.calls == []


def test_on_cpu_it_is_refused_before_anything_starts(policy_folder: Path) -> None:
    async def opened() -> None:
        async with open_engine(Vllm(sleep=True), model=policy_folder):
            pass

    with pytest.raises(ConfigError, match="sleep is True; there is no GPU"):
        asyncio.run(opened())


def test_a_block_size_that_kernels_for_cpus_do_not_take_is_refused_before_anything_starts(policy_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"vllm\.block_size is 16; .*multiples of 32"):
        Vllm(block_size=16).check(EngineOptions(policy_folder))
