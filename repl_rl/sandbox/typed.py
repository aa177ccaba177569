"""Line protocol of every console: buffers lines into cells, and maps replies to results."""

import time
from typing import Protocol

from repl_rl.record.console import CellBuffer, Verdict
from repl_rl.record.trajectory import LineStatus
from repl_rl.sandbox.base import Limits, PushResult
from repl_rl.sandbox.wire import Reply

_SIGXCPU = 24


class Ended(Protocol):
    """End of a console, and the output that was printed but not read."""

    @property
    def code(self) -> int | None:
        """Exit code, or minus the number of the signal. None means unknown."""

    @property
    def text(self) -> str: ...
    @property
    def cut(self) -> bool: ...


class Typed:
    """Lines that were typed but not sent to the console yet."""

    def __init__(self, *, decide: bool) -> None:
        """`decide`: host and console run the same Python, so the host may decide whether a cell is complete."""
        self._cell = CellBuffer(decide=decide)
        self._unsent: list[str] = []

    def add(self, line: str) -> PushResult | str:
        """Return the code to send now, or the line's result if the console is not needed."""
        started = time.perf_counter()
        verdict = self._cell.add(line)
        if verdict is Verdict.VOID:
            return PushResult("", False, LineStatus.OK, None, time.perf_counter() - started)
        self._unsent.append(line)
        if verdict is Verdict.INCOMPLETE:
            return PushResult("", True, LineStatus.INCOMPLETE, None, time.perf_counter() - started)
        code = "\n".join(self._unsent)
        self._unsent.clear()
        return code

    def ends_with(self, result: PushResult) -> bool:
        """Record the result of a line. Return True if it was the last line."""
        if not result.more:
            self._cell.reset()
        return result.status in (LineStatus.ANSWERED, LineStatus.EXITED)


def of_reply(reply: Reply, limits: Limits, elapsed_s: float, *, interrupted: bool) -> PushResult:
    """Return the result of a line from the console's reply. `interrupted`: the time of the line was over."""
    text, cut = _bounded(reply.text, reply.cut, limits)
    return PushResult(text, reply.more, _status(reply, interrupted=interrupted), reply.answer, elapsed_s, cut)


def of_death(death: Ended, limits: Limits, elapsed_s: float, *, interrupted: bool) -> PushResult:
    """Return the result of a line whose console died."""
    if interrupted or death.code == -_SIGXCPU:
        status = LineStatus.TIMEOUT
    elif death.code is not None and death.code >= 0:
        status = LineStatus.EXITED
    else:
        status = LineStatus.KILLED
    text, cut = _bounded(death.text, death.cut, limits)
    return PushResult(text, False, status, None, elapsed_s, cut)


def _bounded(text: str, cut: bool, limits: Limits) -> tuple[str, bool]:
    """Return `text` in at most `output_bytes` of UTF-8, and True if it was truncated.

    The console enforces the limit, unless it was tampered with.
    """
    data = text.encode("utf-8", "replace")
    if len(data) <= limits.output_bytes:
        return text, cut
    marker = f"\n[... {len(data) - limits.output_bytes} bytes of output not shown ...]\n"
    half = (limits.output_bytes - len(marker)) // 2
    head, tail = (part.decode("utf-8", "ignore") for part in (data[:half], data[-half:]))
    return head + marker + tail, True


def _status(reply: Reply, *, interrupted: bool) -> LineStatus:
    """Return the status of a line: the first row that applies, in the table of docs/specification.md."""
    if reply.answer is not None:
        return LineStatus.ANSWERED
    if reply.outcome == "exited":
        return LineStatus.EXITED
    if interrupted:
        return LineStatus.TIMEOUT
    if reply.more:
        return LineStatus.INCOMPLETE
    if reply.outcome == "memory_limit":
        return LineStatus.MEMORY_LIMIT
    return LineStatus.OUTPUT_LIMIT if reply.cut else LineStatus(reply.outcome)
