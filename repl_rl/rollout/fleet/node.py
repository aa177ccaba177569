"""Worker: a separate process with engine, consoles and sampler, which plays whole groups."""

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
from dataclasses import replace
from pathlib import Path

from repl_rl.engine.base import Resting
from repl_rl.engine.checkpoint import INDEX, WHOLE, checkpoint_files
from repl_rl.errors import EngineError, WeightSyncError
from repl_rl.machine.folders import private_folder
from repl_rl.rollout.again import Part
from repl_rl.rollout.early import Early
from repl_rl.rollout.facts import Facts, Figures
from repl_rl.rollout.fleet.messages import Beat, Group, Setting, Weights
from repl_rl.rollout.probe import probed
from repl_rl.rollout.runner import Rollouts

NodeOpener = Callable[[int], AbstractAsyncContextManager[Rollouts]]
"""Function that opens rollouts on the worker with that number."""
_PREFIX = "repl_rl-node-weights-"
_TURN_S = 0.5
"""Interval between two time stamps of the event loop, seconds."""
_KEPT_LINES = 1000
"""Largest number of log lines that are kept until the owner fetches them."""


class RolloutNode:
    """Worker process. One event loop calls all methods but `beat`, which any thread may call."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._opened: Rollouts | None = None
        self._places: list[Path] = []
        self._held = [ExitStack(), ExitStack()]
        self._turned_s = time.monotonic()
        self._beat = Beat()
        self._under_way = self._played = self._tokens = 0
        self._log = _Lines()

    async def open(self, setting: Setting) -> Facts:
        """See `Node.open`."""
        with suppress(FileNotFoundError):  # another machine may not have this folder
            os.chdir(setting.folder)
        sys.path += [place for place in setting.path if place not in sys.path]
        logging.getLogger().addHandler(self._log)
        # Unpickle after the path is set: the function may need modules of the owner.
        opener: NodeOpener = pickle.loads(setting.opener)
        self._stack.callback(logging.getLogger().removeHandler, self._log)
        self._stack.callback(asyncio.create_task(self._turn()).cancel)
        self._opened = await self._stack.enter_async_context(opener(setting.number))
        return self._opened.facts

    @property
    def _rollouts(self) -> Rollouts:
        if self._opened is None:
            raise EngineError("the node's world is not open")
        return self._opened

    async def load(self, weights: Weights, files: Mapping[str, bytes] | None) -> str | None:
        """See `Node.load`. Files are written to this machine's memory.

        While rollouts run, files stay in memory until the engine has the next ones. An engine that dies meanwhile is
        opened again with its old files.
        """
        if files is None:
            folder = Path(weights.folder)
            if not os.access(folder, os.R_OK):
                return None
        else:
            folder = await asyncio.to_thread(self._written, files)
        await self._rollouts.engine.load_weights(folder, weights.policy_step)
        # The engine no longer needs the previous files.
        self._held[1].close()
        # Computed after the load, so that it also detects files that changed during the load.
        return await asyncio.to_thread(checksum, folder)

    def _written(self, files: Mapping[str, bytes]) -> Path:
        """Return a folder of links to files in memory. The memory is freed with this process, however it ends.

        Raises:
            EngineError: the memory has no room for the files.
        """
        # Two folders alternate: one for the files that the engine has, one for the next ones.
        if not self._places:
            folder = self._stack.enter_context(private_folder(Path(tempfile.gettempdir()), _PREFIX))
            for number, held in enumerate(self._held):
                self._places.append(folder / str(number))
                self._places[-1].mkdir()
                self._stack.callback(held.close)
        # Without running rollouts the old files can go first, so that both need not fit into memory.
        if not self._under_way:
            self._held[0].close()
        self._places.reverse()
        self._held.reverse()
        place, held = self._places[0], self._held[0]
        held.close()
        for name, content in files.items():
            # A file in memory has no path, so the engine reads it through a link.
            link = place / name
            try:
                file = held.enter_context(os.fdopen(os.memfd_create(name), "wb"))
                link.symlink_to(f"/proc/{os.getpid()}/fd/{file.fileno()}")
                held.callback(link.unlink)
                file.write(content)
                file.flush()
            except OSError as error:
                raise EngineError(
                    f"{name} of the new weights does not go into this machine's memory: {error}"
                ) from error
        return place

    async def play(self, group: Group) -> Part:
        """See `Node.play`.

        Raises:
            WeightSyncError: the engine has other weights than the group needs.
        """
        if group.look:
            return Part((await probed(self._rollouts, group.task),))
        # A prefetched group accepts newer weights; any other group needs exactly those of its step.
        has, begin = self._rollouts.engine.policy_step, group.begin
        if has < begin if begin is not None else has != group.policy_step:
            wanted = group.policy_step if begin is None else begin
            raise WeightSyncError(f"the node's engine is at policy step {has}, its group at {wanted}")
        rollouts = self._rollouts if group.alter is None else group.alter(self._rollouts)
        early = None
        if begin is not None:
            early = Early(group.policy_step, asyncio.Semaphore(rollouts.concurrency), dict(group.finished))
        self._under_way += group.size
        try:
            part = await rollouts.group(group.task, group.size, group.temperature, early)
        finally:
            self._under_way -= group.size
        self._played += group.size
        self._tokens += sum(trajectory.sampled_tokens for trajectory in part.trajectories)
        # Let an idle engine free its memory for the trainer.
        if not self._under_way and isinstance(rollouts.engine, Resting):
            await rollouts.engine.rest()
        return part if early is not None else replace(part, unjudged=())  # no caller needs them

    async def beat(self) -> Beat:
        """See `Node.beat`."""
        behind_s = max(0.0, time.monotonic() - self._turned_s - _TURN_S)
        counted = self._under_way, self._played, self._tokens
        rollouts = self._opened
        if rollouts is None:
            return Beat(os.getpid(), behind_s, 0, *counted, log=self._log.taken())
        figures = Figures(dict(rollouts.faults), rollouts.pressure)
        return Beat(os.getpid(), behind_s, rollouts.engine.policy_step, *counted, figures, self._log.taken())

    async def close(self) -> None:
        """See `Node.close`."""
        await self._stack.aclose()

    async def _turn(self) -> None:
        while True:
            self._turned_s = time.monotonic()
            await asyncio.sleep(_TURN_S)


class _Lines(logging.Handler):
    """Log handler that keeps the newest lines for the owner, which may be on another machine."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._kept: deque[str] = deque(maxlen=_KEPT_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append(self.format(record))

    def taken(self) -> tuple[str, ...]:
        """Return the lines since the last call."""
        return tuple(self._kept.popleft() for _ in range(len(self._kept)))


def weight_files(folder: Path) -> Sequence[Path]:
    """Return the files of the weights in `folder`, with their index, in a fixed order.

    Raises:
        EngineError: the folder has none.
    """
    files = checkpoint_files(folder)
    return files if files == (folder / WHOLE,) else (*files, folder / INDEX)


def checksum(folder: Path) -> str:
    """Return the checksum of the weights in `folder`, over names and contents.

    Raises:
        EngineError: the folder has none, or they cannot be read.
    """
    whole = hashlib.blake2b(digest_size=16)
    try:
        for file in weight_files(folder):
            whole.update(file.name.encode())
            with file.open("rb") as stream:
                whole.update(hashlib.file_digest(stream, hashlib.blake2b).digest())
    except OSError as error:
        raise EngineError(f"the weights in {folder} cannot be read: {error}") from error
    return whole.hexdigest()
