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
from repl_rl.sandbox.base import Limits, LineResult, Sandbox, SandboxConfig, SandboxOptions, validate_line
from repl_rl.trajectory.trajectory import LineStatus, WorkspaceContent


class _InProcessConsole(code.InteractiveConsole):
    """Console that remembers the outcome of the last cell and the first final answer."""

    def __init__(self) -> None:
        super().__init__({"__name__": "__main__", "__doc__": None, "__builtins__": dict(vars(builtins))}, "<stdin>")
        self.last_status = LineStatus.OK
        self.final_answer: str | None = None
        self.builtins = self.locals["__builtins__"]
        self.builtins["submit_final_answer"] = self._submit_final_answer

    def display_value(self, value: object) -> None:
        """Echo a value as `sys.displayhook` does, with a `_` that belongs to this console."""
        if value is not None:
            self.builtins["_"] = None
            sys.stdout.write(repr(value) + "\n")
            self.builtins["_"] = value

    def _submit_final_answer(self, answer: object, *more: object) -> None:
        text = ", ".join(map(str, (answer, *more)))
        if self.final_answer is None:
            self.final_answer = text

    def showsyntaxerror(self, filename: str | None = None, **source: str) -> None:
        """Print a syntax error. Python 3.13 and later pass the cell as `source`, to find a line that the error
        lacks."""
        self.last_status = LineStatus.SYNTAX_ERROR
        error = sys.exc_info()[1]
        if isinstance(error, SyntaxError) and error.lineno is None:
            # Python 3.13.0 fails if the error has no line number, as for a null byte.
            source = {}
        super().showsyntaxerror(filename, **source)

    def showtraceback(self) -> None:
        error_type = sys.exc_info()[0]
        out_of_memory = error_type is not None and issubclass(error_type, MemoryError)
        self.last_status = LineStatus.MEMORY_LIMIT if out_of_memory else LineStatus.EXCEPTION
        super().showtraceback()


class InProcessSession:
    """Console in this process."""

    def __init__(self, limits: Limits) -> None:
        self._console = _InProcessConsole()
        self._limit = limits.output_bytes
        self._ended = False

    @property
    def ended(self) -> bool:
        """True once no further line can be pushed."""
        return self._ended

    def prepare_workspace(self, setup: WorkspaceContent) -> None:
        """Make a workspace in this console.

        Raises:
            SetupError: it has files, which this sandbox does not support, or a module or a line raises.
        """
        content, name = json.loads(setup.content), f"workspace {setup.digest[:12]}"
        if content["files"]:
            remedy = "this process has no folder for them; use another sandbox"
            raise SetupError(f"{name}, files", sorted(content["files"]), remedy)
        try:
            with _redirect_streams(self._console, io.StringIO()):
                for module in content["preload"]:
                    importlib.import_module(module)
                self._console.locals.update(content["values"])
                exec(
                    compile("\n".join(content["lines"]), "<workspace>", "exec", dont_inherit=True), self._console.locals
                )
        except (Exception, SystemExit) as error:
            raise SetupError(f"{name}, a module or line", repr(error), "correct the workspace") from error

    def continue_after_answer(self) -> None:
        """As `SupportsContinue.continue_after_answer`."""
        if self._ended and self._console.final_answer is None:
            raise ConfigError(
                "session.continue_after_answer()", "ended", "only an answer can be followed by further lines"
            )
        self._console.final_answer, self._ended = None, False

    async def push(self, line: str) -> LineResult:
        """As `SandboxSession.push`, but without a deadline, because the line runs on the caller's own thread."""
        validate_line(line, ended=self._ended)
        start = time.perf_counter()
        console, output, incomplete = self._console, io.StringIO(), False
        console.last_status = LineStatus.OK
        with _redirect_streams(console, output):
            try:
                incomplete = console.push(line)
            except SystemExit:
                console.last_status = LineStatus.EXITED
        text, truncated = _truncate_output(output.getvalue(), self._limit)
        status = self._compute_status(incomplete, truncated)
        self._ended = status in (LineStatus.ANSWERED, LineStatus.EXITED)
        return LineResult(text, bool(incomplete), status, console.final_answer, time.perf_counter() - start, truncated)

    def _compute_status(self, incomplete: bool, truncated: bool) -> LineStatus:
        outcome = self._console.last_status
        if self._console.final_answer is not None:
            return LineStatus.ANSWERED
        if incomplete:
            return LineStatus.INCOMPLETE
        if outcome in (LineStatus.EXITED, LineStatus.MEMORY_LIMIT):
            return outcome
        return LineStatus.OUTPUT_LIMIT if truncated else outcome


def _truncate_output(text: str, limit: int) -> tuple[str, bool]:
    """Return `text` in at most `limit` bytes, cut between characters as in a sandbox, and True if it was truncated."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return text, False
    marker = f"\n[... {len(data) - limit} bytes of output not shown ...]\n"
    half_bytes = (limit - len(marker)) // 2
    head, tail = (part.decode("utf-8", "ignore") for part in (data[:half_bytes], data[-half_bytes:]))
    return head + marker + tail, True


@contextlib.contextmanager
def _redirect_streams(console: _InProcessConsole, output: io.StringIO) -> Iterator[None]:
    """Redirect both streams to `output`, give no input, echo through `console`, and print errors as plain Python
    does."""
    stdin, display, hook = sys.stdin, sys.displayhook, sys.excepthook
    sys.stdin, sys.displayhook, sys.excepthook = io.StringIO(""), console.display_value, sys.__excepthook__
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
    async def open_workspace_session(self, setup: WorkspaceContent) -> AsyncIterator[InProcessSession]:
        """Yield a fresh console with a workspace, which is made anew each time."""
        session = InProcessSession(self._limits)
        session.prepare_workspace(setup)
        yield session


@dataclass(frozen=True, slots=True)
class InProcess(SandboxConfig):
    """Sandbox in this process. It is not in `SANDBOXES`; only commands that run the package's own lines offer it."""

    kind: ClassVar[str] = "inprocess"
    about: ClassVar[str] = "this very process, for lines of our own"
    isolates: ClassVar[bool] = False

    def open(self, options: SandboxOptions) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxConfig.open`."""
        return nullcontext(InProcessSandbox(options.limits))
