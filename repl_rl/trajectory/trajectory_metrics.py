"""Metrics of a batch of trajectories: rates and means, and metrics with open names.

Open names are parts of an outcome, rewards of a line, and classes of errors. They come from users and from the output
of programs, so they are bounded. A class of errors is one of Python's own or `other`. A run follows `LIMIT` names per
kind. Later names are logged together, as `other`.
"""

import ast
import builtins
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import TypeVar

from repl_rl.trajectory.console_text import is_noop
from repl_rl.trajectory.trajectory import (
    Line,
    LineStatus,
    Observed,
    Sampled,
    Stop,
    Trajectory,
    compute_mean_parts,
)

T = TypeVar("T")
LIMIT = 32
"""Number of names per kind that a run follows one by one."""
OTHER = "other"
"""Name of all later names of a kind, and of errors that are not Python's own."""

_PRINT = re.compile(r"\bprint\s*\(")
_TRY = re.compile(r"^\s*(try|except)\b")
_INTROSPECTION = re.compile(
    r"\b(?:import|from)\s+(?:[\w.]+\s*,\s*)*(?:gc|inspect|builtins|ctypes)\b|\b(?:gc|inspect|builtins|ctypes)\.\w"
    r"|\bsys\s*\.\s*modules\b|\b_getframe\b|\b_current_frames\b|\bsettrace\b|\bsetprofile\b|\b__builtins__\b"
    r"|\b[a-z]{1,2}_(?:frame|back|globals|locals|builtins)\b|\b__subclasses__\b|\b__globals__\b|\b__import__\b"
)
"""Names by which a program reaches the code that runs it: frames, gc, builtins, `sys.modules`, inspect."""

_UNLOGGED_CHARS = re.compile(r"[^\w.:*+()-]+")
"""Characters that a logged name cannot contain."""
_EXCEPTION_ROW = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)")
"""Last row of a traceback: the exception, and its message if it has one."""
_TAIL_CHARS = 4_000
"""Length of the end of an output that is searched for the name of an exception, characters."""
_BUILTIN_EXCEPTIONS = frozenset(
    name for name, thing in vars(builtins).items() if isinstance(thing, type) and issubclass(thing, BaseException)
)
"""Exceptions of Python itself."""


def compute_trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return rates and means over trajectories.

    Our own failures count in `sandbox_fault_rate` only, those of a sampler in `user_error_rate` only.

    Rates are shares in [0, 1]. `void_line_rate`, `print_rate`, `print_spam_rate`, `try_rate` and `repeat_rate` indicate
    reward farming. They are shares of lines that compute nothing, print, print nothing new, hide errors, or repeat the
    line before. A print is not new if it prints only literals, or if the rollout has already printed with the same
    line.

    `introspection_rate` is the share of rollouts whose lines or answer name frames, gc, builtins, `sys.modules` or
    inspect, as a program that attacks its tests does.
    """
    # Only the two failure rates count dropped rollouts.
    valid = [t for t in trajectories if t.failure is None]
    graded = [t.outcome for t in valid if t.outcome is not None]
    lines = [line for t in valid for line in t.lines]
    executions = [line.execution for line in lines if line.execution is not None]
    return {
        "solve_rate": _compute_share([t for t in valid if t.outcome is not None], lambda t: t.solved),
        "reward_mean": fmean(graded) if graded else 0.0,
        "answered_rate": _compute_share(valid, lambda t: t.answer is not None),
        "line_error_rate": _compute_share(executions, lambda execution: execution.status.is_error),
        "timeout_rate": _compute_share(executions, lambda execution: execution.status is LineStatus.TIMEOUT),
        "too_long_rate": _compute_share(valid, lambda t: t.stop in (Stop.LINE_TOO_LONG, Stop.MAX_TOKENS)),
        "lines_per_rollout": len(lines) / max(len(valid), 1),
        "line_tokens_mean": fmean(len(line.token_ids) for line in lines) if lines else 0.0,
        "sampled_tokens": float(sum(t.sampled_tokens for t in valid)),
        "observed_tokens": float(sum(t.observed_tokens for t in valid)),
        "sandbox_fault_rate": _compute_share(
            trajectories, lambda t: t.failure is not None and not t.failure.kind.is_user_failure
        ),
        "user_error_rate": _compute_share(
            trajectories, lambda t: t.failure is not None and t.failure.kind.is_user_failure
        ),
        "void_line_rate": _compute_share(lines, lambda line: is_noop(line.text)),
        "print_rate": _compute_share(lines, lambda line: _PRINT.search(line.text) is not None),
        "print_spam_rate": sum(map(_count_redundant_prints, valid)) / max(len(lines), 1),
        "try_rate": _compute_share(lines, lambda line: _TRY.match(line.text) is not None),
        "repeat_rate": _compute_share(
            [pair for t in valid for pair in _pair_neighbouring_lines(t)], lambda pair: pair[0].text == pair[1].text
        ),
        "introspection_rate": _compute_share(valid, _uses_introspection),
    }


def _compute_share(items: Sequence[T], test: Callable[[T], bool]) -> float:
    return sum(map(test, items)) / len(items) if items else 0.0


def _uses_introspection(trajectory: Trajectory) -> bool:
    texts = (*(line.text for line in trajectory.lines), trajectory.answer or "")
    return any(_INTROSPECTION.search(text) for text in texts)


def _count_redundant_prints(trajectory: Trajectory) -> int:
    """Return the number of lines that print without showing anything new."""
    printed = [line.text.strip() for line in trajectory.lines if _PRINT.search(line.text)]
    # Each distinct print of more than literals counts as new once.
    return len(printed) - sum(not _prints_literals(text) for text in set(printed))


def _prints_literals(text: str) -> bool:
    """Return True for a print of literal numbers and strings, which computes nothing."""
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return isinstance(tree, ast.Call) and all(isinstance(argument, ast.Constant) for argument in tree.args)


def _pair_neighbouring_lines(trajectory: Trajectory) -> list[tuple[Line, Line]]:
    return list(zip(trajectory.lines, trajectory.lines[1:], strict=False))


def compute_outcome_parts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of each part of the outcome over graded rollouts. It is empty if a single judge gave each
    outcome."""
    return compute_mean_parts([t.outcomes for t in trajectories if t.outcome is not None])


def compute_error_rates(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the share of executed lines that ended in each class of errors. Shares add up to `line_error_rate`."""
    valid = [t for t in trajectories if t.failure is None]
    counts: dict[str, int] = {}
    for name in (name for t in valid for name in _classify_errors(t)):
        counts[name] = counts.get(name, 0) + 1
    # Divide by executed lines, as `line_error_rate` does.
    executed = sum(1 for t in valid for _ in t.executions)
    return {name: count / executed for name, count in counts.items()}


def classify_error(status: LineStatus, observed: str) -> str:
    """Return the exception that a line in error ended with, if it is Python's own, or else its status or `other`."""
    if status not in (LineStatus.EXCEPTION, LineStatus.SYNTAX_ERROR):
        return status.value
    # The last row that is not a prompt names the exception.
    rows = [row for row in observed[-_TAIL_CHARS:].split("\n") if row.strip() and row.strip() not in (">>>", "...")]
    match = _EXCEPTION_ROW.match(rows[-1]) if rows else None
    if match is not None and match[1] in _BUILTIN_EXCEPTIONS:
        return match[1]
    # The output names a class of the program, or no class.
    return OTHER if status is LineStatus.EXCEPTION else "SyntaxError"


def _classify_errors(trajectory: Trajectory) -> Iterable[str]:
    """Yield the class of each line in error: the printed exception, if it is Python's own, or else the status."""
    for segment, next_segment in zip(trajectory.segments, (*trajectory.segments[1:], None), strict=True):
        if not isinstance(segment, Sampled):
            continue
        for line in segment.lines:
            if line.execution is not None and line.execution.status.is_error:
                # Only the last line before an observation can have printed it.
                text = next_segment.text if isinstance(next_segment, Observed) and line is segment.lines[-1] else ""
                yield classify_error(line.execution.status, text)


class NamedMetrics:
    """Registry of the names that a run follows: the first `LIMIT` of each kind, and `other`."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.max_names = limit
        self._names: dict[str, dict[str, str]] = {}
        self._logged: dict[str, None] = {}

    def compute(self, kind: str, values: Mapping[str, float]) -> dict[str, float]:
        """Return the values under the names `kind/NAME`. A known name without a value now gets 0.

        Values of one kind must be additive, because names beyond the limit share `other`.
        """
        names = self._names.setdefault(kind, {})
        # A name that was logged once gets a value at every step.
        metrics = {key: 0.0 for key in self._logged if key.startswith(f"{kind}/")}
        for name, value in values.items():
            # A new name beyond the limit is logged as `other`.
            if name not in names and len(names) < self.max_names:
                names[name] = _UNLOGGED_CHARS.sub("_", name)[:60] or OTHER
            key = f"{kind}/{names.get(name, OTHER)}"
            metrics[key] = metrics.get(key, 0.0) + value
        self._logged |= dict.fromkeys(metrics)
        return metrics

    def state_dict(self) -> str:
        """Return the names that the run follows, as JSON."""
        return json.dumps({"followed": self._names, "told": list(self._logged)})

    def load_state_dict(self, memory: str) -> None:
        """Restore a state that `state_dict` returned."""
        state = json.loads(memory)
        self._names, self._logged = state["followed"], dict.fromkeys(state["told"])
