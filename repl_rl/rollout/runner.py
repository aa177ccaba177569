"""Runs many rollouts at once: every rollout its own coroutine, no batch barrier."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from repl_rl.engine.base import Engine, Lasting, Pressure, Sampling, Seated
from repl_rl.errors import ConfigError, ReplRLError, RolloutFailure, UserCodeError
from repl_rl.judges import GroupJudge, judged_together, settled
from repl_rl.record.outcome import Claims
from repl_rl.record.record import UNFOLLOWED, Followed, Origin, seed_of
from repl_rl.record.trajectory import Failure, Prompt, Stop, Trajectory
from repl_rl.rollout.again import Broken, Notes, Part, again, settling, too_long, weigh
from repl_rl.rollout.at_once import at_once
from repl_rl.rollout.early import Early
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.facts import Facts, Pressed, counted
from repl_rl.rollout.hooks import Hooks
from repl_rl.rollout.host import HostFunction
from repl_rl.rollout.host_session import HostSession, Model, Places, Stage
from repl_rl.rollout.lengths import Lengths
from repl_rl.rollout.limits import RolloutLimits
from repl_rl.rollout.prompts import declaring
from repl_rl.rollout.renderer import Renderer
from repl_rl.rollout.sampler import RolloutSampler
from repl_rl.sandbox.base import Sandbox
from repl_rl.tasks import Task


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
    group_judges: tuple[GroupJudge, ...] = ()
    """They see all rollouts of a task that were collected in one call, and add to their outcomes."""
    concurrency: int = 64
    """Rollouts under way at once (>= 1); the rest wait for a place, so that kernels are leased no faster than used."""
    purpose: str = ""
    """What they are played for beside training and evaluation: part of ids, so that no two rollouts share one."""
    lengths: Lengths = field(default_factory=Lengths, compare=False)
    """Of rollouts so far, by family of tasks: the longest begin first."""
    pressed: Pressed = field(default_factory=Pressed, compare=False)
    """Figures only."""
    broken: Broken = field(default_factory=Broken, compare=False)
    """What broke under rollouts, in processes that this run was resumed from too."""
    host: Sequence[HostFunction] = ()
    """Functions of the host that lines may call."""
    host_models: Mapping[str, Model] = field(default_factory=dict)
    """Models that they ask in place of the policy, by name."""
    host_places: Places = field(default_factory=Places, compare=False)
    """Of their calls that run at the same time."""

    def __post_init__(self) -> None:
        theirs, ours = self.engine.forbidden_ids, self.renderer.forbidden_ids
        if theirs != ours:
            remedy = f"the renderer forbids {len(ours)}; give open_engine(forbidden_ids=renderer.forbidden_ids)"
            raise ConfigError(f"forbidden ids of engine {self.engine.name}", len(theirs), remedy)

    @property
    def pressure(self) -> Pressure | None:
        """What a cache that was too small cost since the engine was opened; None: the engine has no such cache."""
        return self.engine.pressure if isinstance(self.engine, Seated) else None

    @property
    def facts(self) -> Facts:
        """What was opened."""
        return Facts.of(self.engine, self.sandbox.name, self.sampler, self.renderer)

    @property
    def faults(self) -> Mapping[str, int]:
        """What broke under rollouts since the run began, and how many were played again for it."""
        return self.broken.with_deaths(self.engine.deaths if isinstance(self.engine, Lasting) else 0)

    async def collect(
        self, tasks: Sequence[Task], temperature: float = 1.0, early: Early | None = None
    ) -> list[Trajectory]:
        """One trajectory a task, in order. A task that is named g times gives a group of g rollouts.

        `early`: they are those of a step to come, of which some may have ended. None: of the policy of now.

        A rollout that failed on our side or in the sampler, or whose prompt fills the context, is in the list too,
        with `stop == "fault"`. One under which a `Lasting` engine died, or whose console was lost, is played again from
        its start first, with the same id and seed; those that had ended are kept. Trajectories do not depend on the
        concurrency, as far as the engine's draws do not.

        Raises:
            UserCodeError: the sampler failed in most rollouts, or a judge failed.
            ConfigError: most prompts do not fit into the context.
            BrokenDown: the engine died again and again, or every rollout has lost its console as often.
            EngineError, InvariantError: all rollouts are cancelled.
        """
        part = await self.part(tasks, temperature, early)
        weigh(part, self.sandbox.name)
        return await judged_together(self.group_judges, tasks, part.trajectories)

    async def part(self, tasks: Sequence[Task], temperature: float = 1.0, early: Early | None = None) -> Part:
        """As `collect`; what went wrong is told and not weighed, and no group judge has looked at it."""
        before = self.pressure or Pressure()
        batch = early or Early(self.engine.policy_step, asyncio.Semaphore(self.concurrency))
        ended = dict(batch.finished)
        counts: dict[str, int] = {}
        origins = []
        for task in tasks:
            index = counts[task.id] = counts.get(task.id, -1) + 1
            origins.append(self._origin(task, index, temperature, batch.policy_step))
        notes = Notes()
        async with at_once() as rollouts:
            running = {
                index: rollouts.create_task(self._one(origins[index], temperature, batch.places, notes))
                for index in self.lengths.longest_first(tasks)
                if index not in ended
            }
            for index, rollout in running.items():
                rollout.add_done_callback(partial(batch.note, index))
        played = [ended[index] if index in ended else running[index].result() for index in range(len(tasks))]
        if early is None:  # else others are under way, and whoever began them knows since when
            self.pressed.latest = (self.pressure or Pressure()).since(before)
            self.learn_lengths(tasks, played)
        return Part(tuple(played), notes)

    def learn_lengths(self, tasks: Sequence[Task], played: Sequence[Trajectory]) -> None:
        """Take finished rollouts into account. Whoever begins them early does so when their step comes: what is begun
        in between has an order that no clock decides, and a run that goes on learns of none twice."""
        for task, trajectory in zip(tasks, played, strict=True):
            self.lengths.learn(task, trajectory)

    async def group(self, task: Task, size: int, temperature: float = 1.0, early: Early | None = None) -> Part:
        """All rollouts of one task, from their beginning to the group judges. What went wrong is not weighed."""
        tasks = [task] * size
        part = await self.part(tasks, temperature, early)
        judged = await judged_together(self.group_judges, tasks, part.trajectories)
        return replace(part, trajectories=tuple(judged), unjudged=part.trajectories if self.group_judges else ())

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """What the sampler counts in a step's rollouts, the last that were collected, and what else `counted` tells."""
        preempted = None if self.pressure is None else self.pressed.latest.preempted
        return counted(self.sampler, self.limits, bool(self.host), trajectories, preempted, self.faults)

    def _origin(self, task: Task, index: int, temperature: float, step: int) -> Origin:
        number = f"{self.replica}.{index}" if self.replica else str(index)
        seed = seed_of(f"{self.seed}/{step}/{task.id}/{number}")
        kind = {1.0: "", 0.0: "greedy"}.get(temperature, f"t{temperature:g}")
        id = "-".join(filter(None, (str(step), task.id, number, kind, self.purpose)))
        return Origin(id, task, self.prompt(task), seed, step)

    def _offered(self, depth: int) -> Sequence[HostFunction]:
        return [function for function in self.host if not function.depth or depth < function.depth]

    def prompt(self, task: Task, depth: int = 0) -> Prompt:
        """What every rollout of `task` begins with, at a `depth` (0: it stands for itself)."""
        version = ".".join(map(str, self.sandbox.python_version))
        told = replace(task, question=declaring(task.question, [f.declared for f in self._offered(depth)]))
        try:
            return self.sampler.prompt(told, self.renderer, self.template, version)
        except ReplRLError:
            raise
        except Exception as error:
            raise UserCodeError(f"{type(self.sampler).__name__}.prompt raised {error!r} on task {task.id}") from error

    def asked(self, model: str) -> Model:
        """See `Player.asked`."""
        return self.host_models[model] if model else Model(self.engine, self.renderer)

    def begin(self, task: Task, id: str, asked_by: Origin, depth: int) -> Origin:
        """See `Player.begin`."""
        return Origin(id, task, self.prompt(task, depth), seed_of(f"{asked_by.seed}/{id}"), asked_by.policy_step)

    async def _one(self, origin: Origin, temperature: float, places: asyncio.Semaphore, notes: Notes) -> Trajectory:
        """A whole rollout, played again where something of ours broke under it."""
        if len(origin.prompt.token_ids) >= self.engine.context_tokens:
            return too_long(origin, self.engine.context_tokens, notes)
        outlived = isinstance(self.engine, Lasting)
        play = partial(self._attended, origin, temperature, 0, places)
        return await again(play, notes, self.broken, outlived=outlived)

    async def play(self, origin: Origin, temperature: float, depth: int) -> Trajectory:
        """See `Player.play`. An error of the sampler there is a failure of that rollout alone."""
        play = partial(self._attended, origin, temperature, depth, nullcontext())
        return await again(play, Notes(), self.broken, outlived=False)

    async def follow(self, origin: Origin, temperature: float, followed: Followed) -> Trajectory:
        """A rollout that somebody follows while it goes: nobody grades it, and it is never played again, since what was
        told stays told. Where it failed, its `failure` says so.

        Raises:
            EngineError, InvariantError, UserCodeError: as the engine or a hook of the sampler raised it.
        """
        return await self._attended(origin, temperature, 0, nullcontext(), Notes(), followed)

    async def _attended(
        self,
        origin: Origin,
        temperature: float,
        depth: int,
        places: AbstractAsyncContextManager[None],
        notes: Notes,
        followed: Followed | None = None,
    ) -> Trajectory:
        """A rollout between the hooks of its sampler; graded where it stands for itself, at depth 0."""
        hooks = Hooks(self.sampler, self.limits.max_wall_s)
        try:
            async with places:
                trajectory, claims = await self._sampled(origin, temperature, depth, notes, hooks, followed)
            if depth == 0 and followed is None and trajectory.failure is None:
                trajectory = await settling(settled(origin.task, trajectory, claims, self.sandbox), trajectory, notes)
        except BaseException as error:
            await hooks.farewell(origin.id, error)
            raise
        failed = await hooks.farewell(origin.id, trajectory)
        if failed is None or trajectory.failure is not None:
            return trajectory
        notes.errors.append(failed)
        return replace(trajectory.ungraded(), stop=Stop.FAULT, failure=Failure.of(failed))

    async def _sampled(
        self, origin: Origin, temperature: float, depth: int, notes: Notes, hooks: Hooks, followed: Followed | None
    ) -> tuple[Trajectory, Claims]:
        """A rollout, ungraded, and what its sampler claims for it."""
        sampling = Sampling(temperature, origin.seed, nested=depth > 0)
        stage, offered = Stage(self, origin, temperature, depth, 0), self._offered(depth)
        host, context = HostSession(offered, self.host_places, stage), self.engine.context_tokens
        async with (
            self.engine.session(origin.prompt.token_ids, sampling) as session,
            Episode(
                origin, session, self.sandbox, self.renderer, self.limits, context, host, followed or UNFOLLOWED
            ) as episode,
        ):
            try:
                await hooks.play(episode)
            except RolloutFailure as failure:
                episode.fail(failure)
            except UserCodeError as error:
                notes.errors.append(error)
                episode.fail(error)
            if episode.lost is not None:
                notes.lost.append(episode.lost)
            episode.finish()
            return episode.trajectory(), episode.claims
