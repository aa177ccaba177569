"""Contenders of `bench rollout`: different ways to play the same rollouts.

Each returns the number of tokens that it sampled; the caller measures the time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from benchmarks.rollouts.forced_lengths import ForcedRenderer, Plan, TimedEngine
from repl_rl.engine.backend_configs import RequestMode
from repl_rl.engine.base import Chunk, Sampling
from repl_rl.engine.vllm_engine import VllmEngine
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSettings
from repl_rl.rollout.retry import FaultRetries
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.sandbox.base import Sandbox
from repl_rl.tasks import Task
from repl_rl.trajectory.console_text import choose_prompt
from repl_rl.trajectory.trajectory import Trajectory

QUESTION = "Compute the sum of the first ten numbers and submit it."


@dataclass(frozen=True, slots=True)
class Stage:
    """Plan, engine, consoles and renderer that a contender uses."""

    plan: Plan
    engine: VllmEngine
    sandbox: Sandbox
    """Sandbox of consoles that are already open."""
    renderer: ForcedRenderer


Way = Callable[[Stage], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Played:
    """Rollouts of a contender, with the figures for the profile."""

    trajectories: Sequence[Trajectory]
    engine_s: float
    """Seconds in the engine, summed over rollouts."""


async def play(stage: Stage) -> Played:
    """Play with the classes that training uses, on the forced engine."""
    plan = stage.plan
    engine = TimedEngine(stage.engine, plan.lengths())
    limits = RolloutLimits(max_lines=plan.lines, max_observation_tokens=64, max_wall_s=600.0)
    settings, hooks = RolloutSettings("bare", concurrency=plan.rollouts), (FaultRetries(),)
    rollouts = Rollouts(engine, stage.sandbox, stage.renderer, ReplSampler(), limits, settings, hooks)
    tasks = [Task("t", QUESTION, "55")] * plan.rollouts
    trajectories = await rollouts.collect(tasks)
    return Played(trajectories, engine.engine_s)


async def ours(stage: Stage) -> int:
    """Play with one engine session and one console per rollout; no rollout waits for another."""
    stage.engine.set_request_mode(RequestMode.SESSION)
    return _sampled((await play(stage)).trajectories)


async def request_a_line(stage: Stage) -> int:
    """Play the same with one new request per line; only the prefix cache is kept between lines."""
    stage.engine.set_request_mode(RequestMode.REQUEST)
    return _sampled((await play(stage)).trajectories)


async def uninterrupted(stage: Stage) -> int:
    """Generate that many tokens without interruption: one request per rollout, no observation, no console."""
    stage.engine.set_request_mode(RequestMode.REQUEST)

    async def one(lengths: Sequence[int]) -> Chunk:
        async with stage.engine.session(_prompt(stage), Sampling()) as session:
            return await session.sample((), max_tokens=sum(lengths), stop_ids=frozenset())

    chunks = await asyncio.gather(*map(one, stage.plan.lengths()))
    return sum(len(chunk.token_ids) for chunk in chunks)


async def bound(stage: Stage) -> int:
    """Sample the same tokens in sessions with observations that are known before: no console, no record."""
    stage.engine.set_request_mode(RequestMode.SESSION)
    known = [[stage.renderer.encode(text) for text in texts] for texts in stage.plan.known()]

    async def one(lengths: Sequence[int], observations: Sequence[tuple[int, ...]]) -> int:
        observed: tuple[int, ...] = ()
        async with stage.engine.session(_prompt(stage), Sampling()) as session:
            for length, following in zip(lengths, observations, strict=True):
                await session.sample(observed, max_tokens=length, stop_ids=frozenset())
                observed = following
        return sum(lengths)

    return sum(await asyncio.gather(*map(one, stage.plan.lengths(), known)))


async def lockstep(stage: Stage) -> int:
    """Play in batches: all rollouts sample a line, then all run it, with one new request per line.

    The slowest rollout determines the time of each batch.
    """
    stage.engine.set_request_mode(RequestMode.REQUEST)
    lengths = stage.plan.lengths()
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(stage.engine.session(_prompt(stage), Sampling())) for _ in lengths]
        consoles = [await stack.enter_async_context(stage.sandbox.session()) for _ in lengths]
        observed: list[tuple[int, ...]] = [()] * len(lengths)
        # One turn: sample a line of every rollout, wait for all, run all lines, wait for all.
        for line in zip(*lengths, strict=True):
            sampling = zip(sessions, observed, line, strict=True)
            chunks = await asyncio.gather(
                *(session.sample(seen, max_tokens=most, stop_ids=frozenset()) for session, seen, most in sampling)
            )
            texts = [stage.renderer.decode(chunk.token_ids).rstrip("\n") for chunk in chunks]
            results = await asyncio.gather(*(c.push(text) for c, text in zip(consoles, texts, strict=True)))
            observed = [stage.renderer.encode(result.text + choose_prompt(result.incomplete)) for result in results]
    return sum(map(sum, lengths))


def _prompt(stage: Stage) -> tuple[int, ...]:
    return stage.renderer.build_prompt(QUESTION, "bare").token_ids


def _sampled(trajectories: Sequence[Trajectory]) -> int:
    return sum(trajectory.sampled_tokens for trajectory in trajectories)


WAYS: dict[str, Way] = {
    "uninterrupted": uninterrupted,
    "bound": bound,
    "ours": ours,
    "request_a_line": request_a_line,
    "lockstep": lockstep,
}
"""Contenders on the engine that training uses, by their keys in the JSON."""
