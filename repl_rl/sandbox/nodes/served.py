"""Sandbox whose consoles run on the machines of a cluster, behind the interface `Machines`."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from repl_rl.errors import ReplRLError, RolloutFailure
from repl_rl.record.setup import Setup
from repl_rl.sandbox.nodes.hosts import Hosts, Wanted
from repl_rl.sandbox.nodes.messages import Carried, Hosting, HostLost, Machines
from repl_rl.sandbox.nodes.session import HostedSession

log = logging.getLogger(__name__)


class HostedSandbox:
    """Sandbox that leases consoles from the hosts of a cluster."""

    name = "nodes"

    def __init__(self, hosts: Hosts, python_version: tuple[int, int, int]) -> None:
        self.python_version = python_version
        self._hosts = hosts
        self._numbers = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def held(self) -> Mapping[Hosting, int]:
        """Number of consoles per host."""
        return self._hosts.leases.held

    def session(self) -> AbstractAsyncContextManager[HostedSession]:
        """As `Sandbox.session`."""
        return self._leased(None)

    def prepared(self, setup: Setup) -> AbstractAsyncContextManager[HostedSession]:
        """As `Preparing.prepared`. Each machine makes a workspace once, when one of its consoles needs it."""
        return self._leased(setup)

    @asynccontextmanager
    async def _leased(self, setup: Setup | None) -> AsyncIterator[HostedSession]:
        host, number = await self._begun(None if setup is None else Carried(setup.digest, setup.content))
        session = HostedSession(host, number, partial(self._hosts.lost, host))
        try:
            yield session
        finally:
            session.leave()
            self._let_go(host, number)

    async def _begun(self, setup: Carried | None) -> tuple[Hosting, int]:
        """Lease a console, and return its host and its number. If a host is lost, try another one: no line has run yet.

        Raises:
            SetupError, SandboxFault: as in the sandbox there.
            SandboxLost: no machine was available for too long.
        """
        while True:
            host, number = await self._hosts.leases.take(), next(self._numbers)
            try:
                await host.lease(number, setup)
            except HostLost as lost:
                self._hosts.lost(host, str(lost))
            except (ReplRLError, RolloutFailure):
                # The host refused the lease, so it holds no console for it.
                self._hosts.leases.give(host)
                raise
            except BaseException:
                # Cancelled: the host may have started the console already.
                self._let_go(host, number)
                raise
            else:
                return host, number

    def _let_go(self, host: Hosting, number: int) -> None:
        """End a console in the background. Its slot is released after its end."""
        task = asyncio.create_task(self._closed(host, number))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _closed(self, host: Hosting, number: int) -> None:
        try:
            await host.close(number)
        except HostLost as lost:
            self._hosts.lost(host, str(lost))
        except (ReplRLError, RolloutFailure) as error:
            log.warning("a console on machine %s did not end as it should: %s", host.name, error)
        finally:
            self._hosts.leases.give(host)

    async def settle(self) -> None:
        """Wait until every ended lease has been cleaned up."""
        await asyncio.gather(*self._closing)


@asynccontextmanager
async def serve_on(machines: Machines, wanted: Wanted) -> AsyncIterator[HostedSandbox]:
    """Run hosts on these machines, and their consoles, for the duration of the context.

    Raises:
        SandboxUnavailable: there is no machine, or none of them can hold a console.
    """
    hosts = Hosts(machines, wanted)
    try:
        sandbox = HostedSandbox(hosts, await hosts.open())
        try:
            yield sandbox
        finally:
            await hosts.close()
            await sandbox.settle()
    finally:
        await hosts.close()
