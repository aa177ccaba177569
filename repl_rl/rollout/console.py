"""Console of one rollout: it runs the policy's text line by line and returns the results."""

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
    """Sandbox session that opens at the first executed line, with the text that does not form a complete line yet."""

    def __init__(self, sandbox: Sandbox, task: Task, host: HostSession | None = None) -> None:
        """Set the sandbox and the task; the session opens later.

        Args:
            sandbox: source of the session.
            task: task whose workspace the session begins with.
            host: handler of the functions that lines may call; None means no functions.
        """
        self._sandbox = sandbox
        self._task = task
        self.host = host or HostSession()
        """Handler of the calls that lines make."""
        self._resources = AsyncExitStack()
        self._session: SandboxSession | None = None
        self._buffer = LineBuffer()
        self.more = False
        """True while the console waits for the rest of a cell."""

    async def aclose(self) -> None:
        """Return the session to the sandbox."""
        await self._resources.aclose()

    async def begin(self) -> None:
        """Open the session now instead of at the first line.

        Raises:
            SandboxFault, SetupError: see `run`.
        """
        await self._open()

    @property
    def ended(self) -> bool:
        """True once the console takes no further line."""
        return self._session is not None and self._session.ended

    def awaits(self, line: Line) -> bool:
        """Return True if an end token closes the line and leaves something to run: code, or an open cell."""
        return line.end is LineEnd.EOS and (self.more or bool((self._buffer.carry + line.text).strip()))

    def closed(self, line: Line) -> tuple[str, ...]:
        """Add a line's text, and return the physical lines that it completes.

        An end token completes a line as a newline does.
        """
        if self.awaits(line) and not line.text.endswith("\n"):
            return self._buffer.feed(f"{line.text}\n")
        return self._buffer.feed(line.text)

    async def run(self, lines: Sequence[str], closing: bool = False) -> list[PushResult]:
        """Run physical lines (at least one) until the console ends, and return one result per line that ran.

        With `closing`, a blank line closes a cell that is still open. Its result is then the last one.

        Raises:
            SandboxFault: no console is available.
            SetupError: the task's workspace cannot be created.
        """
        console = await self._open()
        results = await push_each(console, lines)
        if closing and results[-1].more and not console.ended:
            results += await push_each(console, ("",))
        self.more = results[-1].more
        return results

    async def restore(self, ran: Sequence[str], carry: str, calls: Sequence[HostCall] = ()) -> None:
        """Run physical lines again to restore the console's state; `carry` begins the next line.

        `calls` are the recorded calls of these lines. The record answers them, and no function runs.

        Raises:
            SandboxFault: no console is available, it ended during these lines, or its calls differ from the record.
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
            # Functions have to be offered before the first line runs.
            if self.host.functions:
                offered(self._session, self.host, self._sandbox.name)
        return self._session


def offered(session: SandboxSession, host: Host, sandbox: str) -> None:
    """Offer host functions to a fresh console.

    Raises:
        ConfigError: the console cannot call functions of the host.
    """
    if not isinstance(session, Calling):
        remedy = "its consoles have no way to call the host; use local, docker, gateway, nodes or unsafe"
        raise ConfigError("sandbox, with host functions", sandbox, remedy)
    session.offer(host)
