"""Console pool: consoles are started ahead of time, leased once to one rollout, and killed at the end of the lease."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

from repl_rl.errors import SandboxFault, SandboxLost

_TRIES = 3


class Leased(Protocol):
    """Console, as its pool sees it."""

    @property
    def dead(self) -> bool:
        """True if the console died while it waited for its lease."""

    def close(self) -> None:
        """Kill the console and release its resources."""


_Console = TypeVar("_Console", bound=Leased)


class Pool(Generic[_Console]):
    """Console pool that keeps `warm` consoles alive, leased ones included, and starts at most `starting` at a time.

    A leased console is replaced when its lease ends, not when it begins. So the cores belong to the running rollouts,
    and consoles for the next ones start while the policy is updated. A lease beyond `warm` starts its own console.
    """

    def __init__(self, open_console: Callable[[], Awaitable[_Console]], *, warm: int, starting: int) -> None:
        self._open_console = open_console
        self._warm = warm
        self._starting_at_most = starting
        self._ready: deque[_Console] = deque()
        self._waiting: deque[asyncio.Future[_Console]] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        self._leased: set[_Console] = set()
        self._closed = False

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[_Console]:
        """Lease a fresh console.

        Raises:
            SandboxFault: no console could be started, after several tries.
            SandboxLost: the process that starts consoles is gone.
        """
        session = await self._take()
        try:
            yield session
        finally:
            self._leased.discard(session)
            session.close()
            self.fill()

    async def _take(self) -> _Console:
        if self._closed:
            raise SandboxFault("the sandbox is closed")
        while self._ready:
            # Skip consoles that died while they waited.
            session = self._ready.popleft()
            if session.dead:
                session.close()
                continue
            self._leased.add(session)
            return session
        waiting: asyncio.Future[_Console] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self.fill()
        try:
            return await waiting
        except asyncio.CancelledError:
            # The console was assigned just before the cancellation; end its lease.
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._leased.discard(waiting.result())
                waiting.result().close()
                self.fill()
            raise

    def fill(self) -> None:
        """Start missing consoles in the background."""
        if self._closed:
            return
        # Start consoles for the reserve and for waiting leases, less those that start already.
        reserve = max(0, self._warm - len(self._leased) - len(self._ready))
        wanted = reserve + len(self._waiting) - len(self._starting)
        for _ in range(min(wanted, self._starting_at_most - len(self._starting))):
            task = asyncio.create_task(self._start())
            self._starting.add(task)
            task.add_done_callback(self._started)

    def _started(self, task: "asyncio.Task[None]") -> None:
        self._starting.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self.fill()
        else:
            self._refuse(error)

    async def _start(self) -> None:
        for attempt in range(_TRIES):
            try:
                session = await self._open_console()
            except SandboxLost:
                # The source has already retried for as long as it may.
                raise
            except SandboxFault:
                if attempt == _TRIES - 1:
                    raise
                continue
            self._hand_out(session)
            return

    def offer(self, session: _Console) -> None:
        """Add a fresh console that was opened elsewhere."""
        self._hand_out(session)

    def _hand_out(self, session: _Console) -> None:
        while self._waiting:
            # A waiting lease comes before the reserve.
            waiting = self._waiting.popleft()
            if not waiting.done():
                self._leased.add(session)
                waiting.set_result(session)
                return
        if self._closed:
            session.close()
        else:
            self._ready.append(session)

    def _refuse(self, error: BaseException) -> None:
        """Fail all waiting leases. The next lease tries again."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                fault = (SandboxLost if isinstance(error, SandboxLost) else SandboxFault)(str(error))
                fault.__cause__ = error
                waiting.set_exception(fault)

    async def close(self) -> None:
        """Kill all consoles, leased ones too."""
        self._closed = True
        self._refuse(SandboxFault("the sandbox is closed"))
        starting = list(self._starting)
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        for session in (*self._ready, *self._leased):
            session.close()
        self._ready.clear()
