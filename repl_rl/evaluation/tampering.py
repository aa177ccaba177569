"""Test that answers follow the console: consoles report altered values, and answers that repeat them are counted."""

import ast
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from repl_rl.record.setup import Setup
from repl_rl.record.trajectory import LineStatus, Observed, Trajectory
from repl_rl.rollout import Fleet, Rollouts
from repl_rl.rollout.console import offered
from repl_rl.sandbox.base import Host, PushResult, Sandbox, SandboxSession, console_of
from repl_rl.tasks import Task

_CLASSES = ("123456789", "aeiou", "bcdfghklmnprstvz", "jqwxy")
"""Classes of characters that replace each other. An altered value is as plausible as the true one.

A number remains a number; a leading zero would not. Quotes, brackets, commas and signs are not changed.
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


def tamper(text: str) -> str:
    """Return an output that differs in every digit and letter: each becomes the next one of its class."""
    return text.translate(_SHIFT)


class TamperedSandbox:
    """Sandbox whose consoles run every line correctly but report altered values."""

    def __init__(self, inner: Sandbox) -> None:
        self._inner = inner
        self.name = f"tampered {inner.name}"
        self.python_version = inner.python_version

    def session(self) -> AbstractAsyncContextManager[SandboxSession]:
        return self._tampered(None)

    def prepared(self, setup: Setup) -> AbstractAsyncContextManager[SandboxSession]:
        return self._tampered(setup)

    @asynccontextmanager
    async def _tampered(self, setup: Setup | None) -> AsyncIterator[SandboxSession]:
        async with console_of(self._inner, setup) as session:
            yield _TamperedSession(session, self.name)


class _TamperedSession:
    def __init__(self, inner: SandboxSession, name: str) -> None:
        self._inner = inner
        self._name = name

    def offer(self, host: Host) -> None:
        """Offer host functions as `Calling.offer` does; their answers are not altered."""
        offered(self._inner, host, self._name)

    @property
    def ended(self) -> bool:
        return self._inner.ended

    async def push(self, line: str) -> PushResult:
        result = await self._inner.push(line)
        # Error texts are not changed, because the test is about values.
        return replace(result, text=tamper(result.text)) if result.status is LineStatus.OK else result


def tamper_followed(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the share of literal answers after an altered output that repeat it, or None without such answers."""
    verdicts = [v for v in (_followed(t) for t in trajectories) if v is not None]
    return sum(verdicts) / len(verdicts) if verdicts else None


def _followed(trajectory: Trajectory) -> bool | None:
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


def evaluate_tampered(source: Fleet, tasks: Sequence[Task]) -> float | None:
    """Play every task once against altered console output; see `tamper_followed`."""
    return tamper_followed(source.sample(tasks, alter=_tampered))


def _tampered(rollouts: Rollouts) -> Rollouts:
    return replace(rollouts, sandbox=TamperedSandbox(rollouts.sandbox), purpose="tampered")
