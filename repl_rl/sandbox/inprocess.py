"""`code.InteractiveConsole` in this process, for tests and for trusted lines. Only output is limited."""

import builtins
import code
import contextlib
import importlib
import io
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

from repl_rl.errors import ConfigError, SetupError
from repl_rl.record.setup import Setup
from repl_rl.record.trajectory import LineStatus
from repl_rl.sandbox.base import Births, Limits, PushResult, Sandbox, SandboxKind, refuse_unfit


class _Console(code.InteractiveConsole):
    """Console that remembers the outcome of the last cell and the first final answer."""

    def __init__(self) -> None:
        super().__init__({"__name__": "__main__", "__doc__": None, "__builtins__": dict(vars(builtins))}, "<stdin>")
        self.outcome = LineStatus.OK
        self.answer: str | None = None
        self.builtins = self.locals["__builtins__"]
        self.builtins["submit_final_answer"] = self._submit

    def show(self, value: object) -> None:
        """Echo a value as `sys.displayhook` does, with a `_` that belongs to this console."""
        if value is not None:
            self.builtins["_"] = None
            sys.stdout.write(repr(value) + "\n")
            self.builtins["_"] = value

    def _submit(self, answer: object, *more: object) -> None:
        text = ", ".join(map(str, (answer, *more)))
        if self.answer is None:
            self.answer = text

    def showsyntaxerror(self, filename: str | None = None, **source: str) -> None:
        """Print a syntax error. Python 3.13 and later pass the cell as `source`, to find a line that the error
        lacks."""
        self.outcome = LineStatus.SYNTAX_ERROR
        error = sys.exc_info()[1]
        if isinstance(error, SyntaxError) and error.lineno is None:
            # Python 3.13.0 fails if the error has no line number, as for a null byte.
            source = {}
        super().showsyntaxerror(filename, **source)

    def showtraceback(self) -> None:
        kind = sys.exc_info()[0]
        out_of_memory = kind is not None and issubclass(kind, MemoryError)
        self.outcome = LineStatus.MEMORY_LIMIT if out_of_memory else LineStatus.EXCEPTION
        super().showtraceback()


class InProcessSession:
    """Console in this process."""

    def __init__(self, limits: Limits) -> None:
        self._console = _Console()
        self._limit = limits.output_bytes
        self._ended = False

    @property
    def ended(self) -> bool:
        """True once no further line can be pushed."""
        return self._ended

    def prepare(self, setup: Setup) -> None:
        """Make a workspace in this console.

        Raises:
            SetupError: it has files, which this sandbox does not support, or a module or a line raises.
        """
        said, name = json.loads(setup.content), f"workspace {setup.digest[:12]}"
        if said["files"]:
            remedy = "this process has no folder for them; use another sandbox"
            raise SetupError(f"{name}, files", sorted(said["files"]), remedy)
        try:
            with _streams(self._console, io.StringIO()):
                for module in said["preload"]:
                    importlib.import_module(module)
                self._console.locals.update(said["values"])
                exec(compile("\n".join(said["lines"]), "<workspace>", "exec", dont_inherit=True), self._console.locals)
        except (Exception, SystemExit) as error:
            raise SetupError(f"{name}, a module or line", repr(error), "correct the workspace") from error

    def go_on(self) -> None:
        """As `Continuing.go_on`."""
        if self._ended and self._console.answer is None:
            raise ConfigError("session.go_on()", "ended", "only an answer can be followed by further lines")
        self._console.answer, self._ended = None, False

    async def push(self, line: str) -> PushResult:
        """As `SandboxSession.push`, but without a deadline, because the line runs on the caller's own thread."""
        refuse_unfit(line, ended=self._ended)
        started = time.perf_counter()
        console, output, more = self._console, io.StringIO(), False
        console.outcome = LineStatus.OK
        with _streams(console, output):
            try:
                more = console.push(line)
            except SystemExit:
                console.outcome = LineStatus.EXITED
        text, cut = _bounded(output.getvalue(), self._limit)
        status = self._status(more, cut)
        self._ended = status in (LineStatus.ANSWERED, LineStatus.EXITED)
        return PushResult(text, bool(more), status, console.answer, time.perf_counter() - started, cut)

    def _status(self, more: bool, cut: bool) -> LineStatus:
        outcome = self._console.outcome
        if self._console.answer is not None:
            return LineStatus.ANSWERED
        if more:
            return LineStatus.INCOMPLETE
        if outcome in (LineStatus.EXITED, LineStatus.MEMORY_LIMIT):
            return outcome
        return LineStatus.OUTPUT_LIMIT if cut else outcome


def _bounded(text: str, limit: int) -> tuple[str, bool]:
    """Return `text` in at most `limit` bytes, cut between characters as in a sandbox, and True if it was truncated."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return text, False
    marker = f"\n[... {len(data) - limit} bytes of output not shown ...]\n"
    half = (limit - len(marker)) // 2
    head, tail = (part.decode("utf-8", "ignore") for part in (data[:half], data[-half:]))
    return head + marker + tail, True


@contextlib.contextmanager
def _streams(console: _Console, output: io.StringIO) -> Iterator[None]:
    """Redirect both streams to `output`, give no input, echo through `console`, and print errors as plain Python
    does."""
    stdin, display, hook = sys.stdin, sys.displayhook, sys.excepthook
    sys.stdin, sys.displayhook, sys.excepthook = io.StringIO(""), console.show, sys.__excepthook__
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            yield
    finally:
        sys.stdin, sys.displayhook, sys.excepthook = stdin, display, hook


class InProcessSandbox:
    """Source of consoles in this process, for thousands of rollouts of trusted lines."""

    name = "inprocess"

    def __init__(self, limits: Limits | None = None) -> None:
        self.python_version = sys.version_info[:3]
        self._limits = limits or Limits()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[InProcessSession]:
        """Yield a fresh console. It shares modules and interpreter settings with the process."""
        yield InProcessSession(self._limits)

    @asynccontextmanager
    async def prepared(self, setup: Setup) -> AsyncIterator[InProcessSession]:
        """Yield a fresh console with a workspace, which is made anew each time."""
        session = InProcessSession(self._limits)
        session.prepare(setup)
        yield session


@dataclass(frozen=True, slots=True)
class InProcess(SandboxKind):
    """Sandbox in this process. It is not in `SANDBOXES`; only commands that run the package's own lines offer it."""

    kind: ClassVar[str] = "inprocess"
    about: ClassVar[str] = "this very process, for lines of our own"
    isolates: ClassVar[bool] = False

    def open(self, births: Births) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxKind.open`."""
        return nullcontext(InProcessSandbox(births.limits))
