"""Runner of many concurrent rollouts: one coroutine per rollout, no batch barrier."""

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
    """Everything that rollouts need: engine, sandbox, renderer, sampler and limits.

    Raises:
        ConfigError: engine and renderer forbid different ids, so that the engine would sample from another policy.
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
    """Index of this process (>= 0). It is part of ids and seeds, so that no two processes play the same rollout."""
    group_judges: tuple[GroupJudge, ...] = ()
    """Judges that see all rollouts of a task collected in one call, and add to their outcomes."""
    concurrency: int = 64
    """Largest number of concurrent rollouts (>= 1). Others wait, so that consoles are leased only when they are
    used."""
    purpose: str = ""
    """Purpose of rollouts other than training and evaluation. It is part of ids, so that these stay unique."""
    lengths: Lengths = field(default_factory=Lengths, compare=False)
    """Length estimates by task family; the longest rollouts start first."""
    pressed: Pressed = field(default_factory=Pressed, compare=False)
    """Preemption statistics, for metrics only."""
    broken: Broken = field(default_factory=Broken, compare=False)
    """Fault counts of this process and of those that the run was resumed from."""
    host: Sequence[HostFunction] = ()
    """Host functions that lines may call."""
    host_models: Mapping[str, Model] = field(default_factory=dict)
    """Models that host functions query in place of the policy, by name."""
    host_places: Places = field(default_factory=Places, compare=False)
    """Concurrency limits of their calls, over all rollouts."""

    def __post_init__(self) -> None:
        # Different forbidden ids mean different distributions of engine and trainer.
        theirs, ours = self.engine.forbidden_ids, self.renderer.forbidden_ids
        if theirs != ours:
            remedy = f"the renderer forbids {len(ours)}; give open_engine(forbidden_ids=renderer.forbidden_ids)"
            raise ConfigError(f"forbidden ids of engine {self.engine.name}", len(theirs), remedy)

    @property
    def pressure(self) -> Pressure | None:
        """Preemption statistics since the engine was opened; None means that the engine has no shared KV cache."""
        return self.engine.pressure if isinstance(self.engine, Seated) else None

    @property
    def facts(self) -> Facts:
        """Runtime information of the opened engine, sandbox and sampler."""
        return Facts.of(self.engine, self.sandbox.name, self.sampler, self.renderer)

    @property
    def faults(self) -> Mapping[str, int]:
        """Fault counts since the run began, and the number of retries."""
        return self.broken.with_deaths(self.engine.deaths if isinstance(self.engine, Lasting) else 0)

    async def collect(
        self, tasks: Sequence[Task], temperature: float = 1.0, early: Early | None = None
    ) -> list[Trajectory]:
        """Play one rollout per task, and return the trajectories in order.

        A task that occurs g times gives a group of g rollouts. `early` marks prefetched rollouts of a later step, some
        of which may have ended. None means rollouts of the current policy.

        The list includes failed rollouts, with `stop == "fault"`. A rollout fails by an error of ours or of the
        sampler, or if its prompt fills the context.

        A rollout is first retried, with the same id and seed, if a `Lasting` engine died or its console was lost.
        Rollouts that ended before are kept. Trajectories depend on the concurrency only as far as the engine's sampling
        does.

        Raises:
            UserCodeError: the sampler failed in most rollouts, or a judge failed.
            ConfigError: most prompts do not fit into the context.
            BrokenDown: the engine died repeatedly, or every rollout lost its console in each attempt.
            EngineError, InvariantError: all rollouts are cancelled.
        """
        part = await self.part(tasks, temperature, early)
        weigh(part, self.sandbox.name)
        return await judged_together(self.group_judges, tasks, part.trajectories)

    async def part(self, tasks: Sequence[Task], temperature: float = 1.0, early: Early | None = None) -> Part:
        """Play rollouts as `collect` does, but only note failed ones, and run no group judge."""
        before = self.pressure or Pressure()
        batch = early or Early(self.engine.policy_step, asyncio.Semaphore(self.concurrency))
        ended = dict(batch.finished)
        counts: dict[str, int] = {}
        origins = []
        # The index counts the rollouts of one task; id and seed follow from it.
        for task in tasks:
            index = counts[task.id] = counts.get(task.id, -1) + 1
            origins.append(self._origin(task, index, temperature, batch.policy_step))
        notes = Notes()
        # Start the longest rollouts first; `batch.places` limits the number that run.
        async with at_once() as rollouts:
            running = {
                index: rollouts.create_task(self._one(origins[index], temperature, batch.places, notes))
                for index in self.lengths.longest_first(tasks)
                if index not in ended
            }
            # Note each rollout as soon as it ends, so that a checkpoint taken meanwhile includes it.
            for index, rollout in running.items():
                rollout.add_done_callback(partial(batch.note, index))
        played = [ended[index] if index in ended else running[index].result() for index in range(len(tasks))]
        if early is None:  # otherwise rollouts of other steps run too, and their caller does this
            self.pressed.latest = (self.pressure or Pressure()).since(before)
            self.learn_lengths(tasks, played)
        return Part(tuple(played), notes)

    def learn_lengths(self, tasks: Sequence[Task], played: Sequence[Trajectory]) -> None:
        """Update the length estimates with finished rollouts.

        The caller of prefetched rollouts does this once their step comes. The order of rollouts started meanwhile then
        does not depend on timing, and a resumed run counts no rollout twice.
        """
        for task, trajectory in zip(tasks, played, strict=True):
            self.lengths.learn(task, trajectory)

    async def group(self, task: Task, size: int, temperature: float = 1.0, early: Early | None = None) -> Part:
        """Play all rollouts of one task, group judges included. Failed rollouts are only noted."""
        tasks = [task] * size
        part = await self.part(tasks, temperature, early)
        judged = await judged_together(self.group_judges, tasks, part.trajectories)
        return replace(part, trajectories=tuple(judged), unjudged=part.trajectories if self.group_judges else ())

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the metrics of the last collected step: those of the sampler, and those of `counted`."""
        preempted = None if self.pressure is None else self.pressed.latest.preempted
        return counted(self.sampler, self.limits, bool(self.host), trajectories, preempted, self.faults)

    def _origin(self, task: Task, index: int, temperature: float, step: int) -> Origin:
        number = f"{self.replica}.{index}" if self.replica else str(index)
        # The seed follows from names alone, so that a resumed run gets the same one.
        seed = seed_of(f"{self.seed}/{step}/{task.id}/{number}")
        kind = {1.0: "", 0.0: "greedy"}.get(temperature, f"t{temperature:g}")
        id = "-".join(filter(None, (str(step), task.id, number, kind, self.purpose)))
        return Origin(id, task, self.prompt(task), seed, step)

    def _offered(self, depth: int) -> Sequence[HostFunction]:
        return [function for function in self.host if not function.depth or depth < function.depth]

    def prompt(self, task: Task, depth: int = 0) -> Prompt:
        """Return the prompt of every rollout of `task` at a nesting `depth`; a top-level rollout has depth 0."""
        version = ".".join(map(str, self.sandbox.python_version))
        # The policy sees only the host functions that it can call at this depth.
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
        """Play a whole rollout, with retries after a fault of ours."""
        if len(origin.prompt.token_ids) >= self.engine.context_tokens:
            return too_long(origin, self.engine.context_tokens, notes)
        outlived = isinstance(self.engine, Lasting)
        play = partial(self._attended, origin, temperature, 0, places)
        return await again(play, notes, self.broken, outlived=outlived)

    async def play(self, origin: Origin, temperature: float, depth: int) -> Trajectory:
        """See `Player.play`. An error of the sampler fails only this rollout."""
        # A crash of the engine is not retried here: it ends the calling rollout, which starts again as a whole.
        play = partial(self._attended, origin, temperature, depth, nullcontext())
        return await again(play, Notes(), self.broken, outlived=False)

    async def follow(self, origin: Origin, temperature: float, followed: Followed) -> Trajectory:
        """Play a rollout that a client follows live.

        It is not graded, and never retried, because the client has already received its lines. A failed rollout has its
        `failure` set.

        Raises:
            EngineError, InvariantError, UserCodeError: as raised by the engine or by a hook of the sampler.
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
        """Play a rollout between the hooks of its sampler; a top-level rollout (depth 0) is also graded."""
        hooks = Hooks(self.sampler, self.limits.max_wall_s)
        try:
            # The slot is free again before the rollout is graded.
            async with places:
                trajectory, claims = await self._sampled(origin, temperature, depth, notes, hooks, followed)
            if depth == 0 and followed is None and trajectory.failure is None:
                trajectory = await settling(settled(origin.task, trajectory, claims, self.sandbox), trajectory, notes)
        except BaseException as error:
            # Free the sampler's resources even if the rollout is cancelled or the run stops.
            await hooks.farewell(origin.id, error)
            raise
        failed = await hooks.farewell(origin.id, trajectory)
        if failed is None or trajectory.failure is not None:
            return trajectory
        # An error of `on_end` drops a rollout that is otherwise fine.
        notes.errors.append(failed)
        return replace(trajectory.ungraded(), stop=Stop.FAULT, failure=Failure.of(failed))

    async def _sampled(
        self, origin: Origin, temperature: float, depth: int, notes: Notes, hooks: Hooks, followed: Followed | None
    ) -> tuple[Trajectory, Claims]:
        """Sample one rollout, and return it without a grade, with the claims of its sampler."""
        sampling = Sampling(temperature, origin.seed, nested=depth > 0)
        stage, offered = Stage(self, origin, temperature, depth, 0), self._offered(depth)
        host, context = HostSession(offered, self.host_places, stage), self.engine.context_tokens
        async with (
            self.engine.session(origin.prompt.token_ids, sampling) as session,
            Episode(
                origin, session, self.sandbox, self.renderer, self.limits, context, host, followed or UNFOLLOWED
            ) as episode,
        ):
            # Only these two errors are failures of this rollout alone.
            try:
                await hooks.play(episode)
            except RolloutFailure as failure:
                episode.fail(failure)
            except UserCodeError as error:
                notes.errors.append(error)
                episode.fail(error)
            # The caller may retry a rollout that lost its console.
            if episode.lost is not None:
                notes.lost.append(episode.lost)
            episode.finish()
            return episode.trajectory(), episode.claims
