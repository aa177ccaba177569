"""The owner of a fleet's nodes: it has them where there are seats, plays groups on them, and outlives whatever dies.

A node is given work once its engine has the weights of now. One that dies, freezes or falls behind is ended, its groups
are played elsewhere from their beginning, with the same ids and seeds, and its seat is taken again.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from repl_rl.errors import BrokenDown, NodeLost, ReplRLError
from repl_rl.rollout.again import Part
from repl_rl.rollout.facts import Facts
from repl_rl.rollout.fleet.batch import Batch, Batches
from repl_rl.rollout.fleet.hope import Hope
from repl_rl.rollout.fleet.members import Lane, Lost, Member, Stable, Waits, within
from repl_rl.rollout.fleet.messages import Cluster, Group, Setting, Weights
from repl_rl.rollout.fleet.schedule import Attempt

log = logging.getLogger(__name__)


class Crew:
    """Everything here is called in one event loop."""

    def __init__(
        self,
        cluster: Cluster,
        setting: Setting,
        places: int,
        most: int = 0,
        waits: Waits | None = None,
        shared: bool = True,
        heard: Callable[[Member], None] = lambda _: None,
    ) -> None:
        """
        Args:
            cluster: where nodes can be.
            setting: how they open the world.
            places: rollouts under way at once on a node (>= 1).
            most: nodes (>= 0); 0: as many as there are seats.
            waits: how long what is waited for.
            shared: nodes may find the weights in the owner's folder; False: they are sent in any case.
            heard: is told of each beat.
        """
        self._cluster, self._setting, self._most = cluster, setting, most
        self.waits = waits or Waits()
        self._heard = heard
        self._lane, self._stable = Lane(cluster, shared), Stable()
        self.members: dict[str, Member] = {}
        """Nodes that are there, by seat."""
        self.lost: list[Lost] = []
        """All nodes that were lost, in order."""
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, int] = {}  # nodes of a seat in a row, with no group played in between
        self._rests_s: dict[str, float] = {}
        """By seat: when it may be taken again."""
        self._born = 0
        self._news = asyncio.Condition()
        self._batches = Batches(places, self.waits.group_s)
        self._managing: asyncio.Task[None] | None = None
        self._refusal: ReplRLError | None = None
        self._hope = Hope(cluster.name, self.waits, 0.0)

    async def begin(self) -> Facts:
        """Have a first node ready.

        Raises:
            ReplRLError: its world does not open.
            BrokenDown: there was no node in time.
        """
        self._hope = Hope(self._cluster.name, self.waits, asyncio.get_running_loop().time())
        async with self._stable:
            self._managing = asyncio.create_task(self._manage())
            await self.until(lambda: bool(self.ready) or (self._refusal is not None and not self._coming))
        if not self.ready:
            assert self._refusal is not None
            raise self._refusal
        facts = self.ready[0].facts
        assert facts is not None
        return facts

    async def end(self) -> None:
        """End every node, and leave nothing behind."""
        tasks = [task for task in (self._managing, *self._lives.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def cluster_name(self) -> str:
        """For messages."""
        return self._cluster.name

    @property
    def policy_step(self) -> int:
        """Of the weights of now."""
        return self._lane.policy_step

    @property
    def replayed(self) -> int:
        """Groups that were begun again."""
        return self._batches.replayed

    @property
    def counts(self) -> dict[str, float]:
        """For `metrics.jsonl`."""
        told = {"nodes": len(self.ready), "nodes_lost": len(self.lost), "groups_replayed": self.replayed}
        return {f"fleet_{name}": float(count) for name, count in told.items()}

    @property
    def ready(self) -> list[Member]:
        """Nodes that can play."""
        return [member for member in list(self.members.values()) if member.state == "ready"]

    @property
    def _coming(self) -> bool:
        return any(member.state == "opening" for member in self.members.values())

    async def _manage(self) -> None:
        """Take seats as they come, and end what takes too long."""
        loop = asyncio.get_running_loop()
        while True:
            seats: Sequence[str] = ()
            try:
                seats = await within(self.waits.lost_s, "a look for seats", self._cluster.seats())
                self._hope.answered(loop.time())
            except NodeLost as error:
                log.warning("cluster %s does not answer: %s", self._cluster.name, error)
                self._hope.silent(str(error))
            if self.ready:
                self._hope.manned(loop.time())
            for seat in seats:
                full = bool(self._most) and len(self._lives) >= self._most
                if seat not in self._lives and not full and loop.time() >= self._rests_s.get(seat, 0.0):
                    self._lives[seat] = asyncio.create_task(self._live(seat))
            self._hurry()
            await asyncio.sleep(self.waits.look_s)

    def _hurry(self) -> None:
        for attempt, task in list(self._batches.overdue(asyncio.get_running_loop().time())):
            self._doom(self._named(attempt), NodeLost(f"task {task} took longer than {self.waits.group_s:g} s"))

    async def _live(self, seat: str) -> None:
        """The life of a node in that seat."""
        number, self._born = self._born, self._born + 1
        member = self.members[seat] = Member(f"node {number}", seat)
        try:
            numbered = replace(self._setting, number=number)
            await member.live(self._cluster, numbered, self.waits, self._welcome, self._heard)
        except Exception as error:
            why = error if isinstance(error, ReplRLError) else NodeLost(repr(error))
            if member.facts is None and not isinstance(why, NodeLost):
                self._refusal = why
            self._doom(member, why)
            await self._tell()
            # Rest, but not here: meanwhile the place of its node may be another seat's.
            self._rests_s[seat] = asyncio.get_running_loop().time() + self.waits.before(self._failed[seat])
        finally:
            await asyncio.shield(member.end(self.waits))
            del self.members[seat], self._lives[seat]

    async def _welcome(self, member: Member) -> None:
        if self._lane.weights is None:
            await self._catch_up(member)
        else:
            await self._stable.reading(lambda: self._catch_up(member))

    async def _catch_up(self, member: Member) -> None:
        """Give a node that is new the weights of now, and work."""
        given = None
        while given is None or given[0] is not self._lane.weights:  # which may change while it takes them
            given = (self._lane.weights,)
            await self._give(member)
        member.state = "ready"
        self._batches.join(member.name)
        await self._tell()

    async def _give(self, member: Member) -> None:
        assert member.node is not None
        given = member.unless_lost(self._lane.give(member.node))
        await within(self.waits.load_s, "new weights", given)

    def _doom(self, member: Member, error: ReplRLError) -> None:
        """A node is lost: it is ended, and what it was to play waits again."""
        if member.state == "lost":
            return
        could_play, member.state = member.state == "ready", "lost"
        self._failed[member.seat] = 0 if member.groups else self._failed.get(member.seat, 0) + 1
        self.lost.append(Lost(member.name, member.seat, str(error), could_play))
        log.warning("%s of the fleet, at %s, is lost: %s", member.name, member.seat, error)
        if member.node is not None:
            member.node.kill()
        self._batches.leave(member.name, str(error))
        member.doomed.set_result(error)

    async def _tell(self) -> None:
        self._batches.news()
        async with self._news:
            self._news.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that nodes do, as long as there is hope.

        Raises:
            BrokenDown: there has been no node for too long, or the cluster does not answer.
        """
        loop = asyncio.get_running_loop()
        async with self._news:
            while True:
                if self.ready:
                    self._hope.manned(loop.time())
                left_s = self._hope.left_s(loop.time(), self._coming, self.lost)
                if condition():
                    return
                try:
                    async with asyncio.timeout(min(left_s, self.waits.look_s)):
                        await self._news.wait()
                except TimeoutError:
                    pass  # both are looked at again

    async def load(self, weights: Weights) -> None:
        """Give every node these weights, between two lines; one that does not take them in time is lost.

        Raises:
            BrokenDown: none took them, and no other came, or the cluster has no room for them.
            ReplRLError: they are none for this policy.
        """
        async with self._stable:
            self._lane.change(weights)
            ready = self.ready
            given = await asyncio.gather(*map(self._give, ready), return_exceptions=True)
            if self._lane.refusal is not None:
                raise self._lane.refusal
            for member, error in zip(ready, given, strict=True):
                if isinstance(error, NodeLost | BrokenDown):
                    self._doom(member, error)
                elif error is not None:
                    raise error
            await self.until(lambda: bool(self.ready))
            await self._stable.unread()

    async def play(self, groups: Sequence[Group], early: dict[int, Part] | None = None) -> list[Part]:
        """Play all groups, wherever there is a node, and return their parts in order.

        With `early` they are of a step to come, and share the nodes' room with those of other such steps: who asked
        first comes first. Each part is in `early` under its place once it has come.

        Raises:
            BrokenDown: there was no node for too long, or one group ended node after node.
            ReplRLError: what a node raised that another would raise too.
        """
        parts: dict[int, Part] = {} if early is None else early
        batch = self._batches.taking(early is not None)
        batch.ask(groups, parts)
        try:
            async with self._stable:
                while len(parts) < len(groups):
                    await self.until(lambda: batch.news or batch.error is not None or len(parts) == len(groups))
                    batch.news = False
                    if batch.error is not None:
                        raise batch.error
                    for attempt in batch.schedule.assign(asyncio.get_running_loop().time()):
                        batch.begun(asyncio.create_task(self._play(batch, attempt, self._named(attempt))))
        finally:
            await self._batches.left(batch)
        return [parts[place] for place in range(len(groups))]

    async def look(self, group: Group) -> list[Part]:
        """What every node makes of a group that is only looked at. Raises as `play`."""
        async with self._stable:
            while True:
                await self.until(lambda: bool(self.ready))
                ready = self.ready
                asked = (member.looked(group, self.waits) for member in ready)
                told = await asyncio.gather(*asked, return_exceptions=True)
                for member, one in zip(ready, told, strict=True):
                    if isinstance(one, NodeLost | BrokenDown):
                        self._doom(member, one)
                    elif isinstance(one, BaseException):
                        raise one
                if found := [one for one in told if isinstance(one, Part)]:
                    return found

    def _named(self, attempt: Attempt) -> Member:
        return next(member for member in self.members.values() if member.name == attempt.node)

    async def _play(self, batch: Batch, attempt: Attempt, member: Member) -> None:
        assert member.node is not None
        try:
            part = await member.node.play(batch.group(attempt))
            if batch.played(attempt, part):
                member.groups += 1
        except (NodeLost, BrokenDown) as error:
            if batch.schedule.running.get(attempt.group) == attempt:
                self._doom(member, error)
        except Exception as error:
            batch.error = batch.error or error
        await self._tell()
