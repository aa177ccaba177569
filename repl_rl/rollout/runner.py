"""Runs many rollouts at once: every rollout its own coroutine, no batch barrier."""

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from repl_rl.engine.ahead import Tally, ahead
from repl_rl.engine.base import Engine, Pressure, Sampling, Seated
from repl_rl.errors import ConfigError, ReplRLError, RolloutFailure, SandboxFault, UserCodeError
from repl_rl.judges import graded
from repl_rl.record.record import Origin, Record
from repl_rl.record.trajectory import Failure, FailureKind, Stop, Trajectory
from repl_rl.rollout.doomed import lines_saved
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.lengths import Lengths
from repl_rl.rollout.limits import RolloutLimits
from repl_rl.rollout.race import Raced, Referee
from repl_rl.rollout.renderer import Renderer
from repl_rl.rollout.sampler import ReplSampler, RolloutSampler
from repl_rl.sandbox.base import Sandbox
from repl_rl.tasks import Task

_CANCEL_S = 5.0
"""How long a cancelled sampler may clean up."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Pressed:
    """What the engine's cache was too small for, in the last batch."""

    latest: Pressure = field(default_factory=Pressure)


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Everything that a rollout needs, bound together once.

    Raises:
        ConfigError: the engine forbids other ids than its renderer: what it samples would be another policy.
    """

    engine: Engine
    sandbox: Sandbox
    renderer: Renderer
    sampler: RolloutSampler
    limits: RolloutLimits
    template: str = "base"
    """Prompt template: see `Renderer.prompt`."""
    seed: int = 0
    replica: int = 0
    """Which of several processes this is (>= 0): part of ids and seeds, so that none plays another's rollouts."""
    concurrency: int = 64
    """Rollouts under way at once (>= 1); the rest wait for a place, so that kernels are leased no faster than used."""
    tally: Tally = field(default_factory=Tally, compare=False)
    """What sampling ahead brought so far; figures only."""
    lengths: Lengths = field(default_factory=Lengths, compare=False)
    """Of rollouts so far, by family of tasks: the longest begin first."""
    pressed: Pressed = field(default_factory=Pressed, compare=False)
    """Figures only."""

    def __post_init__(self) -> None:
        theirs, ours = self.engine.forbidden_ids, self.renderer.forbidden_ids
        if theirs != ours:
            remedy = f"the renderer forbids {len(ours)}; give open_engine(forbidden_ids=renderer.forbidden_ids)"
            raise ConfigError(f"forbidden ids of engine {self.engine.name}", len(theirs), remedy)

    @property
    def pressure(self) -> Pressure | None:
        """What a cache that was too small cost since the engine was opened; None: the engine has no such cache."""
        return self.engine.pressure if isinstance(self.engine, Seated) else None

    async def collect(self, tasks: Sequence[Task], temperature: float = 1.0) -> list[Trajectory]:
        """One trajectory a task, in order. A task that is named g times gives a group of g rollouts.

        A rollout that failed on our side or in the sampler, or whose prompt fills the context, is in the list too,
        with `stop == "fault"`. Trajectories do not depend on the concurrency, as far as the engine's draws do not.

        Raises:
            UserCodeError: the sampler failed in most rollouts, or a judge failed.
            ConfigError: most prompts do not fit into the context.
            EngineError, InvariantError: all rollouts are cancelled.
        """
        running, _ = await self._played(tasks, temperature)
        played = [running[index].result() for index in range(len(tasks))]
        for task, trajectory in zip(tasks, played, strict=True):
            self.lengths.learn(task, trajectory)
        return played

    async def race(self, groups: Sequence[Sequence[Task]], keep: int) -> Raced:
        """Play all `groups` at temperature 1 until `keep` (>= 1) of them are done, and cut the others' rollouts.

        A rollout that is cut gives its console and its place in the engine back before this returns. Which groups are
        done first depends on the machine, so with equal seeds others may be kept.

        Raises:
            ConfigError: there are fewer groups than are to be kept; and as `collect`.
        """
        if not 1 <= keep <= len(groups):
            raise ConfigError("groups to keep", keep, f"there are {len(groups)}; keep 1 of them, or more")
        tasks = [task for group in groups for task in group]
        referee = Referee([len(group) for group in groups], keep)
        running, tokens = await self._played(tasks, 1.0, referee)
        raced = referee.ended(running, tokens)
        by_id = {task.id: task for task in tasks}
        for trajectory in (one for group in raced.groups for one in group):
            self.lengths.learn(by_id[trajectory.task_id], trajectory)
        return raced

    async def _played(
        self, tasks: Sequence[Task], temperature: float, referee: Referee | None = None
    ) -> tuple[Mapping[int, "asyncio.Task[Trajectory]"], int]:
        """The rollouts, ended, by their place; and the tokens of those that the referee cut while they sampled."""
        before = self.pressure
        places = asyncio.Semaphore(self.concurrency)
        counts: dict[str, int] = {}
        origins = []
        for task in tasks:
            index = counts[task.id] = counts.get(task.id, -1) + 1
            origins.append(self._origin(task, index))
        errors: list[ReplRLError] = []
        cut: list[int] = []
        failures: Sequence[Exception] = ()
        try:
            async with asyncio.TaskGroup() as rollouts:
                running = {
                    index: rollouts.create_task(self._one(origins[index], temperature, places, errors, cut))
                    for index in self.lengths.longest_first(tasks)
                }
                if referee is not None:
                    await referee.decide(running)
        except ExceptionGroup as group:
            failures = group.exceptions
        if failures:
            raise failures[0]  # not inside the block above: it keeps its own cause
        if 2 * len(errors) > len(tasks):
            raise errors[0]
        if errors:
            _log.warning("%d of %d rollouts dropped: %s", len(errors), len(tasks), errors[0])
        after = self.pressure
        self.pressed.latest = after.since(before) if after and before else Pressure()
        return running, sum(cut)

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """What the sampler counts in a step's rollouts, the last that were collected; what giving up early saved, where
        that is on; and how often a session lost its place in the engine's cache meanwhile, where there is one."""
        counted = dict(self.sampler.metrics(trajectories))
        if self.pressure is not None:
            counted["preemptions"] = self.pressed.latest.preempted
        if isinstance(self.sampler, ReplSampler) and self.sampler.give_up_after:
            counted["lines_saved"] = lines_saved(trajectories, self.limits.max_lines)
        return counted

    def _origin(self, task: Task, index: int) -> Origin:
        step = self.engine.policy_step
        number = f"{self.replica}.{index}" if self.replica else str(index)
        key = f"{self.seed}/{step}/{task.id}/{number}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1
        version = ".".join(map(str, self.sandbox.python_version))
        try:
            prompt = self.sampler.prompt(task, self.renderer, self.template, version)
        except ReplRLError:
            raise
        except Exception as error:
            raise UserCodeError(f"{type(self.sampler).__name__}.prompt raised {error!r} on task {task.id}") from error
        return Origin(f"{step}-{task.id}-{number}", task, prompt, seed, step)

    async def _one(
        self,
        origin: Origin,
        temperature: float,
        places: asyncio.Semaphore,
        errors: list[ReplRLError],
        cut: list[int],
    ) -> Trajectory:
        """A whole rollout. One that is cancelled adds its tokens to `cut`, one that fails in a sampler its error."""
        if len(origin.prompt.token_ids) >= self.engine.context_tokens:
            errors.append(_too_long(origin, self.engine.context_tokens))
            failure = Failure(FailureKind.PROMPT_TOO_LONG, str(errors[-1]))
            return Record(origin).trajectory(Stop.FAULT, 0.0, failure, None)
        async with (
            places,
            self.engine.session(origin.prompt.token_ids, Sampling(temperature, origin.seed)) as plain,
            ahead(plain, self.tally) if self.sampler.optimistic else nullcontext(plain) as session,
            Episode(origin, session, self.sandbox, self.renderer, self.limits, self.engine.context_tokens) as episode,
        ):
            try:
                await self._drive(episode)
            except RolloutFailure as failure:
                episode.fail(failure)
            except UserCodeError as error:
                errors.append(error)
                episode.fail(error)
            except asyncio.CancelledError:
                cut.append(len(plain.ids) - len(origin.prompt.token_ids))
                raise
            episode.finish()
            trajectory = episode.trajectory()
        if trajectory.failure is not None:
            return trajectory
        try:
            outcome = await graded(origin.task, trajectory.answer, self.sandbox)
        except asyncio.CancelledError:
            cut.append(len(trajectory.completion_ids))
            raise
        except SandboxFault as fault:
            return replace(trajectory, stop=Stop.FAULT, failure=Failure.of(fault))
        return replace(trajectory, outcome=outcome)

    async def _drive(self, episode: Episode) -> None:
        """Run the sampler until it returns or its time is over.

        It runs in a task of its own: what swallows its cancellation can be left behind.
        """
        name = f"{type(self.sampler).__name__}.rollout"
        rollout = asyncio.create_task(self.sampler.rollout(episode), name=name)
        rollout.add_done_callback(lambda done: done.cancelled() or done.exception())  # who is cancelled does not ask
        try:
            await asyncio.wait({rollout}, timeout=self.limits.max_wall_s)
            if not rollout.done():
                episode.finish(Stop.WALL_CLOCK)
        finally:
            if not rollout.done():
                rollout.cancel()
                await asyncio.wait({rollout}, timeout=_CANCEL_S)
        if not rollout.done():
            raise UserCodeError(f"{name} goes on after it was cancelled; let asyncio.CancelledError pass")
        if rollout.cancelled():
            return
        error = rollout.exception()
        if isinstance(error, ConfigError):
            raise UserCodeError(f"{name}: {error}") from error
        if isinstance(error, ReplRLError | RolloutFailure) or not isinstance(error, Exception | None):
            raise error
        if error is not None:
            raise UserCodeError(f"{name} raised {error!r}") from error


def _too_long(origin: Origin, context_tokens: int) -> ConfigError:
    what = f"prompt of task {origin.task.id}, ids"
    remedy = f"the context holds {context_tokens}; leave the task out, or use a longer context"
    return ConfigError(what, len(origin.prompt.token_ids), remedy)
