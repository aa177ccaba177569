"""News of a turn while it runs, computed from the items of its record without I/O."""

from dataclasses import dataclass

from repl_rl.record.console import PS1, PS2
from repl_rl.record.record import Followed
from repl_rl.record.trajectory import Line, LineEnd, LineStatus, Observed

_LAST = (LineStatus.ANSWERED, LineStatus.EXITED, LineStatus.KILLED)
"""Statuses after which the console prints no prompt."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Line of the policy with its result."""

    source: str
    """Code that the console ran, or the written text if no console ran it."""
    output: str
    """Output as the policy saw it, without the next prompt."""
    status: LineStatus | None
    """Status, or None if no console ran the line."""
    ms: float | None
    """Duration in milliseconds, or None if no console ran the line."""
    cut: bool
    """True if the middle of the output was left out."""

    @property
    def said(self) -> dict[str, object]:
        """JSON object of the line."""
        status = None if self.status is None else str(self.status)
        ms = None if self.ms is None else round(self.ms, 3)
        return {"source": self.source, "output": self.output, "status": status, "ms": ms, "cut": self.cut}


@dataclass(frozen=True, slots=True)
class Told:
    """News of a turn: text of the transcript, and a complete line."""

    text: str = ""
    ran: Ran | None = None


class Teller:
    """Converter from a record to news, which together are the transcript and all of its lines."""

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        """Start a turn. The news leave out the texts in `stop` and all that follows them; see `Followed.stop`."""
        self._followed = Followed(stop=stop)
        self._line: Line | None = None

    def hear(self, item: Line | Observed) -> Told:
        """Return the news of the record's next item. Items come as in the callback `Followed.heard`."""
        if isinstance(item, Observed):
            return Told(item.text, self._complete(item))
        # A line comes again once it has run. It is complete with its observation, or with the next item.
        if item.execution is not None:
            self._line = item
            return Told()
        before = self._complete(None)
        self._line = item
        return Told(self._followed.wanted(item.text), before)

    def end(self) -> Told:
        """Return the news at the end of the turn."""
        return Told("", self._complete(None))

    def _complete(self, observed: Observed | None) -> Ran | None:
        line, self._line = self._line, None
        if line is None:
            return None
        text = self._followed.wanted(line.text)
        # An end token alone is not reported as a line.
        if not (text or line.execution):
            return None
        run, output = line.execution, observed.text if observed is not None else ""
        cut = observed is not None and observed.cut
        if run is None:
            return Ran(text, output, None, None, cut)
        # The observation ends with the console's next prompt, which is no output of the line.
        if run.status not in _LAST and line.end is not LineEnd.EOS:
            output = next((output.removesuffix(asked) for asked in (PS1, PS2) if output.endswith(asked)), output)
        return Ran("\n".join(run.ran) if run.ran else text, output, run.status, 1000 * run.elapsed_s, cut)
