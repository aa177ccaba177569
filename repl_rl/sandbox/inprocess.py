"""`code.InteractiveConsole` in this process, for tests and trusted lines. It isolates nothing and limits nothing."""

import builtins
import code
import contextlib
import io
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from repl_rl.record.trajectory import LineStatus
from repl_rl.sandbox.base import Limits, PushResult, refuse_unfit


class _Console(code.InteractiveConsole):
    """Remembers how the last cell went and the first final answer."""

    def __init__(self) -> None:
        super().__init__({"__name__": "__main__", "__doc__": None, "__builtins__": dict(vars(builtins))}, "<stdin>")
        self.outcome = LineStatus.OK
        self.answer: str | None = None
        self.builtins = self.locals["__builtins__"]
        self.builtins["submit_final_answer"] = self._submit

    def show(self, value: object) -> None:
        """`sys.displayhook`, with a `_` of this console's own."""
        if value is not None:
            self.builtins["_"] = None
            sys.stdout.write(repr(value) + "\n")
            self.builtins["_"] = value

    def _submit(self, answer: object) -> None:
        text = str(answer)
        if self.answer is None:
            self.answer = text

    def showsyntaxerror(self, filename: str | None = None) -> None:
        self.outcome = LineStatus.SYNTAX_ERROR
        super().showsyntaxerror(filename)

    def showtraceback(self) -> None:
        kind = sys.exc_info()[0]
        out_of_memory = kind is not None and issubclass(kind, MemoryError)
        self.outcome = LineStatus.MEMORY_LIMIT if out_of_memory else LineStatus.EXCEPTION
        super().showtraceback()


class InProcessSession:
    """One console in this process."""

    def __init__(self, limits: Limits) -> None:
        self._console = _Console()
        self._limit = limits.output_bytes
        self._ended = False

    @property
    def ended(self) -> bool:
        """True once no further line can be pushed."""
        return self._ended

    async def push(self, line: str) -> PushResult:
        """As `SandboxSession.push`, except that no deadline is kept: the line runs on the caller's own thread."""
        refuse_unfit(line, ended=self._ended)
        started = time.perf_counter()
        console, output, more = self._console, io.StringIO(), False
        console.outcome = LineStatus.OK
        with _streams(console, output):
            try:
                more = console.push(line)
            except SystemExit:
                console.outcome = LineStatus.EXITED
        text = output.getvalue()
        status = self._status(more, len(text.encode("utf-8", "replace")))
        self._ended = status in (LineStatus.ANSWERED, LineStatus.EXITED)
        return PushResult(self._bounded(text), bool(more), status, console.answer, time.perf_counter() - started)

    def _status(self, more: bool, size: int) -> LineStatus:
        outcome = self._console.outcome
        if self._console.answer is not None:
            return LineStatus.ANSWERED
        if more:
            return LineStatus.INCOMPLETE
        if outcome in (LineStatus.EXITED, LineStatus.MEMORY_LIMIT):
            return outcome
        return LineStatus.OUTPUT_LIMIT if size > self._limit else outcome

    def _bounded(self, text: str) -> str:
        if len(text.encode("utf-8", "replace")) <= self._limit:
            return text
        shown = self._limit // 2 - 32
        return f"{text[:shown]}\n[... {len(text) - 2 * shown} bytes of output not shown ...]\n{text[-shown:]}"


@contextlib.contextmanager
def _streams(console: _Console, output: io.StringIO) -> Iterator[None]:
    """Both streams into `output`, no input, echo by `console`."""
    stdin, display = sys.stdin, sys.displayhook
    sys.stdin, sys.displayhook = io.StringIO(""), console.show
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            yield
    finally:
        sys.stdin, sys.displayhook = stdin, display


class InProcessSandbox:
    """A source of consoles in this process, for thousands of rollouts of lines that are trusted."""

    name = "inprocess"

    def __init__(self, limits: Limits | None = None) -> None:
        self.python_version = sys.version_info[:3]
        self._limits = limits or Limits()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[InProcessSession]:
        """A fresh console. Modules and interpreter settings are shared with the process."""
        yield InProcessSession(self._limits)
