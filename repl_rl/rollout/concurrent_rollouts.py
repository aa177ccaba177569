"""Runner of many concurrent rollouts: one coroutine per rollout, without a batch barrier.

- the start order of rollouts: the longest first, so that none of them runs alone at the end
- the hooks of a sampler with their time limits
- the runner `Rollouts`
- a probe of the engine's weights
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from repl_rl.deprecations import keeps_old_names
from repl_rl.engine.base import Engine, HasPreemptionStats, HasRestarts, PreemptionStats, Sampling
from repl_rl.errors import ConfigError, ReplRLError, RolloutFailure, SetupError, UserCodeError
from repl_rl.judges import GroupJudge, apply_group_judges, grade_trajectory
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.host_functions import HostCallContext, HostCallSession, HostCallSlots, HostFunction, HostModel
from repl_rl.rollout.prefetch_rollouts import Prefetched
from repl_rl.rollout.prompts import add_function_declarations
from repl_rl.rollout.retry import (
    BatchNotes,
    BatchResult,
    FaultCounts,
    check_failures,
    grade_or_fail,
    make_overlong_trajectory,
    play_with_retries,
)
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.rollout_stats import PreemptionTracker, ProgressTracker, RuntimeInfo, compute_step_metrics
from repl_rl.rollout.sampler_base import RolloutSampler
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox.base import Sandbox
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Failure, OutcomeClaims, Prompt, Stop, Trajectory
from repl_rl.trajectory.trajectory_builder import EpisodeRecorder, RolloutObserver, RolloutSpec, derive_seed

_CANCEL_S = 5.0
"""Time for a cancelled sampler to clean up, and time limit of `on_end`, seconds."""
_NEWEST_WEIGHT = 0.2
"""Weight of the newest rollout in the mean of its family."""
_log = logging.getLogger(__name__)


class LengthEstimator:
    """Mean token count of the rollouts of each task family, for the start order. No trajectory depends on it."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}

    def update(self, task: Task, trajectory: Trajectory) -> None:
        """Include one finished rollout."""
        tokens = len(trajectory.completion_ids)
        mean = self._mean.get(task.family, tokens)
        self._mean[task.family] = mean + _NEWEST_WEIGHT * (tokens - mean)

    def state_dict(self) -> str:
        """Return the means as JSON."""
        return json.dumps(self._mean)

    def load_state_dict(self, memory: str) -> None:
        """Restore the state that `state_dict` returned."""
        self._mean = dict(json.loads(memory))

    def sort_longest_first(self, tasks: Sequence[Task]) -> list[int]:
        """Return the indices of `tasks`, those of the longest rollouts first.

        Unknown families come first, and rollouts of one task stay together.
        """
        expected = [self._mean.get(task.family, float("inf")) for task in tasks]
        first: dict[str, int] = {}
        for index, task in enumerate(tasks):
            first.setdefault(task.id, index)
        # Ties keep the order of the tasks, so that the start order is deterministic.
        return sorted(range(len(tasks)), key=lambda index: (-expected[index], first[tasks[index].id], index))


@dataclass(slots=True)
class SamplerHooks:
    """Hooks of a sampler in one rollout. `on_end` is called exactly once after `on_start`."""

    sampler: RolloutSampler
    timeout_s: float
    """Time limit of `on_start`, and of `rollout`, wall clock, seconds."""
    started: bool = False
    """True if `on_start` was called, and `on_end` was not."""

    async def run(self, episode: Episode) -> None:
        """Call `on_start`, then `rollout`.

        Raises:
            UserCodeError: a hook raised, or kept running after its cancellation.
            ReplRLError, RolloutFailure: as raised by a hook.
        """
        self.started = True
        await self._run_with_timeout("on_start", self.sampler.on_start(episode), episode)
        if not episode.ended:
            await self._run_with_timeout("rollout", self.sampler.rollout(episode), episode)

    async def call_on_end(self, rollout: str, result: Trajectory | BaseException) -> UserCodeError | None:
        """Call `on_end` if `on_start` was called, and return its error.

        The error is logged if `result` is an exception, because that one is raised.
        """
        if not self.started:
            return None
        self.started = False
        name = f"{type(self.sampler).__name__}.on_end"
        task = asyncio.create_task(self.sampler.on_end(rollout, result), name=name)
        try:
            # Unlike `wait_for`, this returns on time even if the hook swallows its cancellation.
            await asyncio.wait({task}, timeout=_CANCEL_S)
        except asyncio.CancelledError:
            await asyncio.wait({task}, timeout=_CANCEL_S)  # the hook may still finish
            raise
        finally:
            task.cancel()
        error = (
            _get_user_error(name, task) if task.done() else UserCodeError(f"{name} took longer than {_CANCEL_S:g} s")
        )
        if error is not None and isinstance(result, BaseException):
            _log.warning("rollout %s: %s", rollout, error)
        # An error of ours is raised as it is; any other one counts as an error of the sampler.
        elif isinstance(error, ReplRLError) and not isinstance(error, UserCodeError):
            raise error
        return error if isinstance(error, UserCodeError | None) else UserCodeError(f"{name} raised {error!r}")

    async def _run_with_timeout(self, hook: str, work: Coroutine[None, None, None], episode: Episode) -> None:
        """Run a hook until it returns or its time is over.

        It runs in a separate task, so that a hook that swallows its cancellation can be abandoned.
        """
        name = f"{type(self.sampler).__name__}.{hook}"
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(
            lambda finished: finished.cancelled() or finished.exception()
        )  # marks the error as retrieved
        try:
            await asyncio.wait({task}, timeout=self.timeout_s)
            if not task.done():
                episode.finish(Stop.WALL_CLOCK)
        finally:
            # Timed out, or cancelled from outside: give the hook time to clean up.
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_CANCEL_S)
        if not task.done():
            raise UserCodeError(f"{name} still runs after its cancellation; let asyncio.CancelledError pass")
        error = _get_user_error(name, task)
        if error is not None:
            raise error from error.__cause__


def _get_user_error(name: str, task: "asyncio.Task[None]") -> ReplRLError | RolloutFailure | None:
    """Return the error of user code as one of ours, or None if the code returned or was cancelled."""
    error = None if task.cancelled() else task.exception()
    # The sampler may let errors of the engine and the console pass.
    if isinstance(error, ReplRLError | RolloutFailure) and not isinstance(error, ConfigError):
        return error
    if not isinstance(error, Exception | None):
        raise error
    if error is None:
        return None
    if isinstance(error, SetupError):  # not caused by the sampler
        user_error = UserCodeError(str(error))
    else:
        user_error = UserCodeError(f"{name}: {error}" if isinstance(error, ConfigError) else f"{name} raised {error!r}")
    user_error.__cause__ = error
    return user_error


@keeps_old_names
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
    """Prompt template: see `Renderer.build_prompt`."""
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
    length_estimator: LengthEstimator = field(default_factory=LengthEstimator, compare=False)
    """Length estimates by task family; the longest rollouts start first."""
    preemption_tracker: PreemptionTracker = field(default_factory=PreemptionTracker, compare=False)
    """Preemption statistics, for metrics only."""
    progress: ProgressTracker = field(default_factory=ProgressTracker, compare=False)
    """Counts of rollouts and tokens, for displays only."""
    fault_counts: FaultCounts = field(default_factory=FaultCounts, compare=False)
    """Fault counts of this process and of those that the run was resumed from."""
    host_functions: Sequence[HostFunction] = ()
    """Host functions that lines may call."""
    host_models: Mapping[str, HostModel] = field(default_factory=dict)
    """Models that host functions query in place of the policy, by name."""
    host_call_slots: HostCallSlots = field(default_factory=HostCallSlots, compare=False)
    """Concurrency limits of their calls, over all rollouts."""

    def __post_init__(self) -> None:
        # Different forbidden ids mean different distributions of engine and trainer.
        engine_ids, renderer_ids = self.engine.forbidden_ids, self.renderer.forbidden_ids
        if engine_ids != renderer_ids:
            remedy = f"the renderer forbids {len(renderer_ids)}; give open_engine(forbidden_ids=renderer.forbidden_ids)"
            raise ConfigError(f"forbidden ids of engine {self.engine.name}", len(engine_ids), remedy)

    @property
    def preemptions(self) -> PreemptionStats | None:
        """Preemption statistics since the engine was opened; None means that the engine has no shared KV cache."""
        return self.engine.preemptions if isinstance(self.engine, HasPreemptionStats) else None

    @property
    def runtime_info(self) -> RuntimeInfo:
        """Runtime information of the opened engine, sandbox and sampler."""
        return RuntimeInfo.from_components(self.engine, self.sandbox.name, self.sampler, self.renderer)

    @property
    def faults(self) -> Mapping[str, int]:
        """Fault counts since the run began, and the number of retries."""
        return self.fault_counts.with_engine_crashes(
            self.engine.crash_count if isinstance(self.engine, HasRestarts) else 0
        )

    async def collect(
        self, tasks: Sequence[Task], temperature: float = 1.0, early: Prefetched | None = None
    ) -> list[Trajectory]:
        """Play one rollout per task, and return the trajectories in order.

        A task that occurs g times gives a group of g rollouts. `early` marks prefetched rollouts of a later step, some
        of which may have ended. None means rollouts of the current policy.

        The list includes failed rollouts, with `stop == "fault"`. A rollout fails by an error of ours or of the
        sampler, or if its prompt fills the context.

        A rollout is first retried, with the same id and seed, if a `HasRestarts` engine died or its console was lost.
        Rollouts that ended before are kept. Trajectories depend on the concurrency only as far as the engine's sampling
        does.

        Raises:
            UserCodeError: the sampler failed in most rollouts, or a judge failed.
            ConfigError: most prompts do not fit into the context.
            UnrecoverableError: the engine died repeatedly, or every rollout lost its console in each attempt.
            EngineError, InvariantError: all rollouts are cancelled.
        """
        batch = await self.collect_ungraded(tasks, temperature, early)
        check_failures(batch, self.sandbox.name)
        return await apply_group_judges(self.group_judges, tasks, batch.trajectories)

    async def collect_ungraded(
        self, tasks: Sequence[Task], temperature: float = 1.0, early: Prefetched | None = None
    ) -> BatchResult:
        """Play rollouts as `collect` does, but only note failed ones, and run no group judge."""
        earlier_preemptions = self.preemptions or PreemptionStats()
        batch = early or Prefetched(self.engine.policy_step, asyncio.Semaphore(self.concurrency))
        finished = dict(batch.finished_rollouts)
        counts: dict[str, int] = {}
        specs = []
        # The index counts the rollouts of one task; id and seed follow from it.
        for task in tasks:
            index = counts[task.id] = counts.get(task.id, -1) + 1
            specs.append(self._make_spec(task, index, temperature, batch.policy_step))
        notes = BatchNotes()
        # Start the longest rollouts first; `batch.slots` limits the number that run.
        async with open_task_group() as rollouts:
            running = {
                index: rollouts.create_task(self._run_with_retries(specs[index], temperature, batch.slots, notes))
                for index in self.length_estimator.sort_longest_first(tasks)
                if index not in finished
            }
            # Note each rollout as soon as it ends, so that a checkpoint taken meanwhile includes it.
            for index, rollout in running.items():
                rollout.add_done_callback(partial(batch.record_result, index))
        trajectories = [
            finished[index] if index in finished else running[index].result() for index in range(len(tasks))
        ]
        if early is None:  # otherwise rollouts of other steps run too, and their caller does this
            self.preemption_tracker.last_batch = (self.preemptions or PreemptionStats()).subtract(earlier_preemptions)
            self.learn_lengths(tasks, trajectories)
        return BatchResult(tuple(trajectories), notes)

    def learn_lengths(self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> None:
        """Update the length estimates with finished rollouts.

        The caller of prefetched rollouts does this once their step comes. The order of rollouts started meanwhile then
        does not depend on timing, and a resumed run counts no rollout twice.
        """
        for task, trajectory in zip(tasks, trajectories, strict=True):
            self.length_estimator.update(task, trajectory)

    async def collect_group(
        self, task: Task, size: int, temperature: float = 1.0, early: Prefetched | None = None
    ) -> BatchResult:
        """Play all rollouts of one task, group judges included. Failed rollouts are only noted."""
        tasks = [task] * size
        batch = await self.collect_ungraded(tasks, temperature, early)
        trajectories = await apply_group_judges(self.group_judges, tasks, batch.trajectories)
        return replace(
            batch,
            trajectories=tuple(trajectories),
            ungraded_trajectories=batch.trajectories if self.group_judges else (),
        )

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the metrics of the last collected step: those of the sampler, and those of `compute_step_metrics`."""
        preemptions = None if self.preemptions is None else self.preemption_tracker.last_batch.preempted
        return compute_step_metrics(
            self.sampler, self.limits, bool(self.host_functions), trajectories, preemptions, self.faults
        )

    def _make_spec(self, task: Task, index: int, temperature: float, step: int) -> RolloutSpec:
        number = f"{self.replica}.{index}" if self.replica else str(index)
        # The seed follows from names alone, so that a resumed run gets the same one.
        seed = derive_seed(f"{self.seed}/{step}/{task.id}/{number}")
        kind = {1.0: "", 0.0: "greedy"}.get(temperature, f"t{temperature:g}")
        id = "-".join(filter(None, (str(step), task.id, number, kind, self.purpose)))
        return RolloutSpec(id, task, self.build_prompt(task), seed, step)

    @property
    def _counter(self) -> RolloutObserver:
        return RolloutObserver(self.progress.count_item)

    def _get_offered_functions(self, depth: int) -> Sequence[HostFunction]:
        return [function for function in self.host_functions if not function.max_depth or depth < function.max_depth]

    def build_prompt(self, task: Task, depth: int = 0) -> Prompt:
        """Return the prompt of every rollout of `task` at a nesting `depth`; a top-level rollout has depth 0."""
        version = ".".join(map(str, self.sandbox.python_version))
        # The policy sees only the host functions that it can call at this depth.
        declared_task = replace(
            task,
            question=add_function_declarations(
                task.question, [f.declaration for f in self._get_offered_functions(depth)]
            ),
        )
        try:
            return self.sampler.prompt(declared_task, self.renderer, self.template, version)
        except ReplRLError:
            raise
        except Exception as error:
            raise UserCodeError(f"{type(self.sampler).__name__}.prompt raised {error!r} on task {task.id}") from error

    def get_model(self, model: str) -> HostModel:
        """See `NestedRolloutRunner.get_model`."""
        return self.host_models[model] if model else HostModel(self.engine, self.renderer)

    def make_nested_spec(self, task: Task, id: str, caller: RolloutSpec, depth: int) -> RolloutSpec:
        """See `NestedRolloutRunner.make_nested_spec`."""
        return RolloutSpec(
            id, task, self.build_prompt(task, depth), derive_seed(f"{caller.seed}/{id}"), caller.policy_step
        )

    async def _run_with_retries(
        self, spec: RolloutSpec, temperature: float, slots: asyncio.Semaphore, notes: BatchNotes
    ) -> Trajectory:
        """Play a whole rollout, with retries after a fault of ours."""
        if len(spec.prompt.token_ids) >= self.engine.context_tokens:
            trajectory = make_overlong_trajectory(spec, self.engine.context_tokens, notes)
        else:
            retry_crashes = isinstance(self.engine, HasRestarts)
            play = partial(self._run_with_hooks, spec, temperature, 0, slots)
            trajectory = await play_with_retries(play, notes, self.fault_counts, retry_crashes=retry_crashes)
        self.progress.count_rollout(trajectory)
        return trajectory

    async def run_nested(self, spec: RolloutSpec, temperature: float, depth: int) -> Trajectory:
        """See `NestedRolloutRunner.run_nested`. An error of the sampler fails only this rollout."""
        # A crash of the engine is not retried here: it ends the calling rollout, which starts again as a whole.
        play = partial(self._run_with_hooks, spec, temperature, depth, nullcontext())
        return await play_with_retries(play, BatchNotes(), self.fault_counts, retry_crashes=False)

    async def run_observed(self, spec: RolloutSpec, temperature: float, observer: RolloutObserver) -> Trajectory:
        """Play a rollout that a client follows live.

        It is not graded, and never retried, because the client has already received its lines. A failed rollout has its
        `failure` set.

        Raises:
            EngineError, InvariantError, UserCodeError: as raised by the engine or by a hook of the sampler.
        """
        return await self._run_with_hooks(spec, temperature, 0, nullcontext(), BatchNotes(), observer)

    async def _run_with_hooks(
        self,
        spec: RolloutSpec,
        temperature: float,
        depth: int,
        slots: AbstractAsyncContextManager[None],
        notes: BatchNotes,
        observer: RolloutObserver | None = None,
    ) -> Trajectory:
        """Play a rollout between the hooks of its sampler; a top-level rollout (depth 0) is also graded."""
        hooks = SamplerHooks(self.sampler, self.limits.max_wall_s)
        try:
            # The slot is free again before the rollout is graded.
            async with slots:
                trajectory, claims = await self._run_sampler(spec, temperature, depth, notes, hooks, observer)
            if depth == 0 and observer is None and trajectory.failure is None:
                trajectory = await grade_or_fail(
                    grade_trajectory(spec.task, trajectory, claims, self.sandbox), trajectory, notes
                )
        except BaseException as error:
            # Free the sampler's resources even if the rollout is cancelled or the run stops.
            await hooks.call_on_end(spec.id, error)
            raise
        hook_error = await hooks.call_on_end(spec.id, trajectory)
        if hook_error is None or trajectory.failure is not None:
            return trajectory
        # An error of `on_end` drops a rollout that is otherwise fine.
        notes.errors.append(hook_error)
        return replace(trajectory.without_outcome(), stop=Stop.FAULT, failure=Failure.from_error(hook_error))

    async def _run_sampler(
        self,
        spec: RolloutSpec,
        temperature: float,
        depth: int,
        notes: BatchNotes,
        hooks: SamplerHooks,
        observer: RolloutObserver | None,
    ) -> tuple[Trajectory, OutcomeClaims]:
        """Sample one rollout, and return it without a grade, with the claims of its sampler."""
        sampling = Sampling(temperature, spec.seed, nested=depth > 0)
        call_context, functions = HostCallContext(self, spec, temperature, depth, 0), self._get_offered_functions(depth)
        host, context = HostCallSession(functions, self.host_call_slots, call_context), self.engine.context_tokens
        async with (
            self.engine.session(spec.prompt.token_ids, sampling) as session,
            Episode(
                spec, session, self.sandbox, self.renderer, self.limits, context, host, observer or self._counter
            ) as episode,
        ):
            # Only these two errors are failures of this rollout alone.
            try:
                await hooks.run(episode)
            except RolloutFailure as failure:
                episode.fail(failure)
            except UserCodeError as error:
                notes.errors.append(error)
                episode.fail(error)
            # The caller may retry a rollout that lost its console.
            if episode.console_loss is not None:
                notes.lost_consoles.append(episode.console_loss)
            episode.finish()
            return episode.build_trajectory(), episode.outcome_claims


async def sample_probe_line(rollouts: Rollouts, task: Task) -> Trajectory:
    """Sample the first line of the current policy on `task`, which shows the engine's weights if no rollout can.

    No console runs the line, and it needs no concurrency slot.

    Raises:
        EngineError: as in the engine's session; the prompt fills the context.
    """
    engine, renderer = rollouts.engine, rollouts.renderer
    spec = RolloutSpec(
        f"{engine.policy_step}-{task.id}-probe", task, rollouts.build_prompt(task), 0, engine.policy_step
    )
    prompt, max_tokens = spec.prompt.token_ids, rollouts.limits.max_line_tokens
    # A nested session is admitted at once, however full the KV cache is.
    async with engine.session(prompt, Sampling(seed=spec.seed, nested=True)) as session:
        chunk = await session.sample((), max_tokens=max_tokens, stop_ids=renderer.stop_ids)
    record = EpisodeRecorder(spec)
    record.append_line(renderer.make_line(chunk, spec.prompt))
    return record.build_trajectory(Stop.FINISHED, 0.0, None, None)


@asynccontextmanager
async def open_task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Open a group of coroutines.

    If one fails, the others are cancelled, and its error is raised without an exception group.
    """
    failures: Sequence[Exception] = ()
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as raised:
        failures = raised.exceptions
    if failures:
        raise failures[0]  # outside the block above, so that the error keeps its own cause
