"""Console hosts of a sandbox: starts one per machine, detects lost ones by heartbeats, and replaces them."""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field

from repl_rl.errors import ReplRLError, RolloutFailure, SandboxFault, SandboxLost, SandboxUnavailable
from repl_rl.sandbox.base import Births
from repl_rl.sandbox.nodes.leases import Leases
from repl_rl.sandbox.nodes.messages import Hosting, HostLost, Machines
from repl_rl.sandbox.served import PATIENCE_S

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Waits:
    """Intervals and timeouts, seconds."""

    look_s: float = 2.0
    """Interval between queries for the machines of the cluster."""
    beat_s: float = 2.0
    """Interval between heartbeats of a host."""
    start_s: float = 120.0
    """Timeout for the start of a host's process."""
    lost_s: float = 30.0
    """Timeout of a heartbeat. A host that exceeds it is lost."""
    pauses_s: tuple[float, ...] = PATIENCE_S
    """Pauses before further hosts are started on a machine where the last ones did not start. Their sum is the timeout
    for any machine: after it, waiting leases fail."""
    end_s: float = 20.0
    """Time for hosts to end their consoles before they are killed."""


@dataclass(slots=True)
class _Tried:
    """Failed starts on a machine."""

    times: int = 0
    next_s: float = 0.0


@dataclass(slots=True)
class _Up:
    """Running host, and the task that sends its heartbeats."""

    host: Hosting
    asking: "asyncio.Task[None]"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Settings of every host."""

    kind: str
    """Name of the sandbox on each machine."""
    births: Births
    """Options for all machines together. The warm consoles are spread over the machines."""
    consoles: int
    """Maximum consoles per machine at a time."""
    waits: Waits = field(default_factory=Waits)

    def of_each(self, machines: int) -> Births:
        """Return the options for each of `machines` machines."""
        warm = min(self.consoles, -(-self.births.warm // max(1, machines)))
        return Births(self.births.limits, tuple(self.births.preload), warm, self.births.starting)


class Hosts:
    """Console hosts of one sandbox. Call `open` first, and `close` at the end."""

    def __init__(self, machines: Machines, wanted: Wanted) -> None:
        self._machines, self._wanted, self._waits = machines, wanted, wanted.waits
        self.leases: Leases[Hosting] = Leases(wanted.consoles)
        self._python_version: tuple[int, int, int] | None = None
        self._up: dict[str, _Up] = {}
        self._tried: dict[str, _Tried] = {}
        self._trying: dict[str, asyncio.Task[None]] = {}
        self._births = wanted.births
        self._watching: asyncio.Task[None] | None = None
        self._last_words = "no host was started"

    async def open(self) -> tuple[int, int, int]:
        """Start a host on each machine. Return the version of the Python inside.

        Raises:
            SandboxUnavailable: the cluster has no machine, or none of its machines can hold a console.
        """
        try:
            names = list(await self._machines.names())
        except HostLost as lost:
            raise SandboxUnavailable(f"sandbox 'nodes': its cluster is gone ({lost}); start it again") from lost
        if not names:
            raise SandboxUnavailable("sandbox 'nodes': no machine of the cluster has CPUs; add some with `ray start`")
        self._births = self._wanted.of_each(len(names))
        await asyncio.gather(*(self._try(name) for name in names))
        if self._python_version is None:
            raise SandboxUnavailable(f"sandbox 'nodes': no machine holds consoles: {self._last_words}")
        self._watching = asyncio.create_task(self._watch())
        return self._python_version

    async def _try(self, name: str) -> None:
        """Start a host on a machine. A failure is logged, and retried later."""
        tried = self._tried.setdefault(name, _Tried())
        try:
            await self._start(name)
        except (ReplRLError, RolloutFailure) as error:
            pauses = self._waits.pauses_s
            pause_s = pauses[min(tried.times, len(pauses) - 1)]
            tried.times, tried.next_s = tried.times + 1, time.monotonic() + pause_s
            self._last_words = f"on {name}: {error}"
            log.warning("machine %s holds no consoles (%s); the next try is in %g s", name, error, pause_s)
        else:
            self._tried.pop(name, None)
        finally:
            self._trying.pop(name, None)

    async def _start(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._waits.start_s):
                host = await self._machines.start(name)
        except TimeoutError:
            raise HostLost(f"its process has not started within {self._waits.start_s:g} s") from None
        # Heartbeats also cover the opening of the sandbox, which may hang.
        asking = asyncio.create_task(self._ask(host))
        try:
            version = await host.open(self._wanted.kind, self._births)
            # All hosts must have the same Python, because the sandbox has one `python_version`.
            first = self._python_version or version
            if version != first:
                mine, theirs = (".".join(map(str, one)) for one in (first, version))
                raise SandboxFault(f"its consoles have Python {theirs}, those of the others {mine}")
        except BaseException:
            asking.cancel()
            host.kill()
            raise
        self._python_version = version
        self._up[name] = _Up(host, asking)
        self.leases.join(host)

    async def _ask(self, host: Hosting) -> None:
        """Send heartbeats to a host until it does not answer."""
        try:
            while True:
                async with asyncio.timeout(self._waits.lost_s):
                    await host.beat()
                await asyncio.sleep(self._waits.beat_s)
        except HostLost as lost:
            self.lost(host, str(lost))
        except TimeoutError:
            self.lost(host, f"it has not answered for {self._waits.lost_s:g} s")

    def lost(self, host: Hosting, why: str) -> None:
        """Remove a lost host. It gets no further leases, and calls that wait for it fail."""
        up = self._up.get(host.name)
        if up is not None and up.host is host:
            log.warning("the consoles on machine %s are lost: %s", host.name, why)
            self._last_words = f"on {host.name}: {why}"
            self._up.pop(host.name).asking.cancel()
            self.leases.leave(host)
        host.kill()

    async def _watch(self) -> None:
        """Start hosts on new machines, and on machines whose host is gone."""
        since_s = time.monotonic()
        while True:
            await asyncio.sleep(self._waits.look_s)
            with suppress(HostLost):
                due = [name for name in await self._machines.names() if self._due(name)]
                for name in due:
                    # Start each in its own task, so that a slow machine does not delay the others.
                    self._trying[name] = asyncio.create_task(self._try(name))
            now_s = time.monotonic()
            # Measure the time without any host.
            since_s = now_s if self._up else since_s
            if now_s - since_s > sum(self._waits.pauses_s):
                self.leases.refuse(lambda: SandboxLost(f"no machine holds consoles: {self._last_words}"))

    def _due(self, name: str) -> bool:
        if name in self._up or name in self._trying:
            return False
        return name not in self._tried or time.monotonic() >= self._tried[name].next_s

    async def close(self) -> None:
        """End all hosts and their consoles."""
        self.leases.refuse(lambda: SandboxFault("the sandbox is closed"))
        if self._watching is not None:
            # This task starts others, so end it first.
            self._watching.cancel()
            await asyncio.wait({self._watching})
        tasks = [*(up.asking for up in self._up.values()), *self._trying.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        hosts = [up.host for up in self._up.values()]
        self._up.clear()
        await asyncio.gather(*(self._end(host) for host in hosts))

    async def _end(self, host: Hosting) -> None:
        self.leases.leave(host)
        try:
            async with asyncio.timeout(self._waits.end_s):
                await host.end()
        except (TimeoutError, ReplRLError, RolloutFailure) as error:
            log.warning("the consoles on machine %s were killed: %s", host.name, error or "they did not end in time")
        finally:
            host.kill()
