"""Do answers follow what the console printed? Consoles that report altered values, and the share that repeats them."""

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
"""Characters that stand for each other: an altered value is as plausible as the true one, and a number stays a number
(a leading zero would not). Quotes, brackets, commas and signs stay as they are."""

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
    """An output that differs in every digit and letter: each becomes another one of its class."""
    return text.translate(_SHIFT)


class TamperedSandbox:
    """A sandbox whose consoles run every line faithfully but report altered values."""

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
        """As `Calling.offer`; what the host answers is not altered."""
        offered(self._inner, host, self._name)

    @property
    def ended(self) -> bool:
        return self._inner.ended

    async def push(self, line: str) -> PushResult:
        result = await self._inner.push(line)
        # Error texts stay as they are: the question is whether *values* are read from the console.
        return replace(result, text=tamper(result.text)) if result.status is LineStatus.OK else result


def tamper_followed(trajectories: Sequence[Trajectory]) -> float | None:
    """Of the literal answers given after an altered output, the share that repeats what the console showed.

    None: no literal answer was given after an output, so nothing can be said.
    """
    verdicts = [v for v in (_followed(t) for t in trajectories) if v is not None]
    return sum(verdicts) / len(verdicts) if verdicts else None


def _followed(trajectory: Trajectory) -> bool | None:
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
    try:
        literal = ast.literal_eval(match[1])
    except (ValueError, SyntaxError):
        return None
    return any(str(literal) in (text, text.strip("'\"")) for text in shown)


def evaluate_tampered(source: Fleet, tasks: Sequence[Task]) -> float | None:
    """Play every task once against altered console output: see `tamper_followed`."""
    return tamper_followed(source.sample(tasks, alter=_tampered))


def _tampered(rollouts: Rollouts) -> Rollouts:
    return replace(rollouts, sandbox=TamperedSandbox(rollouts.sandbox), purpose="tampered")
