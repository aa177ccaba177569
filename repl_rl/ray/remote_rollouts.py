"""Synchronous client of a worker pool for trainer and evaluation; `SyncRollouts` is the client of a single process."""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType, TracebackType

from repl_rl.engine.base import PreemptionStats
from repl_rl.ray.rollout_worker import GroupRequest, WeightsRef, WorkerCluster, WorkerSetup, compute_checksum
from repl_rl.ray.worker_pool import WorkerHandle, WorkerPool, WorkerTimeouts
from repl_rl.rollout.concurrent_rollouts import BatchResult
from repl_rl.rollout.host_functions import compute_call_metrics
from repl_rl.rollout.length_estimator import LengthEstimator
from repl_rl.rollout.prefetch_rollouts import BusyTimer, GroupKey, StepRollouts, find_first_ended
from repl_rl.rollout.retry import FaultCounts
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.rollout_stats import RolloutCounts, RolloutStats, RuntimeInfo, compute_step_metrics
from repl_rl.rollout.sampler_base import RolloutSampler
from repl_rl.rollout.synchronous_rollouts import BackgroundTask, EventLoopThread, ModifyRollouts
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.atomic_files import Json, write_text_atomically
from repl_rl.utils.hardware import reduce_gc_frequency

log = logging.getLogger(__name__)

STATUS, LOGS = "fleet.json", "fleet"
"""Names in a run's folder: the state of the workers, and the folder of their logs."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Configuration of a worker pool."""

    setup: WorkerSetup
    sampler: RolloutSampler
    """Sampler for the metrics of this process; the workers have their own."""
    limits: RolloutLimits
    has_host_functions: bool
    """True if lines may call host functions."""
    concurrency: int
    """Concurrent rollouts per worker, >= 1."""
    max_workers: int = 0
    """Largest number of workers; 0 means one per slot."""
    timeouts: WorkerTimeouts = field(default_factory=WorkerTimeouts)
    shares_folder: bool = True
    """True if workers may read weights from the owner's folder; False sends the files in any case."""


class RolloutWorkers:
    """Context manager that opens and closes the workers of a cluster together. It implements `RolloutClient`."""

    def __init__(
        self, cluster: AbstractContextManager[WorkerCluster], plan: WorkerPlan, tasks: Mapping[str, Task]
    ) -> None:
        self.tasks = tasks
        """Tasks by id."""
        self._cluster, self._plan = cluster, plan
        self._stack = ExitStack()
        self._lengths = LengthEstimator()
        self._earlier_stats = RolloutStats(asdict(FaultCounts()))
        self._worker_stats: dict[str, RolloutStats] = {}
        self._preempted = 0
        self._prefetched: dict[int, tuple[StepRollouts, BackgroundTask[list[Trajectory]]]] = {}
        self._busy = BusyTimer()
        self._status_folder: Path | None = None
        self._is_closed = False

    def __enter__(self) -> "RolloutWorkers":
        # If a later step fails, this stack closes everything that is already open.
        with ExitStack() as stack:
            cluster = stack.enter_context(self._cluster)
            stack.enter_context(reduce_gc_frequency())
            plan = self._plan
            self._thread = EventLoopThread()
            stack.callback(self._thread.close)
            self.pool = WorkerPool(
                cluster,
                plan.setup,
                plan.concurrency,
                plan.max_workers,
                plan.timeouts,
                plan.shares_folder,
                on_heartbeat=self._on_heartbeat,
            )
            stack.callback(lambda: self._thread.run(self.pool.close()))
            self.runtime_info: RuntimeInfo = self._thread.run(self.pool.start())
            """See `RolloutClient.runtime_info`."""
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Write the last status while the workers are still listed.
        self._is_closed = True
        self._write_status()
        with self._stack:
            for _, rollouts in self._prefetched.values():
                rollouts.cancel()

    @property
    def forbidden_ids(self) -> frozenset[int]:
        """See `RolloutClient.forbidden_ids`."""
        return self.runtime_info.forbidden_ids

    @property
    def stats(self) -> RolloutStats:
        """See `RolloutClient.stats`; as reported by the latest heartbeats."""
        all_stats = [
            self._earlier_stats,
            *list(self._worker_stats.values()),
        ]  # a copy, because the event loop adds to it
        # Each worker counts from its start, and the checkpoint holds the counts of earlier processes.
        faults = {name: sum(one.faults.get(name, 0) for one in all_stats) for name in self._earlier_stats.faults}
        # Without any count, no engine has a cache that can be too small.
        counted = [one.preemptions for one in all_stats if one.preemptions is not None]
        preempted, recomputed = (sum(getattr(p, f.name) for p in counted) for f in fields(PreemptionStats))
        counts = RolloutCounts(
            sum(one.counts.ended for one in all_stats),
            sum(one.counts.solved for one in all_stats),
            sum(one.counts.sampled_lines for one in all_stats),
            sum(one.counts.sampled_tokens for one in all_stats),
        )
        return RolloutStats(faults, PreemptionStats(preempted, recomputed) if counted else None, counts)

    def collect(self, task_ids: Sequence[str], policy_step: int) -> Sequence[Trajectory]:
        """See `RolloutClient.collect`. Prefetched rollouts are awaited."""
        # Count preemptions from the start of the rollouts, also of those that were prefetched.
        if policy_step in self._prefetched:
            step, rollouts = self._prefetched.pop(policy_step)
            preemptions, played = step.preemptions, self._learn_lengths(step.tasks, rollouts.wait())
        else:
            preemptions = self._preemptions
            played = self._run_tasks([self.tasks[i] for i in task_ids], 1.0, policy_step, None)
        self._preempted = self._preemptions.subtract(preemptions).preempted
        return played

    @property
    def _preemptions(self) -> PreemptionStats:
        return self.stats.preemptions or PreemptionStats()

    def sample(
        self, tasks: Sequence[Task], temperature: float = 1.0, alter: ModifyRollouts | None = None
    ) -> Sequence[Trajectory]:
        """See `RolloutClient.sample`."""
        return self._run_tasks(tasks, temperature, self.pool.policy_step, alter)

    def _run_tasks(
        self, tasks: Sequence[Task], temperature: float, policy_step: int, alter: ModifyRollouts | None
    ) -> list[Trajectory]:
        # Longest groups first, so that none of them starts when the others are done.
        step = StepRollouts(tasks, self._lengths.sort_longest_first(tasks))
        groups = [
            GroupRequest(task, len(numbers), temperature, policy_step, alter) for task, numbers in step.group_indices
        ]
        return self._learn_lengths(
            tasks, step.merge_results(self._thread.run(self.pool.run_groups(groups)), self.runtime_info.sandbox)
        )

    def _learn_lengths(self, tasks: Sequence[Task], played: list[Trajectory]) -> list[Trajectory]:
        self._lengths.update_all(tasks, played)
        return played

    def start_rollouts(
        self, task_ids: Sequence[str], policy_step: int, finished: Mapping[int, Trajectory] = MappingProxyType({})
    ) -> None:
        """Start rollouts as `SyncRollouts.start_rollouts` does.

        They start with the current weights or newer ones, on any worker. Groups of earlier steps get a worker first.
        """
        tasks = [self.tasks[i] for i in task_ids]
        with_workspaces = {
            n: replace(t, workspace=tasks[n].workspace) for n, t in finished.items()
        }  # a record only names it
        step = StepRollouts(tasks, self._lengths.sort_longest_first(tasks), with_workspaces, self._preemptions)
        # Training samples at temperature 1. The weights may be older than those of `policy_step`.
        groups = [
            GroupRequest(
                task, len(numbers), 1.0, policy_step, None, self.pool.policy_step, step.get_finished_before(numbers)
            )
            for task, numbers in step.group_indices
        ]
        self._prefetched[policy_step] = step, self._thread.start_waitable(self._finish_step(step, groups))

    async def _finish_step(self, step: StepRollouts, groups: Sequence[GroupRequest]) -> list[Trajectory]:
        self._busy.begin()
        try:
            return step.merge_results(await self.pool.run_groups(groups, step.results), self.runtime_info.sandbox)
        finally:
            self._busy.end()
            step.is_closed = True

    def get_finished_rollouts(self, policy_step: int) -> Mapping[int, Trajectory]:
        """Return the rollouts of a later step that ended without a failure, by number in the step.

        A rollout is included once its whole group has ended.
        """
        step, _ = self._prefetched[policy_step]
        return step.finished_rollouts

    def wait_for_first_group(self, groups: Sequence[GroupKey]) -> int:
        """Wait until one of these prefetched groups has ended. Return the lowest index of a group that has ended.

        Raises:
            UnrecoverableError: no worker was ready for too long.
        """

        def find_ended() -> int | None:
            return find_first_ended(groups, lambda policy_step: self._prefetched[policy_step][0])

        self._thread.run(self.pool.wait_until(lambda: find_ended() is not None))
        found = find_ended()
        assert found is not None, "what has ended stays so"
        return found

    def get_ended_groups(self, policy_step: int) -> Mapping[int, Trajectory]:
        """Return the rollouts of a later step whose groups have ended, by number in the step.

        They are the trajectories that `collect` will return.
        """
        return self._prefetched[policy_step][0].ended_rollouts

    def sample_probe_lines(self, task_id: str) -> Sequence[Trajectory]:
        """Sample the first line of the current policy on a task, on each worker."""
        group = GroupRequest(self.tasks[task_id], 1, 1.0, self.pool.policy_step, is_probe=True)
        return BatchResult.merge(self._thread.run(self.pool.run_probe(group))).trajectories

    @property
    def rollout_busy_s(self) -> float:
        """Wall-clock time in which prefetched rollouts ran, seconds."""
        return self._busy.elapsed_s

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """See `RolloutClient.metrics`; with the numbers of ready workers, lost workers, and groups started again."""
        plan, stats = self._plan, self.stats
        preempted = None if stats.preemptions is None else self._preempted
        metrics = compute_step_metrics(plan.sampler, plan.limits, trajectories, preempted, stats.faults)
        calls = compute_call_metrics(trajectories) if plan.has_host_functions else {}
        return {**metrics, **calls, **self.pool.worker_metrics}

    def load_weights(self, folder: Path, policy_step: int) -> None:
        """See `RolloutClient.load_weights`."""
        folder = folder.absolute()
        self._thread.run(self.pool.load_weights(WeightsRef(str(folder), policy_step, compute_checksum(folder))))

    def state_dict(self) -> str:
        """See `RolloutClient.state_dict`. A run may resume from it in one process too."""
        return json.dumps({"lengths": self._lengths.state_dict(), "broken": dict(self.stats.faults)})

    def load_state_dict(self, memory: str) -> None:
        """See `RolloutClient.load_state_dict`."""
        state = json.loads(memory)
        self._lengths.load_state_dict(state["lengths"])
        self._earlier_stats = RolloutStats({**self._earlier_stats.faults, **state.get("broken", {})})

    def write_notes(self, folder: Path) -> None:
        """Write the state of the workers into a run's folder from now on.

        The files are `fleet.json`, and one log per worker in `fleet/`.
        """
        (folder / LOGS).mkdir(exist_ok=True)
        self._status_folder = folder
        self._write_status()

    def _on_heartbeat(self, handle: WorkerHandle) -> None:
        """Store the heartbeat of a worker. It runs in the event loop."""
        self._worker_stats[handle.name] = handle.heartbeat.stats
        if self._status_folder is not None and handle.heartbeat.log_lines:
            # A log that cannot be written must not end the worker.
            with suppress(OSError), self._get_log_path(handle).open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in handle.heartbeat.log_lines)
        self._write_status()

    def _get_log_path(self, handle: WorkerHandle) -> Path:
        return (self._status_folder or Path()) / LOGS / f"{handle.name.replace(' ', '-')}.log"

    def _write_status(self) -> None:
        if self._status_folder is None:
            return
        try:
            write_text_atomically(self._status_folder / STATUS, json.dumps(self.get_status(), indent=1) + "\n")
        except OSError as error:  # the trainer meets the same error and reports it
            log.warning("the status of the workers cannot be written to %s: %s", self._status_folder, error)

    def get_status(self) -> dict[str, Json]:
        """Return the state of present and lost workers, for people and files."""
        return {
            "cluster": self.pool.cluster_name,
            "policy_step": self.pool.policy_step,
            "nodes": [describe_worker(handle, self._is_closed) for handle in list(self.pool.workers.values())],
            "lost": [asdict(one) for one in self.pool.lost_workers],
            "groups_replayed": self.pool.retried_groups,
        }


def describe_worker(handle: WorkerHandle, over: bool) -> dict[str, Json]:
    """Return the state of one worker. `over` means that the pool ends."""
    heartbeat = handle.heartbeat
    return {
        "name": handle.name,
        "seat": handle.slot,
        "pid": heartbeat.pid,
        "state": "ended" if over else handle.status,
        "policy_step": heartbeat.policy_step,
        "rollouts": heartbeat.running_rollouts,
        "groups": handle.groups_played,
        "rollouts_played": heartbeat.stats.counts.ended,
        "tokens": heartbeat.stats.counts.sampled_tokens,
        "faults": sum(heartbeat.stats.faults.values()),
    }
