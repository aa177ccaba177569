"""Metrics of a batch of trajectories."""

import ast
import re
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TypeVar

from repl_rl.record.console import is_void
from repl_rl.record.trajectory import Line, LineStatus, Stop, Trajectory

T = TypeVar("T")

_PRINT = re.compile(r"\bprint\s*\(")
_TRY = re.compile(r"^\s*(try|except)\b")
_INTROSPECTION = re.compile(
    r"\b(?:import|from)\s+(?:[\w.]+\s*,\s*)*(?:gc|inspect|builtins|ctypes)\b|\b(?:gc|inspect|builtins|ctypes)\.\w"
    r"|\bsys\s*\.\s*modules\b|\b_getframe\b|\b_current_frames\b|\bsettrace\b|\bsetprofile\b|\b__builtins__\b"
    r"|\b[a-z]{1,2}_(?:frame|back|globals|locals|builtins)\b|\b__subclasses__\b|\b__globals__\b|\b__import__\b"
)
"""Names by which a program reaches the code that runs it: frames, gc, builtins, `sys.modules`, inspect."""


def describe(trajectories: Sequence[Trajectory]) -> dict[str, float]:
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
    sound = [t for t in trajectories if t.failure is None]
    graded = [t.outcome for t in sound if t.outcome is not None]
    lines = [line for t in sound for line in t.lines]
    run = [line.execution for line in lines if line.execution is not None]
    return {
        "solve_rate": _share([t for t in sound if t.outcome is not None], lambda t: t.solved),
        "reward_mean": fmean(graded) if graded else 0.0,
        "answered_rate": _share(sound, lambda t: t.answer is not None),
        "line_error_rate": _share(run, lambda execution: execution.status.is_error),
        "timeout_rate": _share(run, lambda execution: execution.status is LineStatus.TIMEOUT),
        "too_long_rate": _share(sound, lambda t: t.stop in (Stop.LINE_TOO_LONG, Stop.MAX_TOKENS)),
        "lines_per_rollout": len(lines) / max(len(sound), 1),
        "line_tokens_mean": fmean(len(line.token_ids) for line in lines) if lines else 0.0,
        "sampled_tokens": float(sum(t.sampled_tokens for t in sound)),
        "observed_tokens": float(sum(t.observed_tokens for t in sound)),
        "sandbox_fault_rate": _share(trajectories, lambda t: t.failure is not None and not t.failure.kind.is_users),
        "user_error_rate": _share(trajectories, lambda t: t.failure is not None and t.failure.kind.is_users),
        "void_line_rate": _share(lines, lambda line: is_void(line.text)),
        "print_rate": _share(lines, lambda line: _PRINT.search(line.text) is not None),
        "print_spam_rate": sum(map(_print_spam, sound)) / max(len(lines), 1),
        "try_rate": _share(lines, lambda line: _TRY.match(line.text) is not None),
        "repeat_rate": _share([pair for t in sound for pair in _pairs(t)], lambda pair: pair[0].text == pair[1].text),
        "introspection_rate": _share(sound, _introspects),
    }


def _share(items: Sequence[T], test: Callable[[T], bool]) -> float:
    return sum(map(test, items)) / len(items) if items else 0.0


def _introspects(trajectory: Trajectory) -> bool:
    texts = (*(line.text for line in trajectory.lines), trajectory.answer or "")
    return any(_INTROSPECTION.search(text) for text in texts)


def _print_spam(trajectory: Trajectory) -> int:
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


def _pairs(trajectory: Trajectory) -> list[tuple[Line, Line]]:
    return list(zip(trajectory.lines, trajectory.lines[1:], strict=False))
