"""One process a workspace, from which its consoles are forked; those that nobody uses are ended, the oldest first."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from repl_rl.errors import SandboxFault, SandboxLost, SetupError
from repl_rl.record.setup import Setup
from repl_rl.sandbox.client import ConsoleSession
from repl_rl.sandbox.door import Station

IDLE = 8
"""Workspaces that are kept although no console uses them: a group's rollouts do not all begin at once."""
_TRIES = 3


@dataclass(slots=True, eq=False)
class _Kept:
    """A workspace that is being made, or was."""

    making: "asyncio.Task[Station]"
    users: int = 0
    """Consoles that began with it, and who waits for one."""

    @property
    def usable(self) -> bool:
        """A workspace that was refused stays refused; what failed on our side, or died, is tried again."""
        if not self.making.done():
            return True
        if self.making.cancelled():
            return False
        error = self.making.exception()
        return isinstance(error, SetupError) if error is not None else self.making.result().alive

    def end(self) -> None:
        """End it, and every console that it made."""
        if not self.making.done():
            self.making.cancel()
        elif not self.making.cancelled() and self.making.exception() is None:
            self.making.result().close()


class Stations:
    """Leases consoles that begin with a workspace. Each workspace is made once, when its first console is wanted."""

    def __init__(
        self,
        prepare: Callable[[Setup], Awaitable[Station]],
        birth: Callable[[Station], Awaitable[ConsoleSession]],
        *,
        starting: int,
        shared: bool,
    ) -> None:
        """`starting`: consoles born at a time; `shared`: one process serves all consoles of a workspace."""
        self._prepare = prepare
        self._birth = birth
        self._places = asyncio.Semaphore(starting)
        self._shared = shared
        self._kept: dict[object, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @asynccontextmanager
    async def lease(self, setup: Setup) -> AsyncIterator[ConsoleSession]:
        """A console that nobody has used, in which the workspace is.

        Raises:
            SetupError: the workspace cannot be made.
            SandboxFault: no console could be started, after several tries.
        """
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
        self._kept[key] = kept  # last: the youngest
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
        station = await asyncio.shield(kept.making)
        async with self._places:
            return await self._birth(station)

    def _trim(self) -> None:
        idle = [key for key, kept in self._kept.items() if kept.users == 0]
        for key in idle[: max(0, len(idle) - (IDLE if self._shared else 0))]:
            self._kept.pop(key).end()

    async def close(self) -> None:
        """End all of them, and every console that they made."""
        kept = list(self._kept.values())
        self._kept.clear()
        for each in kept:
            each.end()
        await asyncio.gather(*(each.making for each in kept), return_exceptions=True)


async def _made(prepare: Callable[[Setup], Awaitable[Station]], setup: Setup) -> Station:
    """As `prepare`, tried several times where it fails on our side."""
    for _ in range(_TRIES - 1):
        try:
            return await prepare(setup)
        except SandboxLost:
            raise
        except SandboxFault:
            continue
    return await prepare(setup)


def _heard(making: "asyncio.Task[Station]") -> None:
    """Everybody who waited for it may be gone."""
    if not making.cancelled():
        making.exception()
