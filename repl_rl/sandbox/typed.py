"""What is typed into a console, and what its answer means: the same wherever the console runs."""

import time
from typing import Protocol

from repl_rl.record.clip import clip
from repl_rl.record.console import CellBuffer, Verdict
from repl_rl.record.trajectory import LineStatus
from repl_rl.sandbox.base import Limits, PushResult
from repl_rl.sandbox.wire import Reply

_SIGXCPU = 24


class Ended(Protocol):
    """How a console ended, and what it had printed that nobody had read."""

    @property
    def code(self) -> int | None:
        """Exit code; minus the signal's number; None: nobody can say."""

    @property
    def text(self) -> str: ...
    @property
    def cut(self) -> bool: ...


class Typed:
    """Lines that have been typed and that the console has not been sent yet."""

    def __init__(self, *, decide: bool) -> None:
        """`decide`: host and console run the same Python, so the host may judge whether a cell is complete."""
        self._cell = CellBuffer(decide=decide)
        self._unsent: list[str] = []

    def add(self, line: str) -> PushResult | str:
        """What to send now; or the line's result, where the console need not be asked."""
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
        """Take note of what the console said of a line; True: it was the last one."""
        if not result.more:
            self._cell.reset()
        return result.status in (LineStatus.ANSWERED, LineStatus.EXITED)


def of_reply(reply: Reply, limits: Limits, elapsed_s: float, *, interrupted: bool) -> PushResult:
    """The result of a line to which the console replied; `interrupted`: its time was over."""
    text, cut = _bounded(reply.text, reply.cut, limits)
    return PushResult(text, reply.more, _status(reply, interrupted=interrupted), reply.answer, elapsed_s, cut)


def of_death(death: Ended, limits: Limits, elapsed_s: float, *, interrupted: bool) -> PushResult:
    """The result of a line of which the console died."""
    if interrupted or death.code == -_SIGXCPU:
        status = LineStatus.TIMEOUT
    elif death.code is not None and death.code >= 0:
        status = LineStatus.EXITED
    else:
        status = LineStatus.KILLED
    text, cut = _bounded(death.text, death.cut, limits)
    return PushResult(text, False, status, None, elapsed_s, cut)


def _bounded(text: str, cut: bool, limits: Limits) -> tuple[str, bool]:
    """`text`, and whether it was cut. The console keeps the limit; this is for one that was tampered with."""
    shorter = clip(text, limits.output_bytes)
    return shorter, cut or shorter != text


def _status(reply: Reply, *, interrupted: bool) -> LineStatus:
    """The one status of a line, by the table in docs/specification.md: the first row that applies."""
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
