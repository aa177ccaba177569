"""One rollout's console: what of the policy's text is typed into it, line by line, and what comes back."""

from collections.abc import Sequence
from contextlib import AsyncExitStack

from repl_rl.errors import ConfigError, SandboxFault, SetupError
from repl_rl.record.console import LineBuffer
from repl_rl.record.trajectory import HostCall, Line, LineEnd
from repl_rl.rollout.host_session import HostSession
from repl_rl.sandbox.base import Calling, Host, PushResult, Sandbox, SandboxSession, console_of
from repl_rl.sandbox.lines import push_each
from repl_rl.tasks import Task


class Console:
    """A session of the sandbox, opened at the first line that runs, and the text that is still to be typed into it."""

    def __init__(self, sandbox: Sandbox, task: Task, host: HostSession | None = None) -> None:
        """`task`: whose workspace the session begins with. `host`: the functions that lines may call; None: none."""
        self._sandbox = sandbox
        self._task = task
        self.host = host or HostSession()
        """What answers the calls of its lines."""
        self._resources = AsyncExitStack()
        self._session: SandboxSession | None = None
        self._buffer = LineBuffer()
        self.more = False
        """It waits for the rest of a cell."""

    async def aclose(self) -> None:
        """Give the session back."""
        await self._resources.aclose()

    async def begin(self) -> None:
        """Have the session now, and not with the first line.

        Raises:
            SandboxFault, SetupError: as `run`.
        """
        await self._open()

    @property
    def ended(self) -> bool:
        """True once it takes no further line."""
        return self._session is not None and self._session.ended

    def awaits(self, line: Line) -> bool:
        """True for a line that an end token closes, where it leaves something to run: code, or a cell that is open."""
        return line.end is LineEnd.EOS and (self.more or bool((self._buffer.carry + line.text).strip()))

    def closed(self, line: Line) -> tuple[str, ...]:
        """Take a line's text; the physical lines that it closes. An end token closes one as a newline does."""
        if self.awaits(line) and not line.text.endswith("\n"):
            return self._buffer.feed(f"{line.text}\n")
        return self._buffer.feed(line.text)

    async def run(self, lines: Sequence[str], closing: bool = False) -> list[PushResult]:
        """Run physical lines (at least one) until the console ends; a result for each that it was given.

        `closing`: a cell that is open after them is closed by a blank line, which then is the last that it was given.

        Raises:
            SandboxFault: no console could be had.
            SetupError: the task's workspace cannot be made.
        """
        console = await self._open()
        results = await push_each(console, lines)
        if closing and results[-1].more and not console.ended:
            results += await push_each(console, ("",))
        self.more = results[-1].more
        return results

    async def restore(self, ran: Sequence[str], carry: str, calls: Sequence[HostCall] = ()) -> None:
        """Give it physical lines to have its state back; `carry` begins the next line.

        `calls`: what they called when they were recorded. They are answered from there; no function is called.

        Raises:
            SandboxFault: there is no console, or it ended meanwhile, or called otherwise than recorded.
        """
        self._buffer = LineBuffer(carry)
        self.host.recall(calls)
        if ran:
            await self.run(ran)
        difference = self.host.resume()
        if difference:
            raise SandboxFault(f"the console called the host otherwise than recorded: {difference}")
        if self.ended:
            raise SandboxFault("the console ended while its state was rebuilt")

    async def _open(self) -> SandboxSession:
        if self._session is None:
            leased = console_of(self._sandbox, self._task.workspace)
            try:
                self._session = await self._resources.enter_async_context(leased)
            except SetupError as error:
                raise SetupError(f"task {self._task.id}: {error.thing}", error.value, error.remedy) from error
            if self.host.functions:
                offered(self._session, self.host, self._sandbox.name)
        return self._session


def offered(session: SandboxSession, host: Host, sandbox: str) -> None:
    """Offer functions of the host to a fresh console.

    Raises:
        ConfigError: it has no way to call them.
    """
    if not isinstance(session, Calling):
        remedy = "its consoles have no way to call the host; use local, docker, gateway, nodes or unsafe"
        raise ConfigError("sandbox, with host functions", sandbox, remedy)
    session.offer(host)
