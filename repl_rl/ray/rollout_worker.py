"""Worker: a separate process with engine, consoles and sampler, which plays whole groups.

The messages between a worker and its owner and the interfaces `WorkerClient` and `WorkerCluster` come first. Then
follow `RolloutWorker`, the worker itself, and the checksum by which both compare weights.
"""

import asyncio
import hashlib
import logging
import os
import pickle
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from repl_rl.engine.base import SupportsSleep
from repl_rl.errors import EngineError, WeightSyncError
from repl_rl.models.safetensors_index import INDEX, WHOLE, list_checkpoint_files
from repl_rl.rollout.concurrent_rollouts import BatchResult, Rollouts
from repl_rl.rollout.prefetch_rollouts import Prefetched, sample_probe_line
from repl_rl.rollout.retry import get_fault_counts
from repl_rl.rollout.rollout_stats import ProgressCounter, RolloutStats, RuntimeInfo, get_preemptions
from repl_rl.rollout.synchronous_rollouts import ModifyRollouts
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.atomic_files import open_private_folder

OpenWorkerRollouts = Callable[[int], AbstractAsyncContextManager[Rollouts]]
"""Function that opens rollouts on the worker with that number."""

_PREFIX = "repl_rl-node-weights-"
"""Beginning of the name of the folder with links to weights in memory."""
_TURN_S = 0.5
"""Interval between two time stamps of the event loop, seconds."""
_KEPT_LINES = 1000
"""Largest number of log lines that are kept until the owner fetches them."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """Everything that a worker needs to open rollouts as the owner's process would."""

    opener: bytes
    """Pickled function that opens rollouts, given the worker's number.

    The worker unpickles it after it has applied `folder` and `path`.
    """
    number: int
    """Number of the worker, >= 0. An engine that does not seed its sessions has one random stream per number."""
    folder: str
    """Working directory of the owner."""
    path: tuple[str, ...]
    """Module search path of the owner."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Rollouts of one task, played together."""

    task: Task
    size: int
    temperature: float
    policy_step: int
    """Step of the policy that learns from them; it is part of their ids and seeds."""
    modify_rollouts: ModifyRollouts | None = None
    min_weights_step: int | None = None
    """Policy step of the oldest weights with which prefetched rollouts may start.

    Newer weights may be loaded between two lines of a rollout. None means that the rollouts are not prefetched: they
    are sampled only with the weights of `policy_step`.
    """
    finished_rollouts: Mapping[int, Trajectory] = field(default_factory=dict)
    """Rollouts that ended before, by number in the group; they are not played again."""
    is_probe: bool = False
    """True for a probe: one line is sampled, and no console runs it."""


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """Weights that every engine must have."""

    folder: str
    """Folder on the owner's machine."""
    policy_step: int
    checksum: str
    """Checksum of their files."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Heartbeat: state of a live worker."""

    pid: int = 0
    event_loop_lag_s: float = 0.0
    """Delay of the worker's event loop, seconds."""
    policy_step: int = 0
    running_rollouts: int = 0
    """Number of running rollouts."""
    stats: RolloutStats = field(default_factory=RolloutStats)
    log_lines: tuple[str, ...] = ()
    """Log lines since the last heartbeat."""


class WorkerClient(Protocol):
    """Worker as its owner sees it. Every call of a worker that is gone raises WorkerLost."""

    async def open(self, setting: WorkerSetup) -> RuntimeInfo:
        """Open engine, consoles and sampler. Their errors are raised unchanged."""

    async def load_weights(self, weights: WeightsRef, files: object | None) -> str | None:
        """Load weights into the engine, and return the checksum of the loaded files.

        Args:
            weights: weights to load.
            files: result of `WorkerCluster.publish_files`; None means the folder of the weights.

        Returns:
            The checksum, or None if the worker cannot read the folder.
        """

    async def run_group(self, group: GroupRequest) -> BatchResult:
        """Play the rollouts of a group, judges included."""

    async def get_heartbeat(self) -> Heartbeat:
        """Return a heartbeat. A busy worker answers too."""

    async def close(self) -> None:
        """Close engine, consoles and sampler."""

    def kill(self) -> None:
        """Kill the worker at once. A worker that is gone is ignored."""


class WorkerCluster(Protocol):
    """Machines on which workers can run."""

    @property
    def name(self) -> str:
        """Name for messages."""

    async def list_slots(self) -> Sequence[str]:
        """Return the present slots for workers, used or not, in the order in which to use them."""

    async def start_worker(self, seat: str) -> WorkerClient:
        """Start a worker in a slot, without opening it. Raises WorkerLost if that is not possible."""

    async def publish_files(self, files: Mapping[str, bytes]) -> object:
        """Make files available to every machine, once. They are released together with the returned value.

        Raises:
            UnrecoverableError: the cluster has no room for them.
            WorkerLost: the cluster cannot be reached.
        """


class RolloutWorker:
    """Worker process. One event loop calls all methods but `get_heartbeat`, which any thread may call."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._opened: Rollouts | None = None
        self._progress = ProgressCounter()
        self._weight_folders: list[Path] = []
        self._memory_files = [ExitStack(), ExitStack()]
        self._loop_seen_s = time.monotonic()
        self._beat = Heartbeat()
        self._running_rollouts = 0
        self._log = _LogBuffer()

    async def open(self, setting: WorkerSetup) -> RuntimeInfo:
        """See `WorkerClient.open`."""
        with suppress(FileNotFoundError):  # another machine may not have this folder
            os.chdir(setting.folder)
        sys.path += [place for place in setting.path if place not in sys.path]
        logging.getLogger().addHandler(self._log)
        # Unpickle after the path is set: the function may need modules of the owner.
        opener: OpenWorkerRollouts = pickle.loads(setting.opener)
        self._stack.callback(logging.getLogger().removeHandler, self._log)
        self._stack.callback(asyncio.create_task(self._watch_event_loop()).cancel)
        opened = await self._stack.enter_async_context(opener(setting.number))
        self._opened = replace(opened, hooks=(*opened.hooks, self._progress))
        return self._opened.runtime_info

    @property
    def _rollouts(self) -> Rollouts:
        if self._opened is None:
            raise EngineError("the worker's rollouts are not open")
        return self._opened

    async def load_weights(self, weights: WeightsRef, files: Mapping[str, bytes] | None) -> str | None:
        """See `WorkerClient.load_weights`. Files from the owner are written to this machine's memory.

        While rollouts run, the old files stay in memory until the engine has loaded the new files. If the engine dies
        during the load, it is opened again with the old files.
        """
        if files is None:
            folder = Path(weights.folder)
            if not os.access(folder, os.R_OK):
                return None
        else:
            folder = await asyncio.to_thread(self._write_weights, files)
        await self._rollouts.engine.load_weights(folder, weights.policy_step)
        # The engine no longer needs the previous files.
        self._memory_files[1].close()
        # Computed after the load, so that it also detects files that changed during the load.
        return await asyncio.to_thread(compute_checksum, folder)

    def _write_weights(self, files: Mapping[str, bytes]) -> Path:
        """Return a folder of links to files in memory. The memory is freed with this process, however it ends.

        Raises:
            EngineError: the memory has no room for the files.
        """
        # Two folders alternate: one for the files that the engine has, one for the next ones.
        if not self._weight_folders:
            folder = self._stack.enter_context(open_private_folder(Path(tempfile.gettempdir()), _PREFIX))
            for number, files_in_memory in enumerate(self._memory_files):
                self._weight_folders.append(folder / str(number))
                self._weight_folders[-1].mkdir()
                self._stack.callback(files_in_memory.close)
        # Without running rollouts the old files can go first, so that both need not fit into memory.
        if not self._running_rollouts:
            self._memory_files[0].close()
        # From here on, the first folder is the one to fill.
        self._weight_folders.reverse()
        self._memory_files.reverse()
        place, files_in_memory = self._weight_folders[0], self._memory_files[0]
        files_in_memory.close()
        for name, content in files.items():
            # A file in memory has no path, so the engine reads it through a link.
            link = place / name
            try:
                file = files_in_memory.enter_context(os.fdopen(os.memfd_create(name), "wb"))
                link.symlink_to(f"/proc/{os.getpid()}/fd/{file.fileno()}")
                files_in_memory.callback(link.unlink)
                file.write(content)
                file.flush()
            except OSError as error:
                raise EngineError(
                    f"{name} of the new weights does not go into this machine's memory: {error}"
                ) from error
        return place

    async def run_group(self, group: GroupRequest) -> BatchResult:
        """See `WorkerClient.run_group`.

        Raises:
            WeightSyncError: the engine has other weights than the group needs.
        """
        if group.is_probe:
            return BatchResult((await sample_probe_line(self._rollouts, group.task),))
        # A prefetched group accepts newer weights; any other group needs exactly those of its step.
        has, begin = self._rollouts.engine.policy_step, group.min_weights_step
        if has < begin if begin is not None else has != group.policy_step:
            wanted = group.policy_step if begin is None else begin
            raise WeightSyncError(f"the node's engine is at policy step {has}, its group at {wanted}")
        rollouts = self._rollouts if group.modify_rollouts is None else group.modify_rollouts(self._rollouts)
        self._running_rollouts += group.size
        try:
            if begin is None:
                played = await rollouts.collect_group(group.task, group.size, group.temperature)
                part = replace(played, ungraded_trajectories=())  # no caller needs them
            else:
                slots = asyncio.Semaphore(rollouts.settings.concurrency)
                early = Prefetched(group.policy_step, slots, dict(group.finished_rollouts))
                part = await early.collect_group(rollouts, group.task, group.size, group.temperature)
        finally:
            self._running_rollouts -= group.size
        # Let an idle engine free its memory for the trainer.
        if not self._running_rollouts and isinstance(rollouts.engine, SupportsSleep):
            await rollouts.engine.sleep()
        return part

    async def get_heartbeat(self) -> Heartbeat:
        """See `WorkerClient.get_heartbeat`."""
        # Time since the last time stamp, without the interval between two of them.
        behind_s = max(0.0, time.monotonic() - self._loop_seen_s - _TURN_S)
        rollouts = self._opened
        if rollouts is None:
            return Heartbeat(os.getpid(), behind_s, log_lines=self._log.take_lines())
        preemptions = get_preemptions(rollouts.engine)
        stats = RolloutStats(dict(get_fault_counts(rollouts)), preemptions, self._progress.counts)
        step = rollouts.engine.policy_step
        return Heartbeat(os.getpid(), behind_s, step, self._running_rollouts, stats, self._log.take_lines())

    async def close(self) -> None:
        """See `WorkerClient.close`."""
        await self._stack.aclose()

    async def _watch_event_loop(self) -> None:
        """Write time stamps as long as the event loop runs."""
        while True:
            self._loop_seen_s = time.monotonic()
            await asyncio.sleep(_TURN_S)


def list_weight_files(folder: Path) -> Sequence[Path]:
    """Return the files of the weights in `folder`, with their index, in a fixed order.

    Raises:
        EngineError: the folder has none.
    """
    files = list_checkpoint_files(folder)
    return files if files == (folder / WHOLE,) else (*files, folder / INDEX)


def compute_checksum(folder: Path) -> str:
    """Return the checksum of the weights in `folder`, over names and contents.

    Raises:
        EngineError: the folder has none, or they cannot be read.
    """
    # A digest of the digests of all files, each after its name.
    whole = hashlib.blake2b(digest_size=16)
    try:
        for file in list_weight_files(folder):
            whole.update(file.name.encode())
            with file.open("rb") as stream:
                whole.update(hashlib.file_digest(stream, hashlib.blake2b).digest())
    except OSError as error:
        raise EngineError(f"the weights in {folder} cannot be read: {error}") from error
    return whole.hexdigest()


class _LogBuffer(logging.Handler):
    """Log handler that keeps the newest lines for the owner, which may be on another machine."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._kept: deque[str] = deque(maxlen=_KEPT_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append(self.format(record))

    def take_lines(self) -> tuple[str, ...]:
        """Return the lines since the last call."""
        return tuple(self._kept.popleft() for _ in range(len(self._kept)))
