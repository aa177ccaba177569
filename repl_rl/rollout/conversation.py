"""Conversation: several questions in a row in one console. Ids are only ever appended, and names stay defined.

Each question is a separate rollout with its own limits. No engine session is open between two questions, so a
conversation that waits for a person holds only its console.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from repl_rl.errors import ConfigError
from repl_rl.record.record import Followed, Origin
from repl_rl.record.trajectory import LineStatus, Observed, Prompt, Trajectory
from repl_rl.rollout.runner import Rollouts
from repl_rl.sandbox.base import Continuing, PushResult, Sandbox, SandboxSession
from repl_rl.tasks import Task


class _Console:
    """Console session of a conversation, with the result of its last line."""

    def __init__(self, session: SandboxSession) -> None:
        self.session = session
        self.last: PushResult | None = None

    @property
    def ended(self) -> bool:
        """See `SandboxSession.ended`."""
        return self.session.ended

    async def push(self, line: str) -> PushResult:
        """See `SandboxSession.push`."""
        self.last = None  # after a cancelled line the console is in an unknown state
        self.last = await self.session.push(line)
        return self.last


class _Kept:
    """Sandbox with a single console, which stays open between the sessions."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.name, self.python_version = sandbox.name, sandbox.python_version
        self._sandbox = sandbox
        self._stack = AsyncExitStack()
        self._console: _Console | None = None

    @asynccontextmanager
    async def session(self) -> AsyncIterator[SandboxSession]:
        """See `Sandbox.session`."""
        if self._console is None:
            self._console = _Console(await self._stack.enter_async_context(self._sandbox.session()))
        elif isinstance(self._console.session, Continuing):
            self._console.session.go_on()
        yield self._console

    @property
    def usable(self) -> bool:
        """True if a further line can start a cell, at once or after the last answer is forgotten."""
        if self._console is None:
            return True
        last = self._console.last
        # The last line was cancelled, or its cell is still open.
        if last is None or last.more:
            return False
        return not self._console.ended or (
            last.status is LineStatus.ANSWERED and isinstance(self._console.session, Continuing)
        )

    async def aclose(self) -> None:
        await self._stack.aclose()


class Conversation:
    """Console of a conversation, with all ids so far. Close it at the end, and after a cancelled turn."""

    def __init__(self, rollouts: Rollouts, *, keep: bool) -> None:
        """Start without any turn.

        With `keep`, the console outlives a turn, so that another turn can follow. Lines cannot call host functions
        then.

        Raises:
            ConfigError: `keep` is set, and lines may call host functions.
        """
        if keep and rollouts.host:
            remedy = "a console that is kept can call none; leave one of the two out"
            raise ConfigError("host functions", [f.name for f in rollouts.host], remedy)
        self.text = ""
        """Text of all turns so far, prompts included."""
        self.token_ids: tuple[int, ...] = ()
        """Ids of all turns so far, prompts included."""
        self._kept = _Kept(rollouts.sandbox) if keep else None
        self._rollouts = rollouts if self._kept is None else replace(rollouts, sandbox=self._kept)

    @property
    def open(self) -> bool:
        """True if a further turn can follow: the console is kept, is not in a cell, and ended at most by an answer."""
        return self._kept is not None and self._kept.usable

    def after(self, more: Prompt) -> Prompt:
        """Return the prompt of a turn that asks `more` after the turns so far."""
        return Prompt(self.text + more.text, (*self.token_ids, *more.token_ids))

    async def turn(self, task: Task, prompt: Prompt, seed: int, temperature: float, followed: Followed) -> Trajectory:
        """Play a turn named after its task. `prompt` is that of the task, or the result of `after`.

        Raises:
            EngineError, InvariantError, UserCodeError: see `Rollouts.follow`.
        """
        origin = Origin(task.id, task, prompt, seed, self._rollouts.engine.policy_step)
        played = await self._rollouts.follow(origin, temperature, followed)
        self.text = prompt.text + written(played)
        self.token_ids = (*prompt.token_ids, *played.completion_ids)
        return played

    async def aclose(self) -> None:
        """Return the console to the sandbox."""
        if self._kept is not None:
            await self._kept.aclose()


def written(trajectory: Trajectory) -> str:
    """Return all text after the prompt, sampled and observed."""
    parts = ([s.text] if isinstance(s, Observed) else [line.text for line in s.lines] for s in trajectory.segments)
    return "".join(text for part in parts for text in part)
