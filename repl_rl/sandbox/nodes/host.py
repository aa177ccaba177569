"""Process that holds consoles on a machine. It runs an ordinary sandbox, and identifies each console by a number.

Deadlines are enforced here, on the console's machine, so that network latency does not count towards a line.
"""

import asyncio
import itertools
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TypeVar

from repl_rl.errors import SandboxFault
from repl_rl.sandbox import SANDBOXES
from repl_rl.sandbox.base import Births, Calling, PushResult, Sandbox, SandboxSession, console_of
from repl_rl.sandbox.nodes.messages import Carried, Offered, Turn

T = TypeVar("T")


class Relay:
    """`Host` of one console that leaves the answers of host functions to another process."""

    def __init__(self, offered: Offered) -> None:
        self._offered = offered
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._untold: list[tuple[int, bytes]] = []
        self.called = asyncio.Event()
        """Set while there are calls that were not reported yet."""

    @property
    def functions(self) -> Mapping[str, str]:
        """As `Host.functions`."""
        return self._offered.functions

    @property
    def argument_bytes(self) -> int:
        """As `Host.argument_bytes`."""
        return self._offered.argument_bytes

    async def answer(self, call: bytes) -> bytes:
        """As `Host.answer`."""
        number = next(self._numbers)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        self._untold.append((number, call))
        self.called.set()
        try:
            return await reply
        finally:
            del self._waiting[number]

    def told(self) -> tuple[tuple[int, bytes], ...]:
        """Return the calls that were not reported yet, each with its number. Calls of an ended line are left out."""
        calls, self._untold = self._untold, []
        self.called.clear()
        return tuple(call for call in calls if call[0] in self._waiting)

    def reply(self, number: int, content: bytes) -> None:
        """Answer a call."""
        reply = self._waiting.get(number)
        if reply is not None and not reply.done():
            reply.set_result(content)


class _Lease:
    """Lease of a console, and its running line."""

    def __init__(self, sandbox: Sandbox, setup: Carried | None) -> None:
        self.stack = AsyncExitStack()
        entering = self.stack.enter_async_context(console_of(sandbox, setup))
        self.opening: asyncio.Task[SandboxSession] = asyncio.create_task(entering)
        self.opening.add_done_callback(_heard)
        self.line: asyncio.Task[PushResult] | None = None
        self.relay: Relay | None = None

    async def close(self) -> None:
        """End the console, and cancel its running line."""
        running = [task for task in (self.line, self.opening) if task is not None and not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        await self.stack.aclose()


def _heard(task: asyncio.Future[T]) -> None:
    """Retrieve the exception, because the task that waits for it may be gone."""
    if not task.cancelled():
        task.exception()


class ConsoleHost:
    """Holder of the consoles on one machine. All methods run on one event loop."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._sandbox: Sandbox | None = None
        self._leases: dict[int, _Lease] = {}
        self._refused: set[int] = set()
        """Numbers that were closed before their lease began, because calls may overtake each other."""

    async def open(self, kind: str, births: Births) -> tuple[int, int, int]:
        """See `Hosting.open`."""
        self._sandbox = await self._stack.enter_async_context(SANDBOXES.named(kind)().open(births))
        return self._sandbox.python_version

    async def lease(self, number: int, setup: Carried | None) -> None:
        """See `Hosting.lease`."""
        if self._sandbox is None:
            raise SandboxFault("the sandbox on this machine is not open")
        if number in self._refused:
            self._refused.discard(number)
            return
        lease = self._leases[number] = _Lease(self._sandbox, setup)
        # `close` may cancel the task, which is no error here.
        await asyncio.wait({lease.opening})
        if not lease.opening.cancelled() and (error := lease.opening.exception()) is not None:
            self._leases.pop(number, None)
            raise error

    async def push(self, number: int, line: str, offered: Offered | None) -> Turn:
        """See `Hosting.push`."""
        lease = self._known(number)
        session = lease.opening.result()
        if offered is not None and isinstance(session, Calling):
            lease.relay = Relay(offered)
            session.offer(lease.relay)
        lease.line = asyncio.create_task(session.push(line))
        lease.line.add_done_callback(_heard)
        return await self.turn(number)

    async def turn(self, number: int) -> Turn:
        """See `Hosting.turn`."""
        lease = self._known(number)
        if lease.line is None:
            raise SandboxFault(f"console {number} runs no line")
        # Wait for the end of the line or for a call of a host function.
        called = asyncio.create_task(lease.relay.called.wait()) if lease.relay is not None else None
        try:
            await asyncio.wait({lease.line} if called is None else {lease.line, called}, return_when="FIRST_COMPLETED")
        finally:
            if called is not None:
                called.cancel()
        if not lease.line.done():
            return Turn(lease.relay.told() if lease.relay is not None else ())
        if lease.line.cancelled():
            raise SandboxFault("the console was closed")
        return Turn((), lease.line.result(), lease.opening.result().ended)

    async def reply(self, number: int, call: int, content: bytes) -> None:
        """See `Hosting.reply`."""
        lease = self._leases.get(number)
        if lease is not None and lease.relay is not None:
            lease.relay.reply(call, content)

    async def close(self, number: int) -> None:
        """See `Hosting.close`."""
        lease = self._leases.pop(number, None)
        if lease is None:
            self._refused.add(number)
        else:
            await lease.close()

    async def beat(self) -> None:
        """See `Hosting.beat`."""

    async def end(self) -> None:
        """See `Hosting.end`."""
        leases = list(self._leases.values())
        self._leases.clear()
        await asyncio.gather(*(lease.close() for lease in leases))
        await self._stack.aclose()

    def _known(self, number: int) -> _Lease:
        lease = self._leases.get(number)
        if lease is None:
            raise SandboxFault("the console was closed")
        return lease
