"""Worlds that a node opens in a test, in any process: a scripted policy whose draws hang on a session's seed alone."""

import hashlib
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from repl_rl.engine import Engine, ScriptedEngine
from repl_rl.engine.restarting_engine import open_restarting_engine
from repl_rl.engine.scripted_engine import FaultyEngine
from repl_rl.rollout import Rollouts, RolloutSettings
from repl_rl.rollout.retry import FaultRetries
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.sampler_base import ReplSampler, RolloutSampler
from repl_rl.rollout_config import RolloutConfig
from repl_rl.sandbox import open_sandbox
from repl_rl.sandbox.inprocess import InProcessSandbox

RENDERER = RolloutConfig().load_renderer()
LIMITS = RolloutLimits(max_lines=3, max_line_tokens=40)
_LINES = (("x = 6\n", "submit_final_answer(x * 7)\n"), ("print(6\n", ")\n"), ("1/0\n", "submit_final_answer(7)\n"))


def rollouts(sampler: RolloutSampler | None = None) -> Rollouts:
    """With consoles of this process."""
    scripts = [[i for line in lines for i in RENDERER.encode_as_sampled(line)] * 9 for lines in _LINES]
    engine = ScriptedEngine(scripts, forbidden_ids=RENDERER.forbidden_ids)
    return Rollouts(
        engine,
        InProcessSandbox(),
        RENDERER,
        sampler or ReplSampler(),
        LIMITS,
        RolloutSettings("bare", concurrency=6),
        (FaultRetries(),),
    )


@asynccontextmanager
async def opened(number: int = 0) -> AsyncIterator[Rollouts]:
    """The world as every node opens it."""
    yield rollouts()


@asynccontextmanager
async def isolated(number: int = 0) -> AsyncIterator[Rollouts]:
    """The same with real consoles."""
    async with open_sandbox("local", warm=2) as sandbox:
        yield replace(rollouts(), sandbox=sandbox)


async def weigh(engine: ScriptedEngine, folder: Path, policy_step: int) -> None:
    """Let what an engine draws hang on the weights in `folder`."""
    async with engine.lock.write():
        content = (folder / "model.safetensors").read_bytes()
        engine.seed = int(hashlib.blake2b(content, digest_size=4).hexdigest(), 16)
        engine.policy_step = policy_step


@dataclass(slots=True)
class WeighedEngine(ScriptedEngine):
    """What it draws hangs on the weights that it was given: whoever samples from others plays other rollouts."""

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        await weigh(self, folder, policy_step)


@dataclass(slots=True)
class ProcessEngine(FaultyEngine):
    """The same with a process of its own, without which it is dead, as that of vLLM."""

    process: subprocess.Popen[bytes] | None = None

    def check_alive(self) -> None:
        assert self.process is not None
        self.is_dead = self.is_dead or self.process.poll() is not None
        FaultyEngine.check_alive(self)

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        self.check_alive()
        await weigh(self, folder, policy_step)


ENGINE = "engine-of-a-test"
"""How such a process calls itself."""


def _started() -> subprocess.Popen[bytes]:
    """It ends with this process, however that ends: nobody writes any more."""
    return subprocess.Popen(["bash", "-c", f"exec -a {ENGINE} cat"], stdin=subprocess.PIPE)


@asynccontextmanager
async def weighed(number: int = 0) -> AsyncIterator[Rollouts]:
    """The same world with an engine whose draws hang on its weights."""
    async with isolated(number) as world:
        assert isinstance(world.engine, ScriptedEngine)
        yield replace(world, engine=WeighedEngine(world.engine.scripts, forbidden_ids=RENDERER.forbidden_ids))


@asynccontextmanager
async def processed(number: int = 0) -> AsyncIterator[Rollouts]:
    """The same with an engine that has a process of its own, and is opened again when that dies."""
    async with isolated(number) as world:
        assert isinstance(world.engine, ScriptedEngine)
        scripts = world.engine.scripts

        @asynccontextmanager
        async def opened() -> AsyncIterator[Engine]:
            with _started() as process:
                try:
                    yield ProcessEngine(scripts, forbidden_ids=RENDERER.forbidden_ids, process=process)
                finally:
                    process.kill()

        async with open_restarting_engine(opened, pause_s=0.1) as engine:
            yield replace(world, engine=engine)
