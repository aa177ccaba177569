"""Training from Python: from a `RolloutConfig` and settings of the update to a run folder with a trained policy.

`train` validates everything, opens the rollout source and trains. Rollouts run in this process, or in workers on a Ray
cluster. With several training processes, the first one owns the workers and hands out the rollouts to the others.
"""

import json
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import TracebackType

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from repl_rl.deprecations import deprecated_keywords
from repl_rl.errors import InvariantError
from repl_rl.models.resolve_model import BUNDLED, ResolvedModel
from repl_rl.ray.config import RayOptions, parse_workers
from repl_rl.ray.remote_rollouts import RolloutWorkers, WorkerPlan
from repl_rl.ray.worker import WorkerCluster, WorkerSetup
from repl_rl.ray.worker_pool import WorkerTimeouts
from repl_rl.rollout import RolloutClient, SyncRollouts
from repl_rl.rollout.length_estimator import LengthEstimator
from repl_rl.rollout.retry import FaultCounts
from repl_rl.rollout.rollout_stats import RolloutStats, RuntimeInfo
from repl_rl.rollout.sync_rollouts import ModifyRollouts
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.run_folder import RunFolder, check_same_settings
from repl_rl.settings.argument_parser import dump_toml
from repl_rl.tasks import Split, Task
from repl_rl.trainer.checkpoint_schedule import CheckpointSchedule
from repl_rl.trainer.config import TrainerConfig, choose_sampler_dtype
from repl_rl.trainer.config_checks import validate_gpu_memory, validate_run
from repl_rl.trainer.plugins.checkpoint import CheckpointManager, open_run
from repl_rl.trainer.plugins.periodic_evaluation import Evaluation
from repl_rl.trainer.rollout_source import OnStep, StepRecord
from repl_rl.trainer.train_loop import run_training
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.atomic_files import Json
from repl_rl.utils.processes import get_rank, get_world_size

log = logging.getLogger(__name__)

_SAVING = CheckpointSchedule()
"""Default checkpoint schedule of `train`."""


@deprecated_keywords(world="rollout_config", fleet="workers", saving="checkpoint")
def train(
    rollout_config: RolloutConfig,
    config: TrainerConfig | None = None,
    *,
    out: Path,
    train_tasks: int = 4096,
    on_step: OnStep | None = None,
    evaluation: Evaluation | None = None,
    resume: bool = False,
    checkpoint: CheckpointSchedule | None = _SAVING,
    workers: str = "local",
) -> Path:
    """Train the policy of `rollout_config` on its training tasks, as `repl-rl train` does, but without its evaluations.

    `repl-rl view` and `replay` read the run folder. In several processes, started by `accelerate launch`, each process
    runs its share of the rollouts, and the first one writes.

    Args:
        rollout_config: policy, tasks, engine, sandbox and limits of the rollouts.
        config: settings of the update; None means the defaults.
        out: new run folder: config.toml, metrics.jsonl, summary.json, trajectories/, checkpoints/, report.html.
        train_tasks: number of tasks to draw from, >= 1.
        on_step: called in the first process after each step, with its record and trajectories.
        evaluation: evaluation that runs at its interval in the first process; the best policy is
            `out/checkpoints/best`.
        resume: resume the run in `out` exactly, from its newest state, or from the beginning if it has no state. Its
            settings must be the same, except that steps may grow.
        checkpoint: checkpoint schedule; None disables checkpoints of the run's state.
        workers: place of the rollouts: `local` means this process, `ray` means workers; see docs/scaling.md.

    Returns:
        The folder of the trained policy, `out/checkpoints/final`.

    Raises:
        ConfigError: settings do not fit each other or this machine (see also `validate_gpu_memory`), or `out` exists
            and `resume` is False, or `out` is a run with other settings; nothing has been written yet.
        WeightSyncError: the log probabilities of the sampler and of the trainer differ.
    """
    # Validate everything before anything is written.
    trainer_config, main = config or TrainerConfig(), get_rank() == 0
    tasks = rollout_config.draw_tasks(Split.TRAIN, train_tasks)
    validate_run(rollout_config, trainer_config, len(tasks), workers)
    validate_gpu_memory(rollout_config, trainer_config, local=parse_workers(workers) is None)
    rollout_config.try_workspaces(tasks)
    if main:
        warn_about_learning_rate(rollout_config, trainer_config)
    settings = dump_toml(rollout_config) + dump_toml(trainer_config, "trainer")
    folder = RunFolder(out, overwrite=False, resume=resume, main=main)
    if resume and folder.exists and main:
        check_same_settings(out, settings)
    # A finished run needs no engine.
    if resume and folder.exists and folder.is_finished(trainer_config.steps):
        return folder.checkpoints_folder / "final"
    run_log = _RunLogger(folder, on_step)
    with (
        open_rollout_client(
            adapt_to_trainer(rollout_config, trainer_config), {task.id: task for task in tasks}, workers, get_rank()
        ) as source,
        open_run(folder, settings, resume, main=main) as state,
    ):
        # The run folder exists from here on.
        write_worker_notes(source, out)
        renderer = rollout_config.load_renderer()
        # Readers of the run folder show tokens without the tokenizer.
        if main:
            folder.write_tokens([renderer.decode((i,)) for i in range(len(renderer.tokenizer))])
        final = run_training(
            rollout_config.model_folder,
            renderer.tokenizer,
            [task.id for task in tasks],
            source,
            trainer_config,
            folder.checkpoints_folder,
            run_log.log_step,
            seed=rollout_config.seed,
            tell=run_log.log_fallback,
            evaluation=evaluation,
            keeper=CheckpointManager(folder.states_folder, checkpoint, state) if checkpoint is not None else None,
            sampled_in=rollout_config.dtype,
        )
        if main:
            run_log.write_summary(source, rollout_config.policy, trainer_config.steps)
    return final


def warn_about_learning_rate(rollout_config: RolloutConfig, config: TrainerConfig) -> None:
    """Log a warning if another model than the bundled policy gets the learning rate of the bundled policy.

    The command chooses the rate by the model. Python code has the defaults of the class.
    """
    if config.learning_rate == TrainerConfig().learning_rate and not rollout_config.is_bundled_kind:
        log.warning(
            "learning_rate is %g, the default for the bundled policy, and it ruins most pretrained models; for %s set "
            "TrainerConfig(learning_rate=...) to about 1e-6, or to 1e-5 with lora_rank",
            config.learning_rate,
            rollout_config.model,
        )


@dataclass
class _RunLogger:
    """Log of a training run in its folder: steps, fallbacks, and the summary at the end."""

    folder: RunFolder
    on_step: OnStep | None
    fallback_notes: list[str] = field(default_factory=list)

    def log_step(self, record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        self.folder.write_step(record.step, record.metrics, trajectories, record.credit)
        if self.on_step is not None:
            self.on_step(record, trajectories)

    def log_fallback(self, message: str) -> None:
        log.warning(message)
        self.fallback_notes.append(message)

    def write_summary(self, source: RolloutClient, policy: ResolvedModel, steps: int) -> None:
        info, stats = source.runtime_info, source.stats
        fallbacks = {"update_fallbacks": list(self.fallback_notes), "sampler_fallback": info.sampler_fallback}
        components = {"engine": info.engine, "engine_fallback": info.engine_fallback, "sandbox": info.sandbox}
        preemptions = asdict(stats.preemptions) if stats.preemptions is not None else None
        status = {"preemptions": preemptions, "faults": dict(stats.faults), **get_workers_status(source)}
        model = {"model": policy.reference, "model_fallback": policy.fallback}
        self.folder.write_summary({"status": "finished", **model, "steps": steps, **status, **components, **fallbacks})
        self.folder.write_report()


def open_rollout_client(
    rollout_config: RolloutConfig, tasks: Mapping[str, Task], workers: str, rank: int = 0
) -> AbstractContextManager[RolloutClient]:
    """Return the rollout source of a run, as a context manager.

    Args:
        rollout_config: rollout config, opened in this process or in every worker.
        tasks: training tasks, by id.
        workers: `local`, `ray` or `ray://HOST:PORT`, with options in parentheses.
        rank: rank of this process among those that train together.

    Raises:
        ConfigError: `workers` is unknown.
    """
    options = parse_workers(workers)
    if options is None:
        return SyncRollouts(partial(rollout_config.open_rollouts, rank), tasks)
    # Rank 0 owns the workers, and the other ranks get their rollouts from it.
    if rank:
        _, renderer = rollout_config.load_sampler_and_renderer()
        return FollowerRolloutClient(renderer.forbidden_ids, tasks)
    kind = RolloutWorkers if get_world_size() == 1 else LeaderRolloutWorkers
    return kind(_connect_to_ray(options), build_worker_plan(rollout_config, options), tasks)


def adapt_to_trainer(rollout_config: RolloutConfig, trainer: TrainerConfig) -> RolloutConfig:
    """Return `rollout_config` with a number format of the sampler whose log probabilities the trainer can check."""
    return replace(rollout_config, dtype=choose_sampler_dtype(trainer.dtype, rollout_config.dtype))


def build_worker_plan(
    rollout_config: RolloutConfig, options: RayOptions, timeouts: WorkerTimeouts | None = None, shared: bool = True
) -> WorkerPlan:
    """Return the plan of a worker pool. Raises ConfigError: sampler, prompt and policy do not fit each other."""
    sampler, _ = rollout_config.load_sampler_and_renderer()
    limits = timeouts or WorkerTimeouts(no_worker_timeout_s=options.startup_timeout_s)
    host = bool(rollout_config.host_functions)
    return WorkerPlan(
        build_worker_setup(rollout_config),
        sampler,
        rollout_config.rollout,
        host,
        rollout_config.concurrency,
        options.max_workers,
        limits,
        shared,
    )


def build_worker_setup(rollout_config: RolloutConfig) -> WorkerSetup:
    """Return the settings by which a worker opens `rollout_config`, without other settings of the run."""
    # The settings of a command are a subclass of `RolloutConfig`, and a worker needs only the fields of
    # `RolloutConfig`.
    values = {field.name: getattr(rollout_config, field.name) for field in fields(RolloutConfig)}
    if rollout_config.model != BUNDLED and Path(rollout_config.model).exists():
        values["model"] = str(
            rollout_config.model_folder.absolute()
        )  # a name on the hub is resolved on each machine instead
    # A worker starts in the same folder and finds the same modules, so that it can load code of the user.
    opener = pickle.dumps(partial(RolloutConfig(**values).open_rollouts, 0))
    return WorkerSetup(opener, 0, os.getcwd(), tuple(path for path in sys.path if path))


def write_worker_notes(source: RolloutClient, run: Path) -> None:
    """Let a worker pool write its status and logs into the run folder; other sources write nothing."""
    if isinstance(source, RolloutWorkers):
        source.write_notes(run)


def get_workers_status(source: RolloutClient) -> dict[str, Json]:
    """Return the status of a worker pool for the run's summary; empty for other sources."""
    return {"fleet": source.get_status()} if isinstance(source, RolloutWorkers) else {}


@contextmanager
def _connect_to_ray(options: RayOptions) -> Iterator[WorkerCluster]:
    """Start or join the Ray cluster, and yield its workers."""
    # Imported here because Ray is an optional dependency.
    with import_module("repl_rl.ray.rollout_actors").open_ray_cluster(options) as connection:
        yield connection.cluster


_ON_FIRST_PROCESS = "in the first process"
"""Engine and sandbox of a process that gets its rollouts from the first one."""
CollectFn = Callable[[Sequence[str]], Sequence[Trajectory]]
"""Function that returns one trajectory per task id."""


def collect_on_first_process(task_ids: Sequence[str], play: CollectFn) -> list[Trajectory]:
    """Return one trajectory per entry of `task_ids`; the first process plays for all, and all call this together.

    Args:
        task_ids: task ids of this process; may be empty.
        play: called in the first process with the ids of all processes in order; groups across two processes are whole.
    """
    requested: list[Sequence[str]] = gather_object([list(task_ids)])
    # The first process plays; each process takes its part of all trajectories.
    process = PartialState()
    all_trajectories = play([id for ids in requested for id in ids]) if process.is_main_process else None
    (trajectories,) = broadcast_object_list([all_trajectories])
    offset = sum(len(ids) for ids in requested[: process.process_index])
    return list(trajectories[offset : offset + len(task_ids)])


class LeaderRolloutWorkers(RolloutWorkers):
    """Worker pool in the process that owns it; only `collect` is called together with the other processes."""

    def collect(self, task_ids: Sequence[str], policy_step: int) -> Sequence[Trajectory]:
        """See `RolloutClient.collect`."""
        return collect_on_first_process(
            task_ids, lambda everyone: super(LeaderRolloutWorkers, self).collect(everyone, policy_step)
        )


class FollowerRolloutClient:
    """Context manager: the same worker pool in another process, which starts none. It satisfies `RolloutClient`."""

    stats = RolloutStats()
    """Empty statistics, because the first process reports for all."""

    def __init__(self, forbidden_ids: frozenset[int], tasks: Mapping[str, Task]) -> None:
        self.tasks = tasks
        self.runtime_info = RuntimeInfo(_ON_FIRST_PROCESS, None, _ON_FIRST_PROCESS, None, forbidden_ids)
        """Runtime information without engine and sandbox, because this process opens neither."""

    def __enter__(self) -> "FollowerRolloutClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    @property
    def forbidden_ids(self) -> frozenset[int]:
        """See `RolloutClient.forbidden_ids`."""
        return self.runtime_info.forbidden_ids

    def collect(self, task_ids: Sequence[str], policy_step: int) -> Sequence[Trajectory]:
        """See `RolloutClient.collect`."""
        return collect_on_first_process(task_ids, _collect_nothing)

    def sample(
        self, tasks: Sequence[Task], temperature: float = 1.0, alter: ModifyRollouts | None = None
    ) -> Sequence[Trajectory]:
        """Raise InvariantError, because only the first process evaluates."""
        raise InvariantError("only the first process samples outside training")

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return no metrics, because the first process reports them."""
        return {}

    def load_weights(self, folder: Path, policy_step: int) -> None:
        """Do nothing, because the first process sends the weights to every worker before it plays."""

    def state_dict(self) -> str:
        """Return the state of a worker pool that has played nothing, as JSON."""
        # A run that resumes with other processes can restore any worker pool from it.
        return json.dumps({"lengths": LengthEstimator().state_dict(), "broken": asdict(FaultCounts())})

    def load_state_dict(self, memory: str) -> None:
        """Do nothing, because this process has no state; see `state_dict`."""


def _collect_nothing(task_ids: Sequence[str]) -> Sequence[Trajectory]:
    raise InvariantError("only the first process plays")
