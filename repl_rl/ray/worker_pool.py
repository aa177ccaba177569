"""Worker pool: starts workers in the slots of a cluster, plays groups on them, and replaces lost ones.

A worker gets groups once its engine has the current weights. A worker that dies, freezes or falls behind is ended. Its
groups are played elsewhere from their beginning, with the same ids and seeds. Its slot is then used again.

The parts in order: timeouts; distribution of weights; `WorkerHandle`, one worker from its start to its loss;
`LivenessTimer`; `GroupScheduler` and `BatchQueue`, which assign groups to workers; `WorkerPool`. The timer and the
scheduler get the time from their callers.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import TypeVar

from repl_rl.errors import ReplRLError, UnrecoverableError, WorkerLost
from repl_rl.ray.rollout_worker import (
    GroupRequest,
    Heartbeat,
    WeightsRef,
    WorkerClient,
    WorkerCluster,
    WorkerSetup,
    list_weight_files,
)
from repl_rl.rollout.concurrent_rollouts import BatchResult
from repl_rl.rollout.rollout_stats import RuntimeInfo

T = TypeVar("T")

log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 1.0
"""Longest of the short waits of `call_with_timeout`, seconds."""
_MOST_DOUBLED = 60
"""Largest number of times that a pause doubles, so that the power of 2 stays finite."""
MOST_BEGUN = 6
"""Attempts per group. A group that has lost this many workers ends the run, because it is probably the cause."""


@dataclass(frozen=True, slots=True)
class WorkerTimeouts:
    """Timeouts and intervals for workers, seconds (> 0). Every wait has a limit."""

    heartbeat_interval_s: float = 2.0
    """Interval between two heartbeats."""
    heartbeat_timeout_s: float = 15.0
    """Timeout of a heartbeat, and of a search for slots."""
    opening_heartbeat_timeout_s: float = 60.0
    """Timeout of a heartbeat while the worker opens, because its imports may block it."""
    event_loop_timeout_s: float = 300.0
    """Longest time that a worker's event loop may be blocked. A restart of the engine can block it for long."""
    start_timeout_s: float = 300.0
    """Timeout for the start of a worker's process."""
    open_timeout_s: float = 1800.0
    """Timeout for the opening of a worker's engine and consoles. Large models take minutes."""
    load_timeout_s: float = 600.0
    """Timeout for new weights."""
    group_timeout_s: float = 3600.0
    """Timeout of a group."""
    close_timeout_s: float = 20.0
    """Time for a worker to close before it is killed."""
    poll_interval_s: float = 1.0
    """Interval between two searches for free slots and overdue groups."""
    retry_backoff_s: float = 1.0
    """Pause before a slot is used again. It doubles with each further worker of the slot that played no group."""
    max_retry_backoff_s: float = 300.0
    """Upper limit of that pause."""
    no_worker_timeout_s: float = 300.0
    """Longest time without any ready worker."""
    cluster_timeout_s: float = 30.0
    """Longest time without an answer of the cluster. Ray ends a process after 60 seconds without one."""

    def compute_backoff_s(self, failed: int) -> float:
        """Return the pause of a slot after `failed` workers (>= 0) in a row that ended without a played group.

        A slot whose machine is removed for some time stays usable. A broken one is retried ever more rarely.
        """
        return min(self.retry_backoff_s * 2.0 ** min(max(failed - 1, 0), _MOST_DOUBLED), self.max_retry_backoff_s)


async def call_with_timeout(limit_s: float, what: str, call: Awaitable[T]) -> T:
    """Return the result of a call to a worker, if it comes in time.

    The timeout is the sum of many short waits. A pause of this process, however long, counts as at most one short wait.

    Raises:
        WorkerLost: the call took longer than `limit_s`.
    """
    future = asyncio.ensure_future(call)
    wait_s = min(limit_s / 10, _LONGEST_WAIT_S)
    try:
        for _ in range(math.ceil(limit_s / wait_s)):
            await asyncio.wait({future}, timeout=wait_s)
            if future.done():
                return future.result()
        raise WorkerLost(f"{what} took longer than {limit_s:g} s")
    finally:
        future.cancel()
        await asyncio.gather(future, return_exceptions=True)


class WeightBroadcast:
    """Distribution of the current weights to all workers.

    A worker reads them from the owner's folder, or receives the files if it cannot read that folder.
    """

    def __init__(self, cluster: WorkerCluster, shared: bool) -> None:
        self._cluster = cluster
        self._shared = shared
        self.weights: WeightsRef | None = None
        """Current weights. None means that every engine has the weights with which it was opened."""
        self._published: asyncio.Task[object] | None = None
        self.rejected_error: UnrecoverableError | None = None
        """Error because of which the weights cannot be sent to any worker, or None."""

    @property
    def policy_step(self) -> int:
        """Policy step of the current weights."""
        return 0 if self.weights is None else self.weights.policy_step

    def set_weights(self, weights: WeightsRef) -> None:
        """Replace the current weights."""
        self.weights, self._published, self.rejected_error = weights, None, None

    async def send_to(self, worker: WorkerClient) -> None:
        """Load the current weights into a worker.

        Raises:
            WorkerLost: the worker loaded other weights.
        """
        weights = self.weights
        if weights is None:
            return
        # The worker returns None if it cannot read the owner's folder.
        arrived = await worker.load_weights(weights, None) if self._shared else None
        if arrived is None:
            arrived = await worker.load_weights(weights, await self._get_published_files(weights))
        if arrived != weights.checksum:
            raise WorkerLost(
                f"weights of policy step {weights.policy_step} arrived as {arrived}, not {weights.checksum}"
            )

    async def _get_published_files(self, weights: WeightsRef) -> object:
        """Publish the files once, at the first request."""
        if self._published is None:
            self._published = asyncio.create_task(self._publish_folder(Path(weights.folder)))
        # Other workers wait for the same publication, so the cancellation of one wait must not reach it.
        return await asyncio.shield(self._published)

    async def _publish_folder(self, folder: Path) -> object:
        files = await asyncio.to_thread(lambda: {file.name: file.read_bytes() for file in list_weight_files(folder)})
        try:
            return await self._cluster.publish_files(files)
        except UnrecoverableError as error:
            self.rejected_error = error
            raise


class WeightsLock:
    """Lock that keeps the folder of the weights unchanged while workers read it.

    A call of the pool that needs the folder holds this lock. The owner may change the folder only between such calls.
    """

    def __init__(self) -> None:
        self._readable = asyncio.Event()
        self._readers = 0
        self._unread = asyncio.Event()
        self._unread.set()
        self._calls = 0

    async def __aenter__(self) -> None:
        self._calls += 1
        self._readable.set()

    async def __aexit__(self, *exc_info: object) -> None:
        self._calls -= 1
        if not self._calls:
            self._readable.clear()
            # The owner may change the folder after this call: wait for the readers.
            await self._unread.wait()

    async def wait_until_unread(self) -> None:
        """Wait until no worker reads the folder.

        A worker may begin to read before the weights change. It detects the change after its load, and loads again.
        """
        await self._unread.wait()

    async def read_while_stable(self, read: Callable[[], Awaitable[None]]) -> None:
        """Wait until the folder is stable, and keep it so while `read` runs."""
        await self._readable.wait()
        self._readers += 1
        self._unread.clear()
        try:
            await read()
        finally:
            self._readers -= 1
            if not self._readers:
                self._unread.set()


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One worker, from its start to its loss."""

    name: str
    slot: str
    status: str = "starting"
    """State: starting, opening, ready, or lost."""
    worker: WorkerClient | None = None
    runtime_info: RuntimeInfo | None = None
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    groups_played: int = 0
    """Number of groups that it has played."""
    lost_error: "asyncio.Future[ReplRLError]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Reason of the loss, once another call notices the loss."""

    async def run(
        self,
        cluster: WorkerCluster,
        setting: WorkerSetup,
        timeouts: WorkerTimeouts,
        ready: Callable[["WorkerHandle"], Awaitable[None]],
        on_heartbeat: Callable[["WorkerHandle"], None],
    ) -> None:
        """Start the worker, open its engine and consoles, call `ready`, and check its heartbeat all the time.

        Raises:
            WorkerLost: the worker did not start in time, or is gone.
            ReplRLError: another reason of the loss, such as a setting that cannot be opened.
        """
        worker = self.worker = await call_with_timeout(
            timeouts.start_timeout_s, "its start", cluster.start_worker(self.slot)
        )
        self.status = "opening"

        async def keep_working() -> None:
            self.runtime_info = await call_with_timeout(
                timeouts.open_timeout_s, "opening its rollouts", worker.open(setting)
            )
            await ready(self)
            # Wait forever: only a heartbeat that fails, or a reported loss, ends the worker.
            await asyncio.Event().wait()

        tasks = [
            asyncio.create_task(work) for work in (keep_working(), self._poll_heartbeat(worker, timeouts, on_heartbeat))
        ]
        try:
            await self.await_unless_lost(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
            # Raise the error of the task that ended.
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def await_unless_lost(self, call: Awaitable[T]) -> T:
        """Return the result of a call.

        Raises:
            ReplRLError: reason of the loss, if the worker is lost before the call ends.
        """
        # A lost worker may never answer, so wait for its loss as well.
        future = asyncio.ensure_future(call)
        try:
            either: list[asyncio.Future[T] | asyncio.Future[ReplRLError]] = [future, self.lost_error]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if future.done():
                return future.result()
            raise self.lost_error.result()
        finally:
            future.cancel()

    async def run_probe(self, group: GroupRequest, timeouts: WorkerTimeouts) -> BatchResult:
        """Return the result of a probe group.

        Raises:
            ReplRLError: the worker is lost, or see `WorkerClient.run_group`.
        """
        assert self.worker is not None
        return await call_with_timeout(
            timeouts.load_timeout_s, "a probe line", self.await_unless_lost(self.worker.run_group(group))
        )

    async def _poll_heartbeat(
        self, worker: WorkerClient, timeouts: WorkerTimeouts, on_heartbeat: Callable[["WorkerHandle"], None]
    ) -> None:
        while True:
            # Imports may block a worker while it opens, so its heartbeat has more time.
            limit_s = (
                timeouts.heartbeat_timeout_s
                if self.status == "ready"
                else max(timeouts.heartbeat_timeout_s, timeouts.opening_heartbeat_timeout_s)
            )
            self.heartbeat = await call_with_timeout(limit_s, "its heartbeat", worker.get_heartbeat())
            on_heartbeat(self)
            # A heartbeat arrives even if the event loop of the rollouts is blocked, so check that loop as well.
            if self.runtime_info is not None and self.heartbeat.event_loop_lag_s > timeouts.event_loop_timeout_s:
                raise WorkerLost(f"its event loop was blocked for {self.heartbeat.event_loop_lag_s:.0f} s")
            await asyncio.sleep(timeouts.heartbeat_interval_s)

    async def close(self, timeouts: WorkerTimeouts) -> None:
        """Close the worker if it still responds, and kill it."""
        if self.worker is None:
            return
        try:
            if self.status == "ready":
                await call_with_timeout(timeouts.close_timeout_s, "its end", self.worker.close())
        except WorkerLost:
            pass  # it is killed anyway
        finally:
            self.worker.kill()


@dataclass(frozen=True, slots=True)
class LostWorker:
    """Record of a lost worker, for people and files."""

    name: str
    seat: str
    """Slot of the worker. Readers of `fleet.json` know it by this name."""
    why: str
    could_play: bool = False
    """True if the worker was ready before its loss."""


class LivenessTimer:
    """Timer that spans all calls of the owner. It gets the time from its callers, and failed starts do not reset it.

    It limits the time without a worker, and the time without an answer of the cluster.
    """

    def __init__(self, cluster: str, timeouts: WorkerTimeouts, now_s: float) -> None:
        """Start the timer. `cluster` is the name of the cluster in messages."""
        self._cluster, self._timeouts = cluster, timeouts
        self._worker_seen_s = self._answered_s = now_s
        self._silence = ""

    def worker_ready(self, now_s: float) -> None:
        """Record that a worker is ready."""
        self._worker_seen_s = now_s

    def cluster_ok(self, now_s: float) -> None:
        """Record that the cluster has listed its slots."""
        self._answered_s, self._silence = now_s, ""

    def cluster_error(self, why: str) -> None:
        """Record that the cluster has not answered."""
        self._silence = why

    def remaining_s(self, now_s: float, opening: bool, lost: Sequence[LostWorker]) -> float:
        """Return the remaining time to wait, seconds (> 0).

        Args:
            now_s: time on the clock that the other calls use.
            opening: True if a worker opens its engine, which has a longer timeout.
            lost: lost workers, in order.

        Raises:
            UnrecoverableError: the time is over.
        """
        silent_s = now_s - self._answered_s
        if self._silence and silent_s >= self._timeouts.cluster_timeout_s:
            raise self._make_error(f"on a cluster that has not answered for {silent_s:.0f} s", self._silence)
        # Opening a large model may take longer than the wait for any worker.
        limit_s = self._timeouts.open_timeout_s if opening else self._timeouts.no_worker_timeout_s
        left_s = self._worker_seen_s + limit_s - now_s
        if left_s <= 0:
            # Per slot, report the last worker that was ready, else the last one: its error shows most of the cause.
            last = {one.seat: one for one in sorted(lost, key=lambda one: one.could_play)}
            words = "; ".join(f"{one.name} at {one.seat}: {one.why}" for one in last.values())
            raise self._make_error(f"without a node for {limit_s:g} s", words or "none could be started")
        return left_s

    def _make_error(self, how: str, words: str) -> UnrecoverableError:
        remedy = "see that its machines are there, and what `repl-rl workers status` says"
        return UnrecoverableError(f"fleet on {self._cluster}", f"{how} ({words})", remedy)


@dataclass(frozen=True, slots=True)
class GroupAttempt:
    """Attempt to play a group on a worker."""

    group: int
    number: int
    """Number of the attempt for this group, from 1."""
    worker: str
    due_s: float
    """Time after which the attempt is overdue."""


class GroupScheduler:
    """Groups of a batch, and the workers that can play them, without a clock and without a network.

    Groups start in order. A group of a lost worker starts again from its beginning, before all groups that have not
    started. Only the result of a group's latest attempt counts, so a late result never counts twice.
    """

    def __init__(self, sizes: Sequence[int], within_s: float) -> None:
        """Add the first groups.

        Args:
            sizes: rollouts per group (>= 1).
            within_s: timeout of an attempt, seconds (> 0).
        """
        self._sizes: list[int] = []
        self._within_s = within_s
        self._waiting: list[int] = []
        self._attempt_counts: list[int] = []
        self._running: dict[int, GroupAttempt] = {}
        self._done: set[int] = set()
        self._slots_by_worker: dict[str, _WorkerSlots] = {}
        self.add(sizes)

    def add(self, sizes: Sequence[int]) -> range:
        """Add groups that start after the present ones, and return their numbers."""
        numbers = range(len(self._sizes), len(self._sizes) + len(sizes))
        self._sizes += sizes
        self._attempt_counts += [0] * len(sizes)
        self._waiting += numbers  # still a heap: each number is larger than all before it
        return numbers

    @property
    def is_finished(self) -> bool:
        """True if every group has a result."""
        return len(self._done) == len(self._sizes)

    @property
    def running(self) -> Mapping[int, GroupAttempt]:
        """Running attempt of each group."""
        return self._running

    @property
    def waiting_count(self) -> int:
        """Number of groups that wait for a worker."""
        return len(self._waiting)

    def add_worker(self, worker: str, concurrency: int) -> None:
        """Add a worker with room for `concurrency` rollouts (>= 1). Its name must be new."""
        assert worker not in self._slots_by_worker, worker
        self._slots_by_worker[worker] = _WorkerSlots(concurrency)

    def remove_worker(self, worker: str) -> list[GroupAttempt]:
        """Remove a worker, and return its attempts. Their groups wait again."""
        lost = [attempt for attempt in self._running.values() if attempt.worker == worker]
        for attempt in lost:
            del self._running[attempt.group]
            # Lower numbers come first in the heap, so these groups start before newer ones.
            heappush(self._waiting, attempt.group)
        self._slots_by_worker.pop(worker, None)
        return lost

    def assign_groups(self, now_s: float) -> Iterator[GroupAttempt]:
        """Yield attempts to start: the first waiting group goes to the worker with most room.

        A group that is larger than the room of any worker goes to an idle worker.
        """
        while self._waiting and (worker := self._find_roomiest_worker(self._sizes[self._waiting[0]])) is not None:
            group = heappop(self._waiting)
            self._attempt_counts[group] += 1
            self._slots_by_worker[worker].used += self._sizes[group]
            attempt = self._running[group] = GroupAttempt(
                group, self._attempt_counts[group], worker, now_s + self._within_s
            )
            yield attempt

    def finish(self, attempt: GroupAttempt) -> bool:
        """Record a result. Return False if it is too late, because another attempt counts."""
        # Its worker was lost meanwhile, and the group waits or runs again.
        if self._running.get(attempt.group) != attempt:
            return False
        del self._running[attempt.group]
        self._slots_by_worker[attempt.worker].used -= self._sizes[attempt.group]
        self._done.add(attempt.group)
        return True

    def find_overdue(self, now_s: float) -> list[GroupAttempt]:
        """Return the attempts that are overdue."""
        return [attempt for attempt in self._running.values() if attempt.due_s <= now_s]

    def _find_roomiest_worker(self, size: int) -> str | None:
        # The smallest pair is the worker with most free room; ties go by name.
        fit = [
            (slots.used - slots.total, name)
            for name, slots in self._slots_by_worker.items()
            if not slots.used or slots.used + size <= slots.total
        ]
        return min(fit)[1] if fit else None


@dataclass(slots=True)
class _WorkerSlots:
    total: int
    used: int = 0


@dataclass(frozen=True, slots=True)
class _PendingGroup:
    """Group without a result, and the dictionary and index under which its result will be stored."""

    group: GroupRequest
    results: dict[int, BatchResult]
    index: int


@dataclass(slots=True)
class GroupBatch:
    """Groups of one or several callers, started in the order of the requests."""

    scheduler: GroupScheduler
    is_prefetch: bool
    """True for groups of later steps; callers may add more meanwhile."""
    pending: dict[int, _PendingGroup] = field(default_factory=dict)
    """Groups without a result, by number."""
    caller_count: int = 0
    call_tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    error: Exception | None = None
    has_changed: bool = True

    def add_groups(self, groups: Sequence[GroupRequest], results: dict[int, BatchResult]) -> None:
        """Add groups. The result of each group is stored in `results`, under the index of the group in `groups`."""
        self.caller_count += 1
        numbers = self.scheduler.add([group.size for group in groups])
        for place, (number, group) in enumerate(zip(numbers, groups, strict=True)):
            self.pending[number] = _PendingGroup(group, results, place)
        self.has_changed = True

    def get_group(self, attempt: GroupAttempt) -> GroupRequest:
        """Return the group of an attempt; it has no result yet."""
        return self.pending[attempt.group].group

    def record_result(self, attempt: GroupAttempt, result: BatchResult) -> bool:
        """Record a result. Return False if it is too late, because another attempt counts."""
        if not self.scheduler.finish(attempt):
            return False
        pending = self.pending.pop(attempt.group)
        pending.results[pending.index] = result
        return True

    def track_call(self, call: "asyncio.Task[None]") -> None:
        """Track a call of a worker until it ends."""
        self.call_tasks.add(call)
        call.add_done_callback(self.call_tasks.discard)

    async def cancel(self) -> None:
        """Cancel the calls that no caller waits for any more."""
        calls = list(self.call_tasks)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


class BatchQueue:
    """Running batches, and the workers that can play them."""

    def __init__(self, concurrency: int, within_s: float) -> None:
        """Start without workers and batches.

        Args:
            concurrency: number of concurrent rollouts per worker (>= 1).
            within_s: timeout of a group, seconds (> 0).
        """
        self._concurrency, self._within_s = concurrency, within_s
        self._workers: list[str] = []
        self._batches: list[GroupBatch] = []
        self.retried_groups = 0
        """Number of groups that were started again."""

    def add_worker(self, worker: str) -> None:
        """Add a worker to all batches."""
        self._workers.append(worker)
        for batch in self._batches:
            batch.scheduler.add_worker(worker, self._concurrency)

    def remove_worker(self, worker: str, why: str) -> None:
        """Remove a lost worker; its groups wait again."""
        if worker in self._workers:
            self._workers.remove(worker)
        for batch in self._batches:
            lost = batch.scheduler.remove_worker(worker)
            self.retried_groups += len(lost)
            # A group that keeps losing workers is probably the cause: end its batch.
            for attempt in lost:
                if attempt.number >= MOST_BEGUN:
                    task = batch.get_group(attempt).task.id
                    gone = f"{task}, under which {MOST_BEGUN} nodes have gone, the last one so: {why}"
                    batch.error = UnrecoverableError("task", gone, "see what its rollouts do to a node")
        self.notify()

    def notify(self) -> None:
        """Mark all batches as changed."""
        for batch in self._batches:
            batch.has_changed = True

    def iterate_overdue(self, now_s: float) -> Iterator[tuple[GroupAttempt, str]]:
        """Yield overdue attempts, with the task id of each."""
        for batch in self._batches:
            for attempt in batch.scheduler.find_overdue(now_s):
                yield attempt, batch.get_group(attempt).task.id

    def get_open_batch(self, prefetched: bool) -> GroupBatch:
        """Return the batch for new groups: prefetched groups share one, other groups get a new one."""
        for batch in self._batches:
            # A batch with an error takes no more groups.
            if prefetched and batch.is_prefetch and batch.error is None:
                return batch
        batch = GroupBatch(GroupScheduler((), self._within_s), prefetched)
        # Each batch counts the room of all workers for itself.
        for worker in self._workers:
            batch.scheduler.add_worker(worker, self._concurrency)
        self._batches.append(batch)
        return batch

    async def release(self, batch: GroupBatch) -> None:
        """Remove one caller of a batch. The batch ends with its last caller."""
        batch.caller_count -= 1
        if not batch.caller_count:
            self._batches.remove(batch)
            await batch.cancel()


class WorkerPool:
    """Pool of workers. All its methods are called in one event loop."""

    def __init__(
        self,
        cluster: WorkerCluster,
        setting: WorkerSetup,
        concurrency: int,
        max_workers: int = 0,
        timeouts: WorkerTimeouts | None = None,
        shared: bool = True,
        on_heartbeat: Callable[[WorkerHandle], None] = lambda _: None,
    ) -> None:
        """Set up an empty pool.

        Args:
            cluster: machines for the workers.
            setting: setting that each worker opens.
            concurrency: concurrent rollouts per worker (>= 1).
            max_workers: largest number of workers (>= 0); 0 means one per slot.
            timeouts: timeouts and intervals.
            shared: workers may read the weights from the owner's folder; False sends the files in any case.
            on_heartbeat: function to call after each heartbeat.
        """
        self._cluster, self._setting, self._max_workers = cluster, setting, max_workers
        self.timeouts = timeouts or WorkerTimeouts()
        self._on_heartbeat = on_heartbeat
        self._broadcast, self._weights_lock = WeightBroadcast(cluster, shared), WeightsLock()
        self.workers: dict[str, WorkerHandle] = {}
        """Present workers, by slot."""
        self.lost_workers: list[LostWorker] = []
        """All lost workers, in order."""
        self._worker_tasks: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, int] = {}  # lost workers per slot in a row, without a played group
        self._retry_at_s: dict[str, float] = {}
        """Time at which a slot may be used again, by slot."""
        self._started_count = 0
        self._state_changed = asyncio.Condition()
        self._batches = BatchQueue(concurrency, self.timeouts.group_timeout_s)
        self._managing: asyncio.Task[None] | None = None
        self._refusal: ReplRLError | None = None
        self._liveness = LivenessTimer(cluster.name, self.timeouts, 0.0)

    async def start(self) -> RuntimeInfo:
        """Start the pool, and wait for the first ready worker.

        Raises:
            ReplRLError: the setting cannot be opened.
            UnrecoverableError: no worker was ready in time.
        """
        self._liveness = LivenessTimer(self._cluster.name, self.timeouts, asyncio.get_running_loop().time())
        async with self._weights_lock:
            self._managing = asyncio.create_task(self._run_manager())
            # If a setting cannot be opened, wait only for workers that still try.
            await self.wait_until(
                lambda: bool(self.ready_workers) or (self._refusal is not None and not self._is_starting_worker)
            )
        if not self.ready_workers:
            assert self._refusal is not None
            raise self._refusal
        # All workers open the same setting, so any of them can report it.
        runtime_info = self.ready_workers[0].runtime_info
        assert runtime_info is not None
        return runtime_info

    async def close(self) -> None:
        """End every worker and every task of the pool."""
        tasks = [task for task in (self._managing, *self._worker_tasks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        # Each task of a worker closes it when it is cancelled.
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def cluster_name(self) -> str:
        """Name of the cluster, for messages."""
        return self._cluster.name

    @property
    def policy_step(self) -> int:
        """Policy step of the current weights."""
        return self._broadcast.policy_step

    @property
    def retried_groups(self) -> int:
        """Number of groups that were started again."""
        return self._batches.retried_groups

    @property
    def worker_metrics(self) -> dict[str, float]:
        """Metrics for `metrics.jsonl`."""
        counts = {
            "nodes": len(self.ready_workers),
            "nodes_lost": len(self.lost_workers),
            "groups_replayed": self.retried_groups,
        }
        return {f"fleet_{name}": float(count) for name, count in counts.items()}

    @property
    def ready_workers(self) -> list[WorkerHandle]:
        """Workers that can play."""
        return [handle for handle in list(self.workers.values()) if handle.status == "ready"]

    @property
    def _is_starting_worker(self) -> bool:
        return any(handle.status == "opening" for handle in self.workers.values())

    async def _run_manager(self) -> None:
        """Use slots as they appear, and end workers that are overdue."""
        loop = asyncio.get_running_loop()
        while True:
            slots: Sequence[str] = ()
            try:
                slots = await call_with_timeout(
                    self.timeouts.heartbeat_timeout_s, "a search for slots", self._cluster.list_slots()
                )
                self._liveness.cluster_ok(loop.time())
            except WorkerLost as error:
                log.warning("cluster %s does not answer: %s", self._cluster.name, error)
                self._liveness.cluster_error(str(error))
            if self.ready_workers:
                self._liveness.worker_ready(loop.time())
            # Start a worker in each free slot whose pause is over.
            for slot in slots:
                full = bool(self._max_workers) and len(self._worker_tasks) >= self._max_workers
                if slot not in self._worker_tasks and not full and loop.time() >= self._retry_at_s.get(slot, 0.0):
                    self._worker_tasks[slot] = asyncio.create_task(self._run_worker(slot))
            self._expire_overdue()
            await asyncio.sleep(self.timeouts.poll_interval_s)

    def _expire_overdue(self) -> None:
        for attempt, task in list(self._batches.iterate_overdue(asyncio.get_running_loop().time())):
            self._mark_lost(
                self._get_worker(attempt),
                WorkerLost(f"task {task} took longer than {self.timeouts.group_timeout_s:g} s"),
            )

    async def _run_worker(self, slot: str) -> None:
        """Run one worker in a slot, from its start to its loss."""
        number, self._started_count = self._started_count, self._started_count + 1
        handle = self.workers[slot] = WorkerHandle(f"node {number}", slot)
        try:
            numbered = replace(self._setting, number=number)
            await handle.run(self._cluster, numbered, self.timeouts, self._on_ready, self._on_heartbeat)
        except Exception as error:
            why = error if isinstance(error, ReplRLError) else WorkerLost(repr(error))
            # A setting that cannot be opened here cannot be opened elsewhere: `start` raises this error.
            if handle.runtime_info is None and not isinstance(why, WorkerLost):
                self._refusal = why
            self._mark_lost(handle, why)
            await self._notify_state_changed()
            # The pause is not spent here, because another slot may take this worker's place meanwhile.
            self._retry_at_s[slot] = asyncio.get_running_loop().time() + self.timeouts.compute_backoff_s(
                self._failed[slot]
            )
        finally:
            # A cancellation must not leave the worker's process behind.
            await asyncio.shield(handle.close(self.timeouts))
            del self.workers[slot], self._worker_tasks[slot]

    async def _on_ready(self, handle: WorkerHandle) -> None:
        if self._broadcast.weights is None:
            await self._admit_worker(handle)
        else:
            # The new worker reads the owner's folder, so keep it unchanged.
            await self._weights_lock.read_while_stable(lambda: self._admit_worker(handle))

    async def _admit_worker(self, handle: WorkerHandle) -> None:
        """Load the current weights into a new worker, and give it groups."""
        loaded = None
        while loaded is None or loaded[0] is not self._broadcast.weights:  # they may change during the load
            loaded = (self._broadcast.weights,)
            await self._send_weights(handle)
        handle.status = "ready"
        self._batches.add_worker(handle.name)
        await self._notify_state_changed()

    async def _send_weights(self, handle: WorkerHandle) -> None:
        """Load the current weights into a worker, within the timeout."""
        assert handle.worker is not None
        load = handle.await_unless_lost(self._broadcast.send_to(handle.worker))
        await call_with_timeout(self.timeouts.load_timeout_s, "new weights", load)

    def _mark_lost(self, handle: WorkerHandle, error: ReplRLError) -> None:
        """Mark a worker as lost, kill it, and let its groups wait again."""
        # Several calls may notice the same loss; only the first one counts.
        if handle.status == "lost":
            return
        could_play, handle.status = handle.status == "ready", "lost"
        self._failed[handle.slot] = 0 if handle.groups_played else self._failed.get(handle.slot, 0) + 1
        self.lost_workers.append(LostWorker(handle.name, handle.slot, str(error), could_play))
        log.warning("%s of the workers, at %s, is lost: %s", handle.name, handle.slot, error)
        if handle.worker is not None:
            handle.worker.kill()
        self._batches.remove_worker(handle.name, str(error))
        # End the calls that wait for this worker.
        handle.lost_error.set_result(error)

    async def _notify_state_changed(self) -> None:
        self._batches.notify()
        async with self._state_changed:
            self._state_changed.notify_all()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that depends on workers.

        Raises:
            UnrecoverableError: no worker was ready for too long, or the cluster does not answer.
        """
        loop = asyncio.get_running_loop()
        async with self._state_changed:
            while True:
                if self.ready_workers:
                    self._liveness.worker_ready(loop.time())
                left_s = self._liveness.remaining_s(loop.time(), self._is_starting_worker, self.lost_workers)
                if condition():
                    return
                # Wake up regularly, because the timer may expire without any news.
                try:
                    async with asyncio.timeout(min(left_s, self.timeouts.poll_interval_s)):
                        await self._state_changed.wait()
                except TimeoutError:
                    pass  # check timer and condition again

    async def load_weights(self, weights: WeightsRef) -> None:
        """Load weights into every worker, between two lines. A worker that does not load them in time is lost.

        Raises:
            UnrecoverableError: no worker loaded them and no new one came, or the cluster has no room for them.
            ReplRLError: the weights do not fit the policy.
        """
        async with self._weights_lock:
            self._broadcast.set_weights(weights)
            ready = self.ready_workers
            errors = await asyncio.gather(*map(self._send_weights, ready), return_exceptions=True)
            if self._broadcast.rejected_error is not None:
                raise self._broadcast.rejected_error
            # A loss concerns one worker; any other error would occur on all of them.
            for handle, error in zip(ready, errors, strict=True):
                if isinstance(error, WorkerLost | UnrecoverableError):
                    self._mark_lost(handle, error)
                elif error is not None:
                    raise error
            await self.wait_until(lambda: bool(self.ready_workers))
            # A worker that is still opening may read the folder.
            await self._weights_lock.wait_until_unread()

    async def run_groups(
        self, groups: Sequence[GroupRequest], prefetched: dict[int, BatchResult] | None = None
    ) -> list[BatchResult]:
        """Play all groups on any workers, and return their results in order.

        With `prefetched`, these are prefetched groups. They share the workers with those of other later steps; earlier
        requests come first. Each result is in `prefetched`, under the index of its group, as soon as it has arrived.

        Raises:
            UnrecoverableError: no worker was ready for too long, or one group ended worker after worker.
            ReplRLError: an error of a worker that any other worker would raise too.
        """
        results: dict[int, BatchResult] = {} if prefetched is None else prefetched
        batch = self._batches.get_open_batch(prefetched is not None)
        batch.add_groups(groups, results)
        try:
            async with self._weights_lock:
                while len(results) < len(groups):
                    # Wait for a result or a change of the workers, then start as many groups as fit.
                    await self.wait_until(
                        lambda: batch.has_changed or batch.error is not None or len(results) == len(groups)
                    )
                    batch.has_changed = False
                    if batch.error is not None:
                        raise batch.error
                    for attempt in batch.scheduler.assign_groups(asyncio.get_running_loop().time()):
                        batch.track_call(
                            asyncio.create_task(self._run_attempt(batch, attempt, self._get_worker(attempt)))
                        )
        finally:
            await self._batches.release(batch)
        return [results[place] for place in range(len(groups))]

    async def run_probe(self, group: GroupRequest) -> list[BatchResult]:
        """Return the results of a probe group on every ready worker. Raises the errors of `run_groups`."""
        async with self._weights_lock:
            while True:
                await self.wait_until(lambda: bool(self.ready_workers))
                ready = self.ready_workers
                probes = (handle.run_probe(group, self.timeouts) for handle in ready)
                results = await asyncio.gather(*probes, return_exceptions=True)
                for handle, result in zip(ready, results, strict=True):
                    if isinstance(result, WorkerLost | UnrecoverableError):
                        self._mark_lost(handle, result)
                    elif isinstance(result, BaseException):
                        raise result
                # If all these workers were lost, ask the next ones.
                if played := [result for result in results if isinstance(result, BatchResult)]:
                    return played

    def _get_worker(self, attempt: GroupAttempt) -> WorkerHandle:
        return next(handle for handle in self.workers.values() if handle.name == attempt.worker)

    async def _run_attempt(self, batch: GroupBatch, attempt: GroupAttempt, handle: WorkerHandle) -> None:
        assert handle.worker is not None
        try:
            result = await handle.worker.run_group(batch.get_group(attempt))
            if batch.record_result(attempt, result):
                handle.groups_played += 1
        except (WorkerLost, UnrecoverableError) as error:
            # If the group has another attempt by now, this worker is already marked as lost.
            if batch.scheduler.running.get(attempt.group) == attempt:
                self._mark_lost(handle, error)
        except Exception as error:
            # Any other worker would raise this error too.
            batch.error = batch.error or error
        await self._notify_state_changed()
