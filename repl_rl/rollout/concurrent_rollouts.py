"""Runner of many concurrent rollouts: one coroutine per rollout, without a batch barrier.

- the hooks of a sampler with their time limits
- the runner `Rollouts`, with its settings and its results
- errors: of a group of coroutines, during grading, of prompts, and of a whole batch
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from repl_rl.deprecations import keeps_old_names
from repl_rl.engine.base import Engine, Sampling
from repl_rl.errors import (
    ConfigError,
    ReplRLError,
    RolloutFailure,
    SandboxFault,
    SandboxLost,
    SetupError,
    UnrecoverableError,
    UserCodeError,
)
from repl_rl.judges import grade_trajectory
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.rollout_hooks import BatchNotes, RolloutContext, RolloutHook, RunRollout
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.rollout_stats import RuntimeInfo
from repl_rl.rollout.sampler_base import RolloutSampler
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox.base import Sandbox
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Failure, FailureKind, Line, Observed, OutcomeClaims, Prompt, Stop, Trajectory
from repl_rl.trajectory.trajectory_builder import (
    UNFOLLOWED,
    EpisodeRecorder,
    RolloutObserver,
    RolloutSpec,
    derive_seed,
)

_CANCEL_S = 5.0
"""Time for a cancelled sampler to clean up, and time limit of `on_end`, seconds."""
_log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Settings of all rollouts of a process."""

    template: str = "base"
    """Prompt template: see `Renderer.build_prompt`."""
    seed: int = 0
    replica: int = 0
    """Index of this process (>= 0). It is part of ids and seeds, so that no two processes play the same rollout."""
    concurrency: int = 64
    """Largest number of concurrent rollouts (>= 1). Others wait, so that consoles are leased only when they are
    used."""
    purpose: str = ""
    """Purpose of rollouts other than training and evaluation. It is part of ids, so that these stay unique."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Rollouts that were played together (a batch or part of one), with their errors."""

    trajectories: tuple[Trajectory, ...]
    notes: BatchNotes = field(default_factory=BatchNotes)
    ungraded_trajectories: tuple[Trajectory, ...] = ()
    """Trajectories before group judges, for callers that need them. Empty means that they are the same."""

    @classmethod
    def merge(cls, results: "Sequence[BatchResult]") -> "BatchResult":
        """Merge several results into one."""
        notes = [result.notes for result in results]
        errors = [error for each in notes for error in each.errors]
        losses = [fault for each in notes for fault in each.lost_consoles]
        attempts = max((each.attempts for each in notes), default=1)
        trajectories = tuple(t for result in results for t in result.trajectories)
        return cls(trajectories, BatchNotes(errors, losses, sum(each.retries for each in notes), attempts))


@keeps_old_names
@dataclass(frozen=True, slots=True)
class Rollouts:
    """Everything that rollouts need: engine, sandbox, renderer, sampler and limits.

    Optional features are `hooks`: retries (`FaultRetries`), host functions (`HostFunctions`), group judges
    (`GroupJudging`), counts (`ProgressCounter`) and those of a user. `RolloutConfig.open_rollouts` adds those that its
    settings name.

    Raises:
        ConfigError: engine and renderer forbid different ids, so that the engine would sample from another policy.
    """

    engine: Engine
    sandbox: Sandbox
    renderer: Renderer
    sampler: RolloutSampler
    limits: RolloutLimits
    settings: RolloutSettings = RolloutSettings()
    hooks: tuple[RolloutHook, ...] = ()
    """Optional features, called in this order."""

    def __post_init__(self) -> None:
        # Different forbidden ids mean different distributions of engine and trainer.
        engine_ids, renderer_ids = self.engine.forbidden_ids, self.renderer.forbidden_ids
        if engine_ids != renderer_ids:
            remedy = f"the renderer forbids {len(renderer_ids)}; give open_engine(forbidden_ids=renderer.forbidden_ids)"
            raise ConfigError(f"forbidden ids of engine {self.engine.name}", len(engine_ids), remedy)
        # Read the file of a shipped template now, not while rollouts are played.
        self.renderer.preload_template(self.settings.template)

    @property
    def runtime_info(self) -> RuntimeInfo:
        """Runtime information of the opened engine, sandbox and sampler."""
        return RuntimeInfo.from_components(self.engine, self.sandbox.name, self.sampler, self.renderer)

    async def collect(self, tasks: Sequence[Task], temperature: float = 1.0) -> list[Trajectory]:
        """Play one rollout per task with the current policy, and return the trajectories in order.

        A task that occurs g times gives a group of g rollouts.

        The list includes failed rollouts, with `stop == "fault"`. A rollout fails by an error of ours or of the
        sampler, or if its prompt fills the context.

        With `FaultRetries`, a rollout is first retried, with the same id and seed, if a `HasRestarts` engine died or
        its console was lost. Rollouts that ended before are kept. Trajectories depend on the concurrency only as far as
        the engine's sampling does.

        Raises:
            UserCodeError: the sampler failed in most rollouts, or a judge failed.
            ConfigError: most prompts do not fit into the context.
            UnrecoverableError: the engine died repeatedly, or every rollout lost its console in each attempt.
            EngineError, InvariantError: all rollouts are cancelled.
        """
        batch = await self.run_batch(self.make_specs(tasks, temperature, self.engine.policy_step), temperature)
        return await self.finish_batch(tasks, batch)

    async def collect_group(self, task: Task, size: int, temperature: float = 1.0) -> BatchResult:
        """Play all rollouts of one task, `on_group_end` included. Failed rollouts are only noted."""
        tasks = [task] * size
        batch = await self.run_batch(self.make_specs(tasks, temperature, self.engine.policy_step), temperature)
        return await self.end_groups(tasks, batch)

    def make_specs(self, tasks: Sequence[Task], temperature: float, policy_step: int) -> list[RolloutSpec]:
        """Return the spec of one rollout per task. Ids and seeds include `policy_step`."""
        counts: dict[str, int] = {}
        specs = []
        # The index counts the rollouts of one task; id and seed follow from it.
        for task in tasks:
            index = counts[task.id] = counts.get(task.id, -1) + 1
            specs.append(self._make_spec(task, index, temperature, policy_step))
        return specs

    async def run_batch(self, specs: Sequence[RolloutSpec], temperature: float) -> BatchResult:
        """Play rollouts, started in the order of `specs`. Failed ones are only noted, and no group judge runs."""
        slots, notes = asyncio.Semaphore(self.settings.concurrency), BatchNotes()
        async with open_task_group() as rollouts:
            running = [rollouts.create_task(self.run_rollout(spec, temperature, slots, notes)) for spec in specs]
        return BatchResult(tuple(rollout.result() for rollout in running), notes)

    async def finish_batch(self, tasks: Sequence[Task], batch: BatchResult) -> list[Trajectory]:
        """Return the trajectories of a whole batch, given one task each. Raises the errors of `collect`."""
        check_failures(batch, self.sandbox.name)
        return list((await self.end_groups(tasks, batch)).trajectories)

    async def end_groups(self, tasks: Sequence[Task], batch: BatchResult) -> BatchResult:
        """Call `on_group_end` of each hook with whole groups, given one task per rollout."""
        trajectories = batch.trajectories
        for hook in self.hooks:
            trajectories = tuple(await hook.on_group_end(tasks, trajectories))
        if trajectories == batch.trajectories:
            return batch
        return replace(batch, trajectories=trajectories, ungraded_trajectories=batch.trajectories)

    async def run_rollout(
        self, spec: RolloutSpec, temperature: float, slots: asyncio.Semaphore, notes: BatchNotes
    ) -> Trajectory:
        """Play a top-level rollout and grade it. It waits for one of `slots`, and adds its errors to `notes`."""
        if len(spec.prompt.token_ids) >= self.engine.context_tokens:
            trajectory = make_overlong_trajectory(spec, self.engine.context_tokens, notes)
        else:
            context = RolloutContext(self, spec, temperature)
            run: RunRollout = partial(self._run_attempt, context, self._observer, slots)
            for hook in self.hooks:
                run = hook.wrap_rollout(context, run)
            trajectory = await run(notes)
        for hook in self.hooks:
            hook.on_rollout_end(spec.task, trajectory)
        return trajectory

    async def run_nested(self, spec: RolloutSpec, temperature: float, depth: int) -> Trajectory:
        """See `RolloutRunner.run_nested`. An error of the sampler fails only this rollout."""
        context = RolloutContext(self, spec, temperature, depth)
        run: RunRollout = partial(self._run_attempt, context, self._observer, nullcontext())
        for hook in self.hooks:
            run = hook.wrap_rollout(context, run)
        return await run(BatchNotes())

    async def run_observed(self, spec: RolloutSpec, temperature: float, observer: RolloutObserver) -> Trajectory:
        """Play a rollout that a client follows live.

        It is not graded, and never retried, because the client has already received its lines. A failed rollout has its
        `failure` set.

        Raises:
            EngineError, InvariantError, UserCodeError: as raised by the engine or by a hook of the sampler.
        """
        context = RolloutContext(self, spec, temperature)
        return await self._run_attempt(context, observer, nullcontext(), BatchNotes(), grades=False)

    def build_prompt(self, task: Task, depth: int = 0) -> Prompt:
        """See `RolloutRunner.build_prompt`."""
        version = ".".join(map(str, self.sandbox.python_version))
        shown_task = task
        for hook in self.hooks:
            shown_task = hook.declare(shown_task, depth)
        try:
            return self.sampler.prompt(shown_task, self.renderer, self.settings.template, version)
        except ReplRLError:
            raise
        except Exception as error:
            raise UserCodeError(f"{type(self.sampler).__name__}.prompt raised {error!r} on task {task.id}") from error

    def _make_spec(self, task: Task, index: int, temperature: float, step: int) -> RolloutSpec:
        settings = self.settings
        number = f"{settings.replica}.{index}" if settings.replica else str(index)
        # The seed follows from names alone, so that a resumed run gets the same one.
        seed = derive_seed(f"{settings.seed}/{step}/{task.id}/{number}")
        kind = {1.0: "", 0.0: "greedy"}.get(temperature, f"t{temperature:g}")
        id = "-".join(filter(None, (str(step), task.id, number, kind, settings.purpose)))
        return RolloutSpec(id, task, self.build_prompt(task), seed, step)

    @property
    def _observer(self) -> RolloutObserver:
        """Observer that calls the hooks which override `observe`. Without any, a line costs no call."""
        calls = [hook.observe for hook in self.hooks if type(hook).observe is not RolloutHook.observe]
        if not calls:
            return UNFOLLOWED

        def call_hooks(item: Line | Observed) -> None:
            for call in calls:
                call(item)

        return RolloutObserver(calls[0] if len(calls) == 1 else call_hooks)

    async def _run_attempt(
        self,
        context: RolloutContext,
        observer: RolloutObserver,
        slots: AbstractAsyncContextManager[None],
        notes: BatchNotes,
        *,
        grades: bool = True,
    ) -> Trajectory:
        """Play a rollout from its start, between the hooks of its sampler. A top-level rollout is also graded."""
        hooks, spec = SamplerHooks(self.sampler, self.limits.max_wall_s), context.spec
        try:
            # The slot is free again before the rollout is graded.
            async with slots:
                trajectory, claims = await self._run_sampler(context, observer, notes, hooks)
            if grades and context.depth == 0 and trajectory.failure is None:
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
        self, context: RolloutContext, observer: RolloutObserver, notes: BatchNotes, hooks: SamplerHooks
    ) -> tuple[Trajectory, OutcomeClaims]:
        """Sample one rollout. Return its trajectory without a grade, and the outcomes that its sampler has set."""
        spec, context_tokens = context.spec, self.engine.context_tokens
        sampling = Sampling(context.temperature, spec.seed, nested=context.depth > 0)
        async with (
            self.engine.session(spec.prompt.token_ids, sampling) as session,
            Episode(
                spec, session, self.sandbox, self.renderer, self.limits, context_tokens, observer=observer
            ) as episode,
        ):
            for hook in self.hooks:
                hook.on_rollout_start(context, episode)
            # Only these two errors are failures of this rollout alone.
            try:
                await hooks.run(episode)
            except RolloutFailure as failure:
                episode.fail(failure)
            except UserCodeError as error:
                notes.errors.append(error)
                episode.fail(error)
            # A hook may retry a rollout that lost its console.
            if episode.console_loss is not None:
                notes.lost_consoles.append(episode.console_loss)
            episode.finish()
            return episode.build_trajectory(), episode.outcome_claims


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


async def grade_or_fail(grading: Awaitable[Trajectory], trajectory: Trajectory, notes: BatchNotes) -> Trajectory:
    """Grade a rollout that has ended; a console that fails during grading drops the rollout."""
    try:
        return await grading
    except SandboxFault as fault:
        if isinstance(fault, SandboxLost):
            notes.lost_consoles.append(fault)
        return replace(trajectory, stop=Stop.FAULT, failure=Failure.from_error(fault))


def make_overlong_trajectory(spec: RolloutSpec, context_tokens: int, notes: BatchNotes) -> Trajectory:
    """Return the failed record of a rollout whose prompt fills the context, and note the error."""
    thing = f"prompt of task {spec.task.id}, ids"
    remedy = f"the context holds {context_tokens}; leave the task out, or use a longer context"
    # The error of the batch and the failure of the record have the same message.
    notes.errors.append(ConfigError(thing, len(spec.prompt.token_ids), remedy))
    failure = Failure(FailureKind.PROMPT_TOO_LONG, str(notes.errors[-1]))
    return EpisodeRecorder(spec).build_trajectory(Stop.FAULT, 0.0, failure, None)


def check_failures(batch: BatchResult, sandbox: str) -> None:
    """Log the errors of a batch, and raise one if it is pointless to continue.

    Raises:
        UnrecoverableError: every rollout lost its console in each attempt.
        ReplRLError: the sampler failed in most rollouts, or most prompts are too long.
    """
    errors, losses = batch.notes.errors, batch.notes.lost_consoles
    rollouts = len(batch.trajectories)
    if batch.notes.retries:
        _log.warning("%d rollouts played again: the engine died, or their consoles were lost", batch.notes.retries)
    if losses and len(losses) == rollouts:
        times = f", {batch.notes.attempts} times" if batch.notes.attempts > 1 else ""
        state = f"lost in each of {rollouts} rollouts{times} ({losses[0]})"
        raise UnrecoverableError(f"sandbox {sandbox}", state, "check it with `repl-rl sandbox check`") from losses[0]
    # A few errors only drop their rollouts. If most rollouts have one, the sampler or the prompts are wrong.
    if 2 * len(errors) > rollouts:
        raise errors[0]
    if errors or losses:
        _log.warning("%d of %d rollouts dropped: %s", len(errors) + len(losses), rollouts, [*errors, *losses][0])
