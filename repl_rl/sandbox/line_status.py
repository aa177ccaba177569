"""Status and result of a line: ok, exception, timeout and the others, from the console's reply or from its end."""

from typing import Protocol

from repl_rl.sandbox.base import Limits, LineResult
from repl_rl.sandbox.jupyter_wire import ConsoleReply
from repl_rl.trajectory.trajectory import LineStatus

_SIGXCPU = 24
"""Signal at the limit of CPU time."""


class ConsoleExit(Protocol):
    """End of a console, and the output that was printed but not read."""

    @property
    def code(self) -> int | None:
        """Exit code, or minus the number of the signal. None means unknown."""

    @property
    def text(self) -> str: ...
    @property
    def truncated(self) -> bool: ...


def make_result_from_reply(reply: ConsoleReply, limits: Limits, elapsed_s: float, *, interrupted: bool) -> LineResult:
    """Return the result of a line from the console's reply. `interrupted`: the time of the line was over."""
    text, truncated = _truncate_text(reply.text, reply.truncated, limits)
    return LineResult(
        text, reply.incomplete, _compute_status(reply, interrupted=interrupted), reply.answer, elapsed_s, truncated
    )


def make_result_from_exit(death: ConsoleExit, limits: Limits, elapsed_s: float, *, interrupted: bool) -> LineResult:
    """Return the result of a line whose console died."""
    # The console is killed if it does not react to the interrupt in time, and at its limit of CPU time.
    if interrupted or death.code == -_SIGXCPU:
        status = LineStatus.TIMEOUT
    elif death.code is not None and death.code >= 0:
        status = LineStatus.EXITED
    else:
        status = LineStatus.KILLED
    text, truncated = _truncate_text(death.text, death.truncated, limits)
    return LineResult(text, False, status, None, elapsed_s, truncated)


def _truncate_text(text: str, truncated: bool, limits: Limits) -> tuple[str, bool]:
    """Return `text` in at most `output_bytes` of UTF-8, and True if it was truncated.

    The console enforces the limit, unless it was tampered with.
    """
    data = text.encode("utf-8", "replace")
    if len(data) <= limits.output_bytes:
        return text, truncated
    marker = f"\n[... {len(data) - limits.output_bytes} bytes of output not shown ...]\n"
    half_bytes = (limits.output_bytes - len(marker)) // 2
    head, tail = (part.decode("utf-8", "ignore") for part in (data[:half_bytes], data[-half_bytes:]))
    return head + marker + tail, True


def _compute_status(reply: ConsoleReply, *, interrupted: bool) -> LineStatus:
    """Return the status of a line: the first row that applies, in the table of docs/specification.md."""
    if reply.answer is not None:
        return LineStatus.ANSWERED
    if reply.claimed_outcome == "exited":
        return LineStatus.EXITED
    if interrupted:
        return LineStatus.TIMEOUT
    if reply.incomplete:
        return LineStatus.INCOMPLETE
    if reply.claimed_outcome == "memory_limit":
        return LineStatus.MEMORY_LIMIT
    return LineStatus.OUTPUT_LIMIT if reply.truncated else LineStatus(reply.claimed_outcome)
