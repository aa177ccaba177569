"""Nodes that wait until a test lets them go on: with their rollouts, or with the weights that they are given."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from repl_rl.rollout import ReplSampler, Rollouts
from repl_rl.rollout.episode import Episode
from tests.support.ray.scripted_workers import WeighedEngine, rollouts


class Halting(ReplSampler):
    """Its rollouts wait after their first line until they are let go on. One for all nodes of a test."""

    on = asyncio.Event()
    written = 0

    async def rollout(self, episode: Episode) -> None:
        async for line in episode.lines():
            await episode.push(line)
            if not Halting.on.is_set():
                Halting.written += 1
                await Halting.on.wait()


@asynccontextmanager
async def halted(number: int = 0) -> AsyncIterator[Rollouts]:
    """Rollouts wait after their first line."""
    yield rollouts(Halting())


class Slow(WeighedEngine):
    """Waits with its first weights until it is let go on. One for all nodes of a test."""

    on = asyncio.Event()

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        await Slow.on.wait()
        await super().load_weights(folder, policy_step)


@asynccontextmanager
async def slow(number: int = 0) -> AsyncIterator[Rollouts]:
    """All nodes take weights at once but the second; rollouts wait after their first line."""
    world = rollouts(Halting())
    if number == 1:
        engine = Slow(world.engine.scripts, forbidden_ids=world.engine.forbidden_ids)  # type: ignore[attr-defined]
        world = replace(world, engine=engine)
    yield world


async def hurry() -> None:
    Slow.on.set()


async def until(true: Callable[[], bool]) -> None:
    """Let the event loop turn until that is so."""
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def turns(count: int) -> None:
    """Let the event loop turn so often."""
    for _ in range(count):
        await asyncio.sleep(0)


async def let_go() -> None:
    Halting.on.set()


def halt() -> None:
    """Nobody is let go on; before each test."""
    Halting.on, Halting.written = asyncio.Event(), 0
    Slow.on = asyncio.Event()
