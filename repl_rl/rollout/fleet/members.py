"""Lifetime of one worker as its owner sees it: start, opening, weights, heartbeats, and its loss."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from repl_rl.errors import BrokenDown, NodeLost, ReplRLError
from repl_rl.rollout.again import Part
from repl_rl.rollout.facts import Facts
from repl_rl.rollout.fleet.messages import Beat, Cluster, Group, Node, Setting, Weights
from repl_rl.rollout.fleet.node import weight_files

T = TypeVar("T")
_LONGEST_WAIT_S = 1.0
_MOST_DOUBLED = 60


@dataclass(frozen=True, slots=True)
class Waits:
    """Timeouts and intervals for workers, seconds (> 0). Every wait has a limit."""

    beat_s: float = 2.0
    """Interval between two heartbeats."""
    lost_s: float = 15.0
    """Timeout of a heartbeat, and of a search for slots."""
    busy_s: float = 60.0
    """Timeout of a heartbeat while the worker opens, because its imports may block it."""
    hung_s: float = 300.0
    """Longest time that a worker's event loop may be blocked. A restart of the engine can block it for long."""
    start_s: float = 300.0
    """Timeout for the start of a worker's process."""
    open_s: float = 1800.0
    """Timeout for the opening of a worker's engine and consoles. Large models take minutes."""
    load_s: float = 600.0
    """Timeout for new weights."""
    group_s: float = 3600.0
    """Timeout of a group."""
    close_s: float = 20.0
    """Time for a worker to close before it is killed."""
    look_s: float = 1.0
    """Interval between two searches for free slots and overdue groups."""
    pause_s: float = 1.0
    """Pause before a slot is used again. It doubles with each further worker of the slot that played no group."""
    rest_s: float = 300.0
    """Upper limit of that pause."""
    patience_s: float = 300.0
    """Longest time without any ready worker."""
    silent_s: float = 30.0
    """Longest time without an answer of the cluster. Ray ends a process after 60 seconds without one."""

    def before(self, failed: int) -> float:
        """Return the pause of a slot after `failed` workers (>= 0) in a row that ended without a played group.

        A slot whose machine is removed for some time stays usable. A broken one is retried ever more rarely.
        """
        return min(self.pause_s * 2.0 ** min(max(failed - 1, 0), _MOST_DOUBLED), self.rest_s)


async def within(limit_s: float, what: str, call: Awaitable[T]) -> T:
    """Return the result of a call to a worker, if it comes in time.

    Time is counted in short waits. If this process itself was paused or blocked, a worker loses at most one of them.

    Raises:
        NodeLost: the call took longer than `limit_s`.
    """
    asked = asyncio.ensure_future(call)
    wait_s = min(limit_s / 10, _LONGEST_WAIT_S)
    try:
        for _ in range(math.ceil(limit_s / wait_s)):
            await asyncio.wait({asked}, timeout=wait_s)
            if asked.done():
                return asked.result()
        raise NodeLost(f"{what} took longer than {limit_s:g} s")
    finally:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


class Lane:
    """Distribution of the current weights to all workers.

    A worker reads them from the owner's folder, or receives the files if it cannot read that folder.
    """

    def __init__(self, cluster: Cluster, shared: bool) -> None:
        self._cluster = cluster
        self._shared = shared
        self.weights: Weights | None = None
        """Current weights. None means that every engine has the weights with which it was opened."""
        self._published: asyncio.Task[object] | None = None
        self.refusal: BrokenDown | None = None
        """Error because of which the weights cannot be sent to any worker, or None."""

    @property
    def policy_step(self) -> int:
        """Policy step of the current weights."""
        return 0 if self.weights is None else self.weights.policy_step

    def change(self, weights: Weights) -> None:
        """Replace the current weights."""
        self.weights, self._published, self.refusal = weights, None, None

    async def give(self, node: Node) -> None:
        """Load the current weights into a worker.

        Raises:
            NodeLost: the worker loaded other weights.
        """
        weights = self.weights
        if weights is None:
            return
        # The worker returns None if it cannot read the owner's folder.
        arrived = await node.load(weights, None) if self._shared else None
        if arrived is None:
            arrived = await node.load(weights, await self._files(weights))
        if arrived != weights.checksum:
            raise NodeLost(f"weights of policy step {weights.policy_step} arrived as {arrived}, not {weights.checksum}")

    async def _files(self, weights: Weights) -> object:
        """Publish the files once, at the first request."""
        if self._published is None:
            self._published = asyncio.create_task(self._publish(Path(weights.folder)))
        # Other workers wait for the same publication, so the cancellation of one wait must not reach it.
        return await asyncio.shield(self._published)

    async def _publish(self, folder: Path) -> object:
        files = await asyncio.to_thread(lambda: {file.name: file.read_bytes() for file in weight_files(folder)})
        try:
            return await self._cluster.publish(files)
        except BrokenDown as error:
            self.refusal = error
            raise


class Stable:
    """Lock that keeps the folder of the weights unchanged while workers read it.

    The owner may change the folder between its calls, but not during one.
    """

    def __init__(self) -> None:
        self._is = asyncio.Event()
        self._readers = 0
        self._none = asyncio.Event()
        self._none.set()
        self._calls = 0

    async def __aenter__(self) -> None:
        self._calls += 1
        self._is.set()

    async def __aexit__(self, *exc_info: object) -> None:
        self._calls -= 1
        if not self._calls:
            self._is.clear()
            # The owner may change the folder after this call: wait for the readers.
            await self._none.wait()

    async def unread(self) -> None:
        """Wait until no worker reads the folder.

        A worker that began to read before a change of the weights notices the change before it is done.
        """
        await self._none.wait()

    async def reading(self, read: Callable[[], Awaitable[None]]) -> None:
        """Wait until the folder is stable, and keep it so while `read` runs."""
        await self._is.wait()
        self._readers += 1
        self._none.clear()
        try:
            await read()
        finally:
            self._readers -= 1
            if not self._readers:
                self._none.set()


@dataclass(slots=True, eq=False)
class Member:
    """One worker, from its start to its loss."""

    name: str
    seat: str
    state: str = "starting"
    """State: starting, opening, ready, or lost."""
    node: Node | None = None
    facts: Facts | None = None
    beat: Beat = field(default_factory=Beat)
    groups: int = 0
    """Number of groups that it has played."""
    doomed: "asyncio.Future[ReplRLError]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Reason of the loss, once another call notices the loss."""

    async def live(
        self,
        cluster: Cluster,
        setting: Setting,
        waits: Waits,
        ready: Callable[["Member"], Awaitable[None]],
        heard: Callable[["Member"], None],
    ) -> None:
        """Start the worker, open its engine and consoles, call `ready`, and check its heartbeat all the time.

        Raises:
            NodeLost: the worker did not start in time, or is gone.
            ReplRLError: another reason of the loss, such as a setting that cannot be opened.
        """
        node = self.node = await within(waits.start_s, "its start", cluster.start(self.seat))
        self.state = "opening"

        async def working() -> None:
            self.facts = await within(waits.open_s, "opening its world", node.open(setting))
            await ready(self)
            # Wait forever: only a heartbeat that fails, or a reported loss, ends the worker.
            await asyncio.Event().wait()

        tasks = [asyncio.create_task(work) for work in (working(), self._beating(node, waits, heard))]
        try:
            await self.unless_lost(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
            # Raise the error of the task that ended.
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def unless_lost(self, call: Awaitable[T]) -> T:
        """Return the result of a call.

        Raises:
            ReplRLError: reason of the loss, if the worker is lost before the call ends.
        """
        asked = asyncio.ensure_future(call)
        try:
            either: list[asyncio.Future[T] | asyncio.Future[ReplRLError]] = [asked, self.doomed]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            raise self.doomed.result()
        finally:
            asked.cancel()

    async def looked(self, group: Group, waits: Waits) -> Part:
        """Return the result of a probe group.

        Raises:
            ReplRLError: the worker is lost, or see `Node.play`.
        """
        assert self.node is not None
        return await within(waits.load_s, "a line to look at", self.unless_lost(self.node.play(group)))

    async def _beating(self, node: Node, waits: Waits, heard: Callable[["Member"], None]) -> None:
        while True:
            # Imports may block a worker while it opens, so its heartbeat has more time.
            limit_s = waits.lost_s if self.state == "ready" else max(waits.lost_s, waits.busy_s)
            self.beat = await within(limit_s, "an answer whether it is alive", node.beat())
            heard(self)
            # A heartbeat arrives even if the event loop of the rollouts is blocked, so check that loop as well.
            if self.facts is not None and self.beat.behind_s > waits.hung_s:
                raise NodeLost(f"its event loop has not turned for {self.beat.behind_s:.0f} s")
            await asyncio.sleep(waits.beat_s)

    async def end(self, waits: Waits) -> None:
        """Close the worker if it still responds, and kill it."""
        if self.node is None:
            return
        try:
            if self.state == "ready":
                await within(waits.close_s, "its end", self.node.close())
        except NodeLost:
            pass  # it is killed anyway
        finally:
            self.node.kill()


@dataclass(frozen=True, slots=True)
class Lost:
    """Record of a lost worker, for people and files."""

    name: str
    seat: str
    why: str
    could_play: bool = False
    """True if the worker was ready before its loss."""
