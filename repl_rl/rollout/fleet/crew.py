"""Worker pool: starts workers in the slots of a cluster, plays groups on them, and replaces lost ones.

A worker gets groups once its engine has the current weights. A worker that dies, freezes or falls behind is ended. Its
groups are played elsewhere from their beginning, with the same ids and seeds. Its slot is then used again.
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
    """Pool of workers. All its methods are called in one event loop."""

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
        """Set up an empty pool.

        Args:
            cluster: machines for the workers.
            setting: setting that each worker opens.
            places: concurrent rollouts per worker (>= 1).
            most: largest number of workers (>= 0); 0 means one per slot.
            waits: timeouts and intervals.
            shared: workers may read the weights from the owner's folder; False sends the files in any case.
            heard: function to call after each heartbeat.
        """
        self._cluster, self._setting, self._most = cluster, setting, most
        self.waits = waits or Waits()
        self._heard = heard
        self._lane, self._stable = Lane(cluster, shared), Stable()
        self.members: dict[str, Member] = {}
        """Present workers, by slot."""
        self.lost: list[Lost] = []
        """All lost workers, in order."""
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, int] = {}  # lost workers per slot in a row, without a played group
        self._rests_s: dict[str, float] = {}
        """Time at which a slot may be used again, by slot."""
        self._born = 0
        self._news = asyncio.Condition()
        self._batches = Batches(places, self.waits.group_s)
        self._managing: asyncio.Task[None] | None = None
        self._refusal: ReplRLError | None = None
        self._hope = Hope(cluster.name, self.waits, 0.0)

    async def begin(self) -> Facts:
        """Start the pool, and wait for the first ready worker.

        Raises:
            ReplRLError: the setting cannot be opened.
            BrokenDown: no worker was ready in time.
        """
        self._hope = Hope(self._cluster.name, self.waits, asyncio.get_running_loop().time())
        async with self._stable:
            self._managing = asyncio.create_task(self._manage())
            # If a setting cannot be opened, wait only for workers that still try.
            await self.until(lambda: bool(self.ready) or (self._refusal is not None and not self._coming))
        if not self.ready:
            assert self._refusal is not None
            raise self._refusal
        facts = self.ready[0].facts
        assert facts is not None
        return facts

    async def end(self) -> None:
        """End every worker and every task of the pool."""
        tasks = [task for task in (self._managing, *self._lives.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def cluster_name(self) -> str:
        """Name of the cluster, for messages."""
        return self._cluster.name

    @property
    def policy_step(self) -> int:
        """Policy step of the current weights."""
        return self._lane.policy_step

    @property
    def replayed(self) -> int:
        """Number of groups that were started again."""
        return self._batches.replayed

    @property
    def counts(self) -> dict[str, float]:
        """Metrics for `metrics.jsonl`."""
        told = {"nodes": len(self.ready), "nodes_lost": len(self.lost), "groups_replayed": self.replayed}
        return {f"fleet_{name}": float(count) for name, count in told.items()}

    @property
    def ready(self) -> list[Member]:
        """Workers that can play."""
        return [member for member in list(self.members.values()) if member.state == "ready"]

    @property
    def _coming(self) -> bool:
        return any(member.state == "opening" for member in self.members.values())

    async def _manage(self) -> None:
        """Use slots as they appear, and end workers that are overdue."""
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
            # Start a worker in each free slot whose pause is over.
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
        """Run one worker in a slot, from its start to its loss."""
        number, self._born = self._born, self._born + 1
        member = self.members[seat] = Member(f"node {number}", seat)
        try:
            numbered = replace(self._setting, number=number)
            await member.live(self._cluster, numbered, self.waits, self._welcome, self._heard)
        except Exception as error:
            why = error if isinstance(error, ReplRLError) else NodeLost(repr(error))
            # A setting that cannot be opened here cannot be opened elsewhere: `begin` raises this error.
            if member.facts is None and not isinstance(why, NodeLost):
                self._refusal = why
            self._doom(member, why)
            await self._tell()
            # The pause is not spent here, because another slot may take this worker's place meanwhile.
            self._rests_s[seat] = asyncio.get_running_loop().time() + self.waits.before(self._failed[seat])
        finally:
            # A cancellation must not leave the worker's process behind.
            await asyncio.shield(member.end(self.waits))
            del self.members[seat], self._lives[seat]

    async def _welcome(self, member: Member) -> None:
        if self._lane.weights is None:
            await self._catch_up(member)
        else:
            # The new worker reads the owner's folder, so keep it unchanged.
            await self._stable.reading(lambda: self._catch_up(member))

    async def _catch_up(self, member: Member) -> None:
        """Load the current weights into a new worker, and give it groups."""
        given = None
        while given is None or given[0] is not self._lane.weights:  # they may change during the load
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
        """Mark a worker as lost, kill it, and let its groups wait again."""
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
        """Wait for a condition that depends on workers.

        Raises:
            BrokenDown: no worker was ready for too long, or the cluster does not answer.
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
                    pass  # check timer and condition again

    async def load(self, weights: Weights) -> None:
        """Load weights into every worker, between two lines. A worker that does not load them in time is lost.

        Raises:
            BrokenDown: no worker loaded them and no new one came, or the cluster has no room for them.
            ReplRLError: the weights do not fit the policy.
        """
        async with self._stable:
            self._lane.change(weights)
            ready = self.ready
            given = await asyncio.gather(*map(self._give, ready), return_exceptions=True)
            if self._lane.refusal is not None:
                raise self._lane.refusal
            # A loss concerns one worker; any other error would occur on all of them.
            for member, error in zip(ready, given, strict=True):
                if isinstance(error, NodeLost | BrokenDown):
                    self._doom(member, error)
                elif error is not None:
                    raise error
            await self.until(lambda: bool(self.ready))
            # A worker that is still opening may read the folder.
            await self._stable.unread()

    async def play(self, groups: Sequence[Group], early: dict[int, Part] | None = None) -> list[Part]:
        """Play all groups on any workers, and return their results in order.

        With `early`, these are prefetched groups. They share the workers with those of other later steps; earlier
        requests come first. Each result is in `early`, under the index of its group, as soon as it has arrived.

        Raises:
            BrokenDown: no worker was ready for too long, or one group ended worker after worker.
            ReplRLError: an error of a worker that any other worker would raise too.
        """
        parts: dict[int, Part] = {} if early is None else early
        batch = self._batches.taking(early is not None)
        batch.ask(groups, parts)
        try:
            async with self._stable:
                while len(parts) < len(groups):
                    # Wait for a result or a change of the workers, then start as many groups as fit.
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
        """Return the results of a probe group on every ready worker. Raises the errors of `play`."""
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
                # If all these workers were lost, ask the next ones.
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
            # If the group has another attempt by now, this worker is already marked as lost.
            if batch.schedule.running.get(attempt.group) == attempt:
                self._doom(member, error)
        except Exception as error:
            # Any other worker would raise this error too.
            batch.error = batch.error or error
        await self._tell()
