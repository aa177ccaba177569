"""Pool of workspace processes, one per workspace, that fork consoles. Idle ones are evicted, oldest first."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from repl_rl.errors import SandboxFault, SandboxLost, SetupError
from repl_rl.record.setup import Setup
from repl_rl.sandbox.client import ConsoleSession
from repl_rl.sandbox.door import Station

IDLE = 8
"""Maximum idle workspaces that are kept. A workspace can be idle between the rollouts of a group."""
_TRIES = 3


@dataclass(slots=True, eq=False)
class _Kept:
    """Workspace that is made or being made."""

    making: "asyncio.Task[Station]"
    users: int = 0
    """Consoles that began with it, and leases that wait for one."""

    @property
    def usable(self) -> bool:
        """False if it must be made again, after an internal failure or a death. A rejected workspace stays rejected."""
        if not self.making.done():
            return True
        if self.making.cancelled():
            return False
        error = self.making.exception()
        return isinstance(error, SetupError) if error is not None else self.making.result().alive

    def end(self) -> None:
        """End its process, and every console that it forked."""
        if not self.making.done():
            self.making.cancel()
        elif not self.making.cancelled() and self.making.exception() is None:
            self.making.result().close()


class Stations:
    """Pool that leases consoles with a workspace. A workspace is made once, when its first console is leased."""

    def __init__(
        self,
        prepare: Callable[[Setup], Awaitable[Station]],
        birth: Callable[[Station], Awaitable[ConsoleSession]],
        *,
        starting: int,
        shared: bool,
    ) -> None:
        """`starting`: consoles that start at the same time; `shared`: a workspace has one process for all consoles."""
        self._prepare = prepare
        self._birth = birth
        self._places = asyncio.Semaphore(starting)
        self._shared = shared
        self._kept: dict[object, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @asynccontextmanager
    async def lease(self, setup: Setup) -> AsyncIterator[ConsoleSession]:
        """Lease a fresh console that begins with the workspace `setup`.

        Raises:
            SetupError: the workspace cannot be made.
            SandboxFault: no console could be started, after several tries.
        """
        # Without sharing, each lease has its own workspace process.
        key = setup.digest if self._shared else object()
        kept = self._find(key, setup)
        kept.users += 1
        try:
            session = await self._born(kept, setup)
            try:
                yield session
            finally:
                session.close()
        finally:
            kept.users -= 1
            self._trim()

    def _find(self, key: object, setup: Setup) -> _Kept:
        kept = self._kept.pop(key, None) or _Kept(self._begun(setup))
        # The dict keeps the order of use, the latest last.
        self._kept[key] = kept
        self._renew(kept, setup)
        return kept

    def _begun(self, setup: Setup) -> "asyncio.Task[Station]":
        making = asyncio.create_task(_made(self._prepare, setup))
        making.add_done_callback(_heard)
        return making

    def _renew(self, kept: _Kept, setup: Setup) -> None:
        if not kept.usable:
            kept.end()
            kept.making = self._begun(setup)

    async def _born(self, kept: _Kept, setup: Setup) -> ConsoleSession:
        for _ in range(_TRIES - 1):
            try:
                return await self._try(kept)
            except SandboxLost:
                raise
            except SandboxFault:
                self._renew(kept, setup)
        return await self._try(kept)

    async def _try(self, kept: _Kept) -> ConsoleSession:
        # Other leases may wait for the same workspace.
        station = await asyncio.shield(kept.making)
        async with self._places:
            return await self._birth(station)

    def _trim(self) -> None:
        idle = [key for key, kept in self._kept.items() if kept.users == 0]
        for key in idle[: max(0, len(idle) - (IDLE if self._shared else 0))]:
            self._kept.pop(key).end()

    async def close(self) -> None:
        """End all workspace processes, and every console that they forked."""
        kept = list(self._kept.values())
        self._kept.clear()
        for each in kept:
            each.end()
        await asyncio.gather(*(each.making for each in kept), return_exceptions=True)


async def _made(prepare: Callable[[Setup], Awaitable[Station]], setup: Setup) -> Station:
    """Call `prepare`, and retry after an internal failure."""
    for _ in range(_TRIES - 1):
        try:
            return await prepare(setup)
        except SandboxLost:
            raise
        except SandboxFault:
            continue
    return await prepare(setup)


def _heard(making: "asyncio.Task[Station]") -> None:
    """Retrieve the exception, because every waiting task may be gone."""
    if not making.cancelled():
        making.exception()
