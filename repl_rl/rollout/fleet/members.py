"""One life of a node as its owner leads it: started, opened, given the weights of now, listened to until it is lost."""

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
    """How long what is waited for, seconds (> 0): nothing waits for ever."""

    beat_s: float = 2.0
    """Between two questions whether a node is alive."""
    lost_s: float = 15.0
    """For the answer."""
    busy_s: float = 60.0
    """For the answer of one that opens its world: what it imports may hold it."""
    hung_s: float = 300.0
    """For an event loop that does not turn; opening an engine again can hold it for long."""
    start_s: float = 300.0
    """For a node's process."""
    open_s: float = 1800.0
    """For its world: large models take minutes."""
    load_s: float = 600.0
    """For new weights."""
    group_s: float = 3600.0
    """For a group."""
    close_s: float = 20.0
    """For a world to close before its node is killed."""
    look_s: float = 1.0
    """Between two looks for seats, and for what has taken too long."""
    pause_s: float = 1.0
    """Before a seat is taken again; twice as long after each further node there that has played nothing."""
    rest_s: float = 300.0
    """Before that, at most."""
    patience_s: float = 300.0
    """For any node at all."""
    silent_s: float = 30.0
    """For a cluster that does not say where nodes can be. Ray ends a process for that after 60."""

    def before(self, failed: int) -> float:
        """How long a seat rests of which `failed` nodes (>= 0) have ended in a row, with no group played in between:
        where machines are taken away and come back it is not to be lost, and a broken one is not to be tried without
        end."""
        return min(self.pause_s * 2.0 ** min(max(failed - 1, 0), _MOST_DOUBLED), self.rest_s)


async def within(limit_s: float, what: str, call: Awaitable[T]) -> T:
    """The answer of a node, if it comes in time.

    The time is counted in short waits: where it is the owner's own process that stood still (a paused machine, a step
    that held it), no node is blamed for more than one of them.

    Raises:
        NodeLost: it does not.
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
    """The weights of now, on their way to every node: through the owner's folder, or where a node has none of that."""

    def __init__(self, cluster: Cluster, shared: bool) -> None:
        self._cluster = cluster
        self._shared = shared
        self.weights: Weights | None = None
        """None: every engine has those that it was opened with."""
        self._published: asyncio.Task[object] | None = None
        self.refusal: BrokenDown | None = None
        """Why they cannot be sent to any node."""

    @property
    def policy_step(self) -> int:
        """Of the weights of now."""
        return 0 if self.weights is None else self.weights.policy_step

    def change(self, weights: Weights) -> None:
        """Take other weights from now on."""
        self.weights, self._published, self.refusal = weights, None, None

    async def give(self, node: Node) -> None:
        """Bring a node to the weights of now.

        Raises:
            NodeLost: what arrived are others.
        """
        weights = self.weights
        if weights is None:
            return
        arrived = await node.load(weights, None) if self._shared else None
        if arrived is None:
            arrived = await node.load(weights, await self._files(weights))
        if arrived != weights.checksum:
            raise NodeLost(f"weights of policy step {weights.policy_step} arrived as {arrived}, not {weights.checksum}")

    async def _files(self, weights: Weights) -> object:
        """Published once, whoever asks first."""
        if self._published is None:
            self._published = asyncio.create_task(self._publish(Path(weights.folder)))
        return await asyncio.shield(self._published)

    async def _publish(self, folder: Path) -> object:
        files = await asyncio.to_thread(lambda: {file.name: file.read_bytes() for file in weight_files(folder)})
        try:
            return await self._cluster.publish(files)
        except BrokenDown as error:
            self.refusal = error
            raise


class Stable:
    """Whether the folder of the weights stays as it is: while the owner's calls last, and no longer."""

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
            await self._none.wait()

    async def unread(self) -> None:
        """Wait until nobody reads it: whoever began before it was changed has looked at the change since."""
        await self._none.wait()

    async def reading(self, read: Callable[[], Awaitable[None]]) -> None:
        """Wait for it to be stable, and keep it so meanwhile."""
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
    """One life of a node."""

    name: str
    seat: str
    state: str = "starting"
    """starting, opening, ready, or lost."""
    node: Node | None = None
    facts: Facts | None = None
    beat: Beat = field(default_factory=Beat)
    groups: int = 0
    """Groups that it has played."""
    doomed: "asyncio.Future[ReplRLError]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Why it is lost, where that was noticed by somebody who asked it for something."""

    async def live(
        self,
        cluster: Cluster,
        setting: Setting,
        waits: Waits,
        ready: Callable[["Member"], Awaitable[None]],
        heard: Callable[["Member"], None],
    ) -> None:
        """Start the node, open its world there, make it `ready`, and ask it all the while whether it is alive.

        Raises:
            NodeLost: it could not be had in time, or is no more.
            ReplRLError: why it is lost, such as a world that does not open.
        """
        node = self.node = await within(waits.start_s, "its start", cluster.start(self.seat))
        self.state = "opening"

        async def working() -> None:
            self.facts = await within(waits.open_s, "opening its world", node.open(setting))
            await ready(self)
            await asyncio.Event().wait()

        tasks = [asyncio.create_task(work) for work in (working(), self._beating(node, waits, heard))]
        try:
            await self.unless_lost(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def unless_lost(self, call: Awaitable[T]) -> T:
        """What a call comes to. Raises ReplRLError: why the node was lost meanwhile."""
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
        """What it makes of a group that is only looked at. Raises ReplRLError: it is lost; or as `Node.play`."""
        assert self.node is not None
        return await within(waits.load_s, "a line to look at", self.unless_lost(self.node.play(group)))

    async def _beating(self, node: Node, waits: Waits, heard: Callable[["Member"], None]) -> None:
        while True:
            limit_s = waits.lost_s if self.state == "ready" else max(waits.lost_s, waits.busy_s)
            self.beat = await within(limit_s, "an answer whether it is alive", node.beat())
            heard(self)
            if self.facts is not None and self.beat.behind_s > waits.hung_s:
                raise NodeLost(f"its event loop has not turned for {self.beat.behind_s:.0f} s")
            await asyncio.sleep(waits.beat_s)

    async def end(self, waits: Waits) -> None:
        """Close its world if it listens, and end it."""
        if self.node is None:
            return
        try:
            if self.state == "ready":
                await within(waits.close_s, "its end", self.node.close())
        except NodeLost:
            pass  # it is killed all the same
        finally:
            self.node.kill()


@dataclass(frozen=True, slots=True)
class Lost:
    """A node that was lost: for people and files."""

    name: str
    seat: str
    why: str
    could_play: bool = False
    """Before it was."""
