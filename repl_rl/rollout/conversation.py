"""Several questions, one after the other, in one console: ids are only ever appended, and names stay bound.

Each question is a rollout of its own, with its own limits. Between two of them no session of the engine is open, so a
conversation that waits for a person takes nothing but its console.
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
    """The session of a conversation; it remembers how its last line went."""

    def __init__(self, session: SandboxSession) -> None:
        self.session = session
        self.last: PushResult | None = None

    @property
    def ended(self) -> bool:
        """As `SandboxSession.ended`."""
        return self.session.ended

    async def push(self, line: str) -> PushResult:
        """As `SandboxSession.push`."""
        self.last = None  # a line that is cancelled leaves a console that nobody can follow
        self.last = await self.session.push(line)
        return self.last


class _Kept:
    """A sandbox of one console: each of its sessions is that one, which stays when a session ends."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.name, self.python_version = sandbox.name, sandbox.python_version
        self._sandbox = sandbox
        self._stack = AsyncExitStack()
        self._console: _Console | None = None

    @asynccontextmanager
    async def session(self) -> AsyncIterator[SandboxSession]:
        """As `Sandbox.session`."""
        if self._console is None:
            self._console = _Console(await self._stack.enter_async_context(self._sandbox.session()))
        elif isinstance(self._console.session, Continuing):
            self._console.session.go_on()
        yield self._console

    @property
    def usable(self) -> bool:
        """A further line can be typed where a cell begins, now or once its answer is forgotten."""
        if self._console is None:
            return True
        last = self._console.last
        if last is None or last.more:
            return False
        return not self._console.ended or (
            last.status is LineStatus.ANSWERED and isinstance(self._console.session, Continuing)
        )

    async def aclose(self) -> None:
        await self._stack.aclose()


class Conversation:
    """One console, and all ids so far. Close it; whoever is cancelled within a turn closes it too."""

    def __init__(self, rollouts: Rollouts, *, keep: bool) -> None:
        """`keep`: the console outlives a turn, so that another can follow. It can call no functions of the host then.

        Raises:
            ConfigError: `keep`, and lines may call functions of the host.
        """
        if keep and rollouts.host:
            remedy = "a console that is kept can call none; leave one of the two out"
            raise ConfigError("host functions", [f.name for f in rollouts.host], remedy)
        self.text = ""
        """Of all turns so far, prompts included."""
        self.token_ids: tuple[int, ...] = ()
        """Of all turns so far, prompts included."""
        self._kept = _Kept(rollouts.sandbox) if keep else None
        self._rollouts = rollouts if self._kept is None else replace(rollouts, sandbox=self._kept)

    @property
    def open(self) -> bool:
        """A further turn can follow: its console is kept, has not ended but by an answer, and is within no cell."""
        return self._kept is not None and self._kept.usable

    def after(self, more: Prompt) -> Prompt:
        """What a turn begins with that asks `more`."""
        return Prompt(self.text + more.text, (*self.token_ids, *more.token_ids))

    async def turn(self, task: Task, prompt: Prompt, seed: int, temperature: float, followed: Followed) -> Trajectory:
        """Play a turn, named as its task, that begins with `prompt`: that of the task, or `after` what was said.

        Raises:
            EngineError, InvariantError, UserCodeError: as `Rollouts.follow`.
        """
        origin = Origin(task.id, task, prompt, seed, self._rollouts.engine.policy_step)
        played = await self._rollouts.follow(origin, temperature, followed)
        self.text = prompt.text + written(played)
        self.token_ids = (*prompt.token_ids, *played.completion_ids)
        return played

    async def aclose(self) -> None:
        """Give the console back."""
        if self._kept is not None:
            await self._kept.aclose()


def written(trajectory: Trajectory) -> str:
    """All text after the prompt: what was sampled, and what was observed."""
    parts = ([s.text] if isinstance(s, Observed) else [line.text for line in s.lines] for s in trajectory.segments)
    return "".join(text for part in parts for text in part)
