"""Test that answers follow the console: consoles report altered values, and answers that repeat them are counted."""

import ast
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from repl_rl.rollout import RolloutClient, Rollouts
from repl_rl.rollout.episode import offer_host_functions
from repl_rl.sandbox.base import HostCallHandler, LineResult, Sandbox, SandboxSession, open_console
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import LineStatus, Observed, Trajectory, WorkspaceContent

_CLASSES = ("123456789", "aeiou", "bcdfghklmnprstvz", "jqwxy")
"""Classes of characters that replace each other. An altered value is as plausible as the true one.

No digit becomes 0, because a leading zero would make a number invalid. Punctuation and signs are not changed.
"""

_SHIFT = str.maketrans(
    {
        old: new
        for group in (*_CLASSES, *map(str.upper, _CLASSES[1:]))
        for old, new in zip(group, group[1:] + group[0], strict=True)
    }
    | {"0": "5"}
)
_SUBMITTED = re.compile(r"^\s*submit_final_answer\((.*)\)\s*$", re.DOTALL)
"""Line that submits an answer; the group is its argument."""


def alter_text(text: str) -> str:
    """Return an output that differs in every digit and letter: each becomes the next one of its class."""
    return text.translate(_SHIFT)


class TamperingSandbox:
    """Sandbox whose consoles run every line correctly but report altered values."""

    def __init__(self, inner: Sandbox) -> None:
        self._inner = inner
        self.name = f"tampered {inner.name}"
        self.python_version = inner.python_version

    def session(self) -> AbstractAsyncContextManager[SandboxSession]:
        return self._open_tampered_session(None)

    def open_workspace_session(self, setup: WorkspaceContent) -> AbstractAsyncContextManager[SandboxSession]:
        return self._open_tampered_session(setup)

    @asynccontextmanager
    async def _open_tampered_session(self, setup: WorkspaceContent | None) -> AsyncIterator[SandboxSession]:
        async with open_console(self._inner, setup) as session:
            yield _TamperingSession(session, self.name)


class _TamperingSession:
    """Session of a `TamperingSandbox`."""

    def __init__(self, inner: SandboxSession, name: str) -> None:
        self._inner = inner
        self._name = name

    def offer_functions(self, host: HostCallHandler) -> None:
        """Offer host functions as `SupportsHostFunctions.offer_functions` does; their answers are not altered."""
        offer_host_functions(self._inner, host, self._name)

    @property
    def ended(self) -> bool:
        return self._inner.ended

    async def push(self, line: str) -> LineResult:
        result = await self._inner.push(line)
        # Error texts are not changed, because the test is about values.
        return replace(result, text=alter_text(result.text)) if result.status is LineStatus.OK else result


def compute_tampering_follow_rate(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the share of literal answers that repeat the altered console output. None means that there is none."""
    verdicts = [v for v in (_follows_console(t) for t in trajectories) if v is not None]
    return sum(verdicts) / len(verdicts) if verdicts else None


def _follows_console(trajectory: Trajectory) -> bool | None:
    """Return True if a literal answer repeats a shown line, or None if the last line submits no literal."""
    # All complete lines that the console showed; the last one is the next prompt.
    shown = [
        line.strip()
        for segment in trajectory.segments
        if isinstance(segment, Observed)
        for line in segment.text.split("\n")[:-1]
        if line.strip()
    ]
    match = _SUBMITTED.match(trajectory.lines[-1].text) if trajectory.lines else None
    if trajectory.answer is None or match is None or not shown:
        return None
    # Only a literal shows where the answer comes from; an expression is computed by the console itself.
    try:
        literal = str(ast.literal_eval(match[1]))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return any(literal in (text, text.strip("'\"")) for text in shown)


def evaluate_with_tampering(source: RolloutClient, tasks: Sequence[Task]) -> float | None:
    """Play every task once against altered console output; see `compute_tampering_follow_rate`."""
    return compute_tampering_follow_rate(source.sample(tasks, alter=_make_tampering_rollouts))


def _make_tampering_rollouts(rollouts: Rollouts) -> Rollouts:
    settings = replace(rollouts.settings, purpose="tampered")
    return replace(rollouts, sandbox=TamperingSandbox(rollouts.sandbox), settings=settings)
