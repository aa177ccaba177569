"""Runs many rollouts at once: every rollout its own coroutine, no batch barrier."""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from repl_rl.engine.ahead import Tally, ahead
from repl_rl.engine.base import Engine, Sampling
from repl_rl.episode import Episode, Origin, RolloutLimits
from repl_rl.errors import ReplRLError, RolloutFailure, UserCodeError
from repl_rl.judges import grade
from repl_rl.renderer import Renderer
from repl_rl.samplers.base import RolloutSampler
from repl_rl.samplers.refill import Lengths
from repl_rl.sandbox.base import Sandbox
from repl_rl.tasks import Task
from repl_rl.trajectory import Stop, Trajectory


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Everything that a rollout needs, bound together once."""

    engine: Engine
    sandbox: Sandbox
    renderer: Renderer
    sampler: RolloutSampler
    limits: RolloutLimits
    template: str = "base"
    """Prompt template: see `Renderer.prompt`."""
    seed: int = 0
    concurrency: int = 64
    """Rollouts under way at once (>= 1); the rest wait for a place, so that kernels are leased no faster than used."""
    tally: Tally = field(default_factory=Tally, compare=False)
    """What `RolloutLimits.optimistic` brought so far; figures only."""

    lengths: Lengths = field(default_factory=Lengths, compare=False)
    """Of rollouts so far, by family of tasks: the longest begin first."""

    async def collect(self, tasks: Sequence[Task], temperature: float = 1.0) -> list[Trajectory]:
        """One trajectory a task, in order. A task that is named g times gives a group of g rollouts.

        A rollout that failed on our side is in the list too, with `stop == "fault"`. Trajectories do not depend on
        the concurrency, as far as the engine's draws do not.

        Raises:
            EngineError, UserCodeError, InvariantError: all rollouts are cancelled.
        """
        places = asyncio.Semaphore(self.concurrency)
        counts: dict[str, int] = {}
        origins = []
        for task in tasks:
            index = counts[task.id] = counts.get(task.id, -1) + 1
            origins.append(self._origin(task, index))
        try:
            async with asyncio.TaskGroup() as rollouts:
                running = {
                    index: rollouts.create_task(self._one(origins[index], temperature, places))
                    for index in self.lengths.longest_first(tasks)
                }
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        played = [running[index].result() for index in range(len(tasks))]
        for task, trajectory in zip(tasks, played, strict=True):
            self.lengths.learn(task, trajectory)
        return played

    def _origin(self, task: Task, index: int) -> Origin:
        step = self.engine.policy_step
        key = f"{self.seed}/{step}/{task.id}/{index}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1
        version = ".".join(map(str, self.sandbox.python_version))
        prompt = self.renderer.prompt(task.question, self.template, version)
        return Origin(f"{step}-{task.id}-{index}", task, prompt, seed, step)

    async def _one(self, origin: Origin, temperature: float, places: asyncio.Semaphore) -> Trajectory:
        async with (
            places,
            self.engine.session(origin.prompt.token_ids, Sampling(temperature, origin.seed)) as plain,
            ahead(plain, self.tally) if self.limits.optimistic else nullcontext(plain) as session,
            Episode(origin, session, self.sandbox, self.renderer, self.limits, self.engine.context_tokens) as episode,
        ):
            await self._drive(episode)
            trajectory = episode.trajectory()
        if trajectory.failure is not None:
            return trajectory
        return replace(trajectory, outcome=grade(origin.task, trajectory.answer))

    async def _drive(self, episode: Episode) -> None:
        try:
            async with asyncio.timeout(self.limits.max_wall_s) as deadline:
                await self.sampler.rollout(episode)
        except RolloutFailure as failure:
            episode.fail(failure)
        except TimeoutError as error:
            if not deadline.expired():
                raise UserCodeError(f"{type(self.sampler).__name__}.rollout raised {error!r}") from error
            episode.finish(Stop.WALL_CLOCK)
        except ReplRLError:
            raise
        except Exception as error:
            raise UserCodeError(f"{type(self.sampler).__name__}.rollout raised {error!r}") from error
        episode.finish()
