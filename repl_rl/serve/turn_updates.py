"""Updates of a turn while it runs, which a streamed response sends as events.

They are computed without I/O from the items of the turn's record.
"""

from dataclasses import dataclass

from repl_rl.trajectory.console_text import PS1, PS2
from repl_rl.trajectory.trajectory import Line, LineEnd, LineStatus, Observed
from repl_rl.trajectory.trajectory_builder import RolloutObserver

_FINAL_STATUSES = (LineStatus.ANSWERED, LineStatus.EXITED, LineStatus.KILLED)
"""Statuses after which the console prints no prompt."""


@dataclass(frozen=True, slots=True)
class ExecutedLine:
    """Line of the policy with its result."""

    source: str
    """Code that the console ran, or the written text if no console ran it."""
    output: str
    """Output as the policy saw it, without the next prompt."""
    status: LineStatus | None
    """Status, or None if no console ran the line."""
    elapsed_ms: float | None
    """Duration in milliseconds, or None if no console ran the line."""
    truncated: bool
    """True if the middle of the output was left out."""

    @property
    def to_json(self) -> dict[str, object]:
        """JSON object of the line."""
        status = None if self.status is None else str(self.status)
        ms = None if self.elapsed_ms is None else round(self.elapsed_ms, 3)
        return {"source": self.source, "output": self.output, "status": status, "ms": ms, "cut": self.truncated}


@dataclass(frozen=True, slots=True)
class TurnUpdate:
    """Update of a turn: new text of the transcript, and a complete line."""

    text: str = ""
    executed_line: ExecutedLine | None = None


class TurnStreamer:
    """Converter from a record to updates, which together are the transcript and all of its lines."""

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        """Start a turn.

        The updates leave out the texts in `stop` and all that follows them; see `RolloutObserver.stop_texts`.
        """
        self._observer = RolloutObserver(stop_texts=stop)
        self._line: Line | None = None

    def update(self, item: Line | Observed) -> TurnUpdate:
        """Return the update of the record's next item. Items come as in the callback `RolloutObserver.on_item`."""
        if isinstance(item, Observed):
            return TurnUpdate(item.text, self._finish_line(item))
        # A line comes again once it has run. It is complete with its observation, or with the next item.
        if item.execution is not None:
            self._line = item
            return TurnUpdate()
        executed = self._finish_line(None)
        self._line = item
        return TurnUpdate(self._observer.trim_at_stop(item.text), executed)

    def finish(self) -> TurnUpdate:
        """Return the update at the end of the turn."""
        return TurnUpdate("", self._finish_line(None))

    def _finish_line(self, observation: Observed | None) -> ExecutedLine | None:
        """Return the pending line with the observation that follows it, or None if no line is pending."""
        line, self._line = self._line, None
        if line is None:
            return None
        text = self._observer.trim_at_stop(line.text)
        # An end token alone is not reported as a line.
        if not (text or line.execution):
            return None
        run, output = line.execution, observation.text if observation is not None else ""
        truncated = observation is not None and observation.cut
        if run is None:
            return ExecutedLine(text, output, None, None, truncated)
        # The observation ends with the console's next prompt, which is no output of the line.
        if run.status not in _FINAL_STATUSES and line.end is not LineEnd.EOS:
            output = next((output.removesuffix(prompt) for prompt in (PS1, PS2) if output.endswith(prompt)), output)
        return ExecutedLine(
            "\n".join(run.ran) if run.ran else text, output, run.status, 1000 * run.elapsed_s, truncated
        )
