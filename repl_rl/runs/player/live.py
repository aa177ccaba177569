"""Live part of the player, with a kernel: rebuilt consoles, typed lines and branches."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

from repl_rl.credit.credited import Credited
from repl_rl.errors import ConfigError, ReplRLError, RolloutFailure
from repl_rl.machine.files import Json
from repl_rl.record.console import PS1
from repl_rl.rollout import RolloutThread
from repl_rl.rollout.thread import LoopThread
from repl_rl.runs.replay import Branches, Replay, Step, branch, open_replay, start_of
from repl_rl.runs.report import legible, whole
from repl_rl.sandbox.base import Sandbox
from repl_rl.tasks import Task
from repl_rl.world import World

T = TypeVar("T")

MOST_BRANCHES = 64


class Live:
    """One replay at a time, in a console that is opened at the first use.

    The console comes from the sandbox of `source`, or else from that of `world`. `source` must be open and stay open;
    None disables branches.
    """

    def __init__(
        self, entries: Sequence[Credited], world: World, source: RolloutThread | None, tasks: Sequence[Task]
    ) -> None:
        self._entries = entries
        self._world = world
        self._source = source
        self._tasks: Mapping[str, Task] = {task.id: task for task in tasks}
        self._thread: LoopThread | None = None
        self._sandbox: Sandbox | None = None
        self._opened = AsyncExitStack()
        self._stack = AsyncExitStack()
        self._replay: Replay | None = None
        self._line = 0
        self._behind = 0

    def answer(self, message: Mapping[str, object]) -> dict[str, Json]:
        """Return the data to draw for a message of the page, or `{"error": ...}`. Every field is checked."""
        try:
            return self._answer(message)
        except (ReplRLError, RolloutFailure) as error:
            return {"error": legible(str(error))}

    def close(self) -> None:
        """Close the console."""
        if self._sandbox is not None:
            self._run(self._stack.aclose())
            self._run(self._opened.aclose())
            self._replay = self._sandbox = None
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def _answer(self, message: Mapping[str, object]) -> dict[str, Json]:
        kind, text = message.get("kind"), message.get("text")
        at, line, count = (message.get(name) for name in ("at", "line", "count"))
        # The page may send anything: check types before use.
        if not isinstance(at, int) or not isinstance(line, int) or not isinstance(count, int):
            raise ConfigError("message", sorted(message), "give at, line and count as whole numbers")
        if not isinstance(text, str) or "\n" in text:
            raise ConfigError("line", text, "give one line")
        # Rebuild the console for the first message, and for each that asks for a fresh one.
        if self._replay is None or message.get("fresh") is True:
            self._rebuild(at, line)
        assert self._replay is not None
        replay = self._replay
        acts: dict[object, Callable[[], object]] = {
            "type": lambda: self._run(replay.type(text)),
            "edit": lambda: self._run(replay.edit(text)),
            "step": lambda: self._run(replay.step()),
            "branch": lambda: None,
        }
        if kind not in acts:
            raise ConfigError("message", kind, f"choose one of {', '.join(map(str, acts))}")
        acts[kind]()
        found = self._branches(count) if kind == "branch" else None
        return {
            "line": self._line,
            "steps": [_drawn(step) for step in replay.steps[self._behind :]],
            "value": found.value if found else None,
            "branches": [whole(Credited(t)) for t in found.trajectories] if found else [],
        }

    def _rebuild(self, at: int, line: int) -> None:
        if not 0 <= at < len(self._entries):
            raise ConfigError("trajectory", at, f"give 0 to {len(self._entries) - 1}")
        trajectory = self._entries[at].trajectory

        async def opened() -> Replay:
            await self._stack.aclose()
            sandbox = self._sandbox or (self._source.rollouts.sandbox if self._source else None)
            if sandbox is None:
                sandbox = await self._opened.enter_async_context(self._world.consoles(warm=1))
            self._sandbox = sandbox
            return await self._stack.enter_async_context(open_replay(trajectory, sandbox, line))

        # If no console can be opened, no stale replay must remain.
        self._replay = None
        self._replay = self._run(opened())
        self._line, self._behind = line, len(self._replay.steps)

    def _run(self, coroutine: Coroutine[None, None, T]) -> T:
        if self._source is not None:
            # The source's sandbox belongs to its event loop.
            return self._source.run(coroutine)
        if self._thread is None:
            self._thread = LoopThread()
        return self._thread.run(coroutine)

    def _branches(self, count: int) -> Branches:
        assert self._replay is not None
        if self._source is None:
            raise ConfigError("policy", None, "give the player a source, an open RolloutThread")
        if not 1 <= count <= MOST_BRANCHES:
            raise ConfigError("continuations", count, f"give 1 to {MOST_BRANCHES}")
        rollouts = self._source.rollouts
        start = start_of(self._replay, rollouts.renderer)
        task = self._tasks.get(start.trajectory.task_id)
        return self._source.run(branch(rollouts, start, task, count))


def _drawn(step: Step) -> dict[str, Json]:
    return {
        "prompt": step.recorded.prompt if step.recorded else PS1,
        "text": legible(step.text),
        "shown": legible(step.shown.text),
        "status": step.result.status.value,
        "difference": step.difference.cause.value if step.difference else None,
    }
