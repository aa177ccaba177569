"""Opening of the rollout client of a run: rollouts in this process, or in workers on a Ray cluster.

With several training processes, the first one owns the workers and hands out the rollouts to the others.
"""

import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import TracebackType

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from repl_rl.errors import InvariantError
from repl_rl.models.resolve_model import BUNDLED
from repl_rl.ray.config import RayOptions, parse_workers
from repl_rl.ray.remote_rollouts import RolloutWorkers, WorkerPlan
from repl_rl.ray.rollout_worker import WorkerCluster, WorkerSetup
from repl_rl.ray.worker_pool import WorkerTimeouts
from repl_rl.rollout import RolloutClient, SyncRollouts
from repl_rl.rollout.length_estimator import LengthEstimator
from repl_rl.rollout.retry import FaultCounts
from repl_rl.rollout.rollout_stats import RolloutStats, RuntimeInfo
from repl_rl.rollout.synchronous_rollouts import ModifyRollouts
from repl_rl.rollout_config import RolloutConfig
from repl_rl.tasks import Task
from repl_rl.trainer.config import TrainerConfig, choose_sampler_dtype
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.atomic_files import Json
from repl_rl.utils.processes import get_world_size


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
    """Start or join the Ray cluster, and yield it as the place for workers. None is started yet."""
    # Imported here because Ray is an optional dependency.
    with import_module("repl_rl.ray.worker_cluster").open_ray_cluster(options) as connection:
        yield connection.cluster


_ON_FIRST_PROCESS = "in the first process"
"""Engine and sandbox of a process that gets its rollouts from the first one."""
CollectFn = Callable[[Sequence[str]], Sequence[Trajectory]]
"""Function that returns one trajectory per task id."""


def collect_on_first_process(task_ids: Sequence[str], play: CollectFn) -> list[Trajectory]:
    """Return one trajectory per entry of `task_ids`; the first process plays for all, and all call this together.

    Args:
        task_ids: task ids of this process; may be empty.
        play: called only in the first process, with the ids of all processes in rank order. A group that spans two
            processes is therefore complete in the call.
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
    """`RolloutClient` of a process other than the first: it starts no workers, and the first process plays for it."""

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
