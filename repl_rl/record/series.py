"""Metrics with open names: parts of an outcome, rewards of a line, and classes of errors.

Names come from users and from the output of programs, so they are bounded. A class of errors is one of Python's own or
`other`. A run follows `LIMIT` names per kind. Later names are logged together, as `other`.
"""

import builtins
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from repl_rl.record.line import LineStatus, NamedReward
from repl_rl.record.trajectory import Observed, Sampled, Trajectory

LIMIT = 32
"""Number of names per kind that a run follows one by one."""
OTHER = "other"
_SHOWN = re.compile(r"[^\w.:*+()-]+")
_RAISED = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)")
_TAIL_CHARS = 4_000
"""Length of the end of an output that is searched for the name of an exception, characters."""
_BUILTIN = frozenset(
    name for name, thing in vars(builtins).items() if isinstance(thing, type) and issubclass(thing, BaseException)
)


def mean_parts(rollouts: Sequence[Iterable[NamedReward]]) -> dict[str, float]:
    """Return the mean over rollouts of the rewards under each name. If a rollout has a name twice, the sum counts."""
    totals: dict[str, float] = {}
    for rewards in rollouts:
        for reward in rewards:
            totals[reward.name] = totals.get(reward.name, 0.0) + reward.value
    return {name: total / len(rollouts) for name, total in totals.items()}


def outcome_parts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of each part of the outcome over graded rollouts. It is empty if a single judge gave each
    outcome."""
    return mean_parts([t.outcomes for t in trajectories if t.outcome is not None])


def error_classes(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the share of executed lines that ended in each class of errors. Shares add up to `line_error_rate`."""
    sound = [t for t in trajectories if t.failure is None]
    counts: dict[str, int] = {}
    for name in (name for t in sound for name in _errors(t)):
        counts[name] = counts.get(name, 0) + 1
    ran = sum(1 for t in sound for _ in t.executions)
    return {name: count / ran for name, count in counts.items()}


def _errors(trajectory: Trajectory) -> Iterable[str]:
    """Yield the class of each line in error: the printed exception, if it is Python's own, or else the status."""
    for segment, after in zip(trajectory.segments, (*trajectory.segments[1:], None), strict=True):
        if not isinstance(segment, Sampled):
            continue
        for line in segment.lines:
            if line.execution is not None and line.execution.status.is_error:
                # Only the last line before an observation can have printed it.
                text = after.text if isinstance(after, Observed) and line is segment.lines[-1] else ""
                yield error_class(line.execution.status, text)


def error_class(status: LineStatus, observed: str) -> str:
    """Return the exception that a line in error ended with, if it is Python's own, or else its status or `other`."""
    if status not in (LineStatus.EXCEPTION, LineStatus.SYNTAX_ERROR):
        return status.value
    # The last row that is not a prompt names the exception.
    rows = [row for row in observed[-_TAIL_CHARS:].split("\n") if row.strip() and row.strip() not in (">>>", "...")]
    raised = _RAISED.match(rows[-1]) if rows else None
    if raised is not None and raised[1] in _BUILTIN:
        return raised[1]
    return OTHER if status is LineStatus.EXCEPTION else "SyntaxError"


class Series:
    """Names that a run follows: the first `LIMIT` of each kind, and `other`."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._followed: dict[str, dict[str, str]] = {}
        self._told: dict[str, None] = {}

    def figures(self, kind: str, values: Mapping[str, float]) -> dict[str, float]:
        """Return the values under the names `kind/NAME`. A known name without a value now gets 0.

        Values of one kind must be additive, because names beyond the limit share `other`.
        """
        followed = self._followed.setdefault(kind, {})
        # A name that was logged once gets a value at every step.
        figures = {key: 0.0 for key in self._told if key.startswith(f"{kind}/")}
        for name, value in values.items():
            # A new name beyond the limit is logged as `other`.
            if name not in followed and len(followed) < self.limit:
                followed[name] = _SHOWN.sub("_", name)[:60] or OTHER
            key = f"{kind}/{followed.get(name, OTHER)}"
            figures[key] = figures.get(key, 0.0) + value
        self._told |= dict.fromkeys(figures)
        return figures

    def memory(self) -> str:
        """Return the names that the run follows, as JSON."""
        return json.dumps({"followed": self._followed, "told": list(self._told)})

    def remember(self, memory: str) -> None:
        """Restore a state that `memory` returned."""
        kept = json.loads(memory)
        self._followed, self._told = kept["followed"], dict.fromkeys(kept["told"])
