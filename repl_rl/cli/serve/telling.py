"""What is told of a turn while it goes: pure, from the record's own items."""

from dataclasses import dataclass

from repl_rl.record.console import PS1, PS2
from repl_rl.record.record import Followed
from repl_rl.record.trajectory import Line, LineEnd, LineStatus, Observed

_LAST = (LineStatus.ANSWERED, LineStatus.EXITED, LineStatus.KILLED)
"""Nothing is asked after a line of these."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A line of the policy, and what became of it."""

    source: str
    """What was typed into the console, or where nothing was, what was written."""
    output: str
    """What it printed, as the policy was shown it."""
    status: LineStatus | None
    """None: no console ran it."""
    ms: float | None
    """None: no console ran it."""
    cut: bool
    """The middle of its output was left out."""

    @property
    def said(self) -> dict[str, object]:
        """As JSON."""
        status = None if self.status is None else str(self.status)
        ms = None if self.ms is None else round(self.ms, 3)
        return {"source": self.source, "output": self.output, "status": status, "ms": ms, "cut": self.cut}


@dataclass(frozen=True, slots=True)
class Told:
    """What is new: text of the transcript, and a line that is complete."""

    text: str = ""
    ran: Ran | None = None


class Teller:
    """Follows a record. What it tells, put together, is the transcript and all of its lines."""

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        """`stop`: texts of which, and after which, nothing is told; see `Followed.stop`."""
        self._followed = Followed(stop=stop)
        self._line: Line | None = None

    def hear(self, item: Line | Observed) -> Told:
        """The record's next item, as `Followed.heard` is told it."""
        if isinstance(item, Observed):
            return Told(item.text, self._complete(item))
        if item.execution is not None:
            self._line = item
            return Told()
        before = self._complete(None)
        self._line = item
        return Told(self._followed.wanted(item.text), before)

    def end(self) -> Told:
        """The turn is over."""
        return Told("", self._complete(None))

    def _complete(self, observed: Observed | None) -> Ran | None:
        line, self._line = self._line, None
        if line is None:
            return None
        text = self._followed.wanted(line.text)
        if not (text or line.execution):  # an end token alone is no line to anybody
            return None
        run, output = line.execution, observed.text if observed is not None else ""
        cut = observed is not None and observed.cut
        if run is None:
            return Ran(text, output, None, None, cut)
        if run.status not in _LAST and line.end is not LineEnd.EOS:
            output = next((output.removesuffix(asked) for asked in (PS1, PS2) if output.endswith(asked)), output)
        return Ran("\n".join(run.ran) if run.ran else text, output, run.status, 1000 * run.elapsed_s, cut)
