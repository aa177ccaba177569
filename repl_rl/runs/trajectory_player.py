"""Notebook widget that plays stored trajectories. It needs the extra `notebooks` (anywidget).

`TrajectoryPlayer` shows the report's view of a trajectory as an anywidget, and as an HTML page that needs no kernel.
`LiveReplay` is its live part in the kernel: rebuilt consoles, typed lines and branches.
"""

import html
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path
from typing import TypeVar

import anywidget
import traitlets

from repl_rl.credit.credited_trajectory import CreditedTrajectory
from repl_rl.errors import ConfigError, ReplRLError, RolloutFailure
from repl_rl.rollout import SyncRollouts
from repl_rl.rollout.synchronous_rollouts import EventLoopThread
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.replay import Branches, Replay, ReplayedLine, branch, get_replay_branch_point, open_replay
from repl_rl.runs.report import (
    PLAYER_SCRIPTS,
    build_entries_payload,
    build_full_detail,
    pack_json,
    read_page_file,
    read_scripts,
    render_player_page,
    shorten_text,
)
from repl_rl.runs.store import Store
from repl_rl.sandbox.base import Sandbox
from repl_rl.tasks import Task
from repl_rl.trajectory.console_text import PS1
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.atomic_files import Json

T = TypeVar("T")

MOST = 5000
"""Maximum number of trajectories that one player shows; the rest of a longer source is left out."""
MOST_BRANCHES = 64
"""Maximum number of continuations that one request samples."""


class LiveReplay:
    """One replay at a time, in a console that is opened at the first use.

    The console comes from the sandbox of the rollouts `source`, which must be open and stay open. If `source` is None,
    `world` configures the sandbox, and no continuations can be sampled.
    """

    def __init__(
        self,
        entries: Sequence[CreditedTrajectory],
        world: RolloutConfig,
        source: SyncRollouts | None,
        tasks: Sequence[Task],
    ) -> None:
        self._entries = entries
        self._world = world
        self._source = source
        self._tasks: Mapping[str, Task] = {task.id: task for task in tasks}
        self._thread: EventLoopThread | None = None
        self._sandbox: Sandbox | None = None
        # One stack holds the sandbox, the other one the console of the current replay.
        self._sandbox_stack = AsyncExitStack()
        self._replay_stack = AsyncExitStack()
        self._replay: Replay | None = None
        # Line at which the replay was rebuilt, and number of steps that ran before it.
        self._line = 0
        self._skipped_steps = 0

    def handle_message(self, message: Mapping[str, object]) -> dict[str, Json]:
        """Return the data to draw for a message of the page, or `{"error": ...}`. Every field is checked."""
        try:
            return self._handle_message(message)
        except (ReplRLError, RolloutFailure) as error:
            return {"error": shorten_text(str(error))}

    def close(self) -> None:
        """Close the console."""
        if self._sandbox is not None:
            self._run(self._replay_stack.aclose())
            self._run(self._sandbox_stack.aclose())
            self._replay = self._sandbox = None
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def _handle_message(self, message: Mapping[str, object]) -> dict[str, Json]:
        kind, text = message.get("kind"), message.get("text")
        at, line, count = (message.get(name) for name in ("at", "line", "count"))
        # The page may send anything: check types before use.
        if not isinstance(at, int) or not isinstance(line, int) or not isinstance(count, int):
            raise ConfigError("message", sorted(message), "give at, line and count as whole numbers")
        if not isinstance(text, str) or "\n" in text:
            raise ConfigError("line", text, "give one line")
        # Rebuild the console for the first message, and for each that asks for a fresh one.
        if self._replay is None or message.get("fresh") is True:
            self._rebuild_console(at, line)
        assert self._replay is not None
        replay = self._replay
        actions: dict[object, Callable[[], object]] = {
            "type": lambda: self._run(replay.run_typed(text)),
            "edit": lambda: self._run(replay.run_instead(text)),
            "step": lambda: self._run(replay.run_next()),
            "branch": lambda: None,
        }
        if kind not in actions:
            raise ConfigError("message", kind, f"choose one of {', '.join(map(str, actions))}")
        # Run the action. The answer holds every step since the rebuild, so that the page can draw all of them again.
        actions[kind]()
        branches = self._sample_branches(count) if kind == "branch" else None
        return {
            "line": self._line,
            "steps": [_build_step_view(step) for step in replay.steps[self._skipped_steps :]],
            "value": branches.mean_outcome if branches else None,
            "branches": [build_full_detail(CreditedTrajectory(t)) for t in branches.trajectories] if branches else [],
        }

    def _rebuild_console(self, at: int, line: int) -> None:
        """Replay the first `line` lines of trajectory number `at` in a fresh console."""
        if not 0 <= at < len(self._entries):
            raise ConfigError("trajectory", at, f"give 0 to {len(self._entries) - 1}")
        trajectory = self._entries[at].trajectory

        async def open_at() -> Replay:
            await self._replay_stack.aclose()
            sandbox = self._sandbox or (self._source.rollouts.sandbox if self._source else None)
            if sandbox is None:
                sandbox = await self._sandbox_stack.enter_async_context(self._world.open_consoles(warm=1))
            self._sandbox = sandbox
            return await self._replay_stack.enter_async_context(open_replay(trajectory, sandbox, line))

        # If no console can be opened, no stale replay must remain.
        self._replay = None
        self._replay = self._run(open_at())
        self._line, self._skipped_steps = line, len(self._replay.steps)

    def _run(self, coroutine: Coroutine[None, None, T]) -> T:
        """Run a coroutine on the event loop of the sandbox, and return its result."""
        if self._source is not None:
            # The source's sandbox belongs to its event loop.
            return self._source.run(coroutine)
        if self._thread is None:
            self._thread = EventLoopThread()
        return self._thread.run(coroutine)

    def _sample_branches(self, count: int) -> Branches:
        """Sample continuations from the current position of the replay."""
        assert self._replay is not None
        if self._source is None:
            raise ConfigError("policy", None, "give the player policy=, an open SyncRollouts")
        if not 1 <= count <= MOST_BRANCHES:
            raise ConfigError("continuations", count, f"give 1 to {MOST_BRANCHES}")
        rollouts = self._source.rollouts
        start = get_replay_branch_point(self._replay, rollouts.renderer)
        task = self._tasks.get(start.trajectory.task_id)
        return self._source.run(branch(rollouts, start, task, count))


def _build_step_view(step: ReplayedLine) -> dict[str, Json]:
    """Return a step as the page draws it."""
    return {
        "prompt": step.recorded_line.prompt if step.recorded_line else PS1,
        "text": shorten_text(step.text),
        "shown": shorten_text(step.shown.text),
        "status": step.result.status.value,
        "difference": step.difference.cause.value if step.difference else None,
    }


_RENDER_SCRIPT = """
export default {
  render({ model, el: host }) {
    const root = host.attachShadow({ mode: "open" });
    root.append(el("style", {}, STYLE));
    const body = document.body;
    const theme = body.dataset.jpThemeLight || (body.classList.contains("vscode-dark") ? "false" : "");
    if (theme) host.style.colorScheme = theme === "false" ? "dark" : "light";
    const waiting = new Map();
    let asked = 0;
    model.on("msg:custom", (answer) => {
      const done = waiting.get(answer.number);
      waiting.delete(answer.number);
      if (done) done(answer);
    });
    const live = (message) => new Promise((done) => {
      asked += 1;
      waiting.set(asked, done);
      model.send({ ...message, number: asked });
    });
    // Jupyter would take a typed x for "cut the cell": it sees the host alone, not the field in the shadow tree. The
    // attribute tells it to leave keys alone; it is set before Jupyter looks, and not for the likes of Ctrl+S.
    const typed = (event) => host.toggleAttribute("data-lm-suppress-shortcuts", !event.ctrlKey && !event.metaKey);
    window.addEventListener("keydown", typed, true);
    unpacked(model.get("data")).then((data) => player(root, data, model.get("live") ? live : null));
    return () => window.removeEventListener("keydown", typed, true);
  },
};
"""


def _load_config(source: object, sandbox: str | None, trust: bool) -> RolloutConfig:
    """Return the console settings of the run in `source`, or defaults for trajectories without a folder."""
    if isinstance(source, Path | str):
        return RolloutConfig.from_run_consoles(Path(source), sandbox=sandbox, trust=trust)
    return RolloutConfig(sandbox=sandbox or "local")


def _build_module() -> str:
    """Return the JavaScript module of the widget: the player's scripts, its style and the render function."""
    # A shadow tree has no root element; its host takes the variables.
    style = read_page_file("page.css").replace(":root", ":host")
    return f"{read_scripts((*PLAYER_SCRIPTS, 'player.js'))}\nconst STYLE = {json.dumps(style)};\n{_RENDER_SCRIPT}"


class TrajectoryPlayer(anywidget.AnyWidget):
    """Notebook widget that plays trajectories: step, scrub, compare, and continue live from any line.

    Keys: arrows step, Home and End jump, space plays. The widget draws in a shadow tree, so its style and the
    notebook's do not affect each other.
    """

    _esm = _build_module()
    data = traitlets.Unicode("").tag(sync=True)
    live = traitlets.Bool(False).tag(sync=True)
    _live: LiveReplay | None = None

    def __init__(
        self,
        source: Path | str | Trajectory | CreditedTrajectory | Iterable[Trajectory | CreditedTrajectory],
        *,
        sandbox: str | None = None,
        policy: SyncRollouts | None = None,
        tasks: Sequence[Task] = (),
        tokens: Sequence[str] = (),
        trust: bool = False,
    ) -> None:
        """Load trajectories, or a path where they are stored; at most `MOST` of them.

        Args:
            source: a run folder, a trajectories folder or file, or trajectories.
            sandbox: sandbox of live lines: "local", "docker" or "unsafe". "" makes a player without live lines. None
                takes the sandbox of the run, or "local". Limits and preloads are those of the run. A run's sandbox that
                does not isolate, or is on other machines, must be given here.
            policy: an open `SyncRollouts`, which samples continuations in its own sandbox. None disables branches.
            tasks: tasks that grade continuations; continuations of other tasks are not graded.
            tokens: the text of each token id, if `source` is not a run folder that stores them.
            trust: True permits the start of a container image that the run names.

        Raises:
            StoreError: nothing can be read there.
            ConfigError: the run's sandbox, or its image, must be chosen here.
        """
        self.entries, captions = _load_entries(source)
        self._payload = build_entries_payload(self.entries, tokens or captions)
        # No console starts here; `LiveReplay` opens one on first use.
        is_live = sandbox != ""
        self._live = LiveReplay(self.entries, _load_config(source, sandbox, trust), policy, tasks) if is_live else None
        super().__init__(data=pack_json(self._payload), live=is_live)
        self.on_msg(self._on_message)

    def html(self) -> str:
        """Return the player as one HTML document that needs no kernel and no network, without live lines."""
        return render_player_page(self._payload)

    def _repr_mimebundle_(self, **options: dict[str, object]) -> tuple[dict[str, object], dict[str, object]] | None:
        """Return the widget, with the HTML page in an isolated frame for viewers that show no widgets."""
        bundle = super()._repr_mimebundle_(**options)
        if bundle is None:
            return None
        kinds, metadata = bundle
        page = html.escape(self.html())
        frame = f'<iframe sandbox="allow-scripts" width="100%" height="480" srcdoc="{page}"></iframe>'
        return {**kinds, "text/html": frame}, metadata

    def close(self) -> None:
        """Close the console, and remove the widget from the page."""
        if self._live is not None:
            self._live.close()
        super().close()

    def _on_message(self, _: object, message: Mapping[str, object], buffers: object) -> None:
        if self._live is not None:
            self.send({**self._live.handle_message(message), "number": message.get("number")})


def _load_entries(
    source: Path | str | Trajectory | CreditedTrajectory | Iterable[Trajectory | CreditedTrajectory],
) -> tuple[list[CreditedTrajectory], Sequence[str]]:
    """Return at most `MOST` entries, and the text of each token id as far as it is stored."""
    if isinstance(source, str | Path):
        store = Store(Path(source))
        return list(islice(store, MOST)), store.read_tokens()
    items = [source] if isinstance(source, Trajectory | CreditedTrajectory) else islice(source, MOST)
    return [entry if isinstance(entry, CreditedTrajectory) else CreditedTrajectory(entry) for entry in items], ()


__all__ = ["TrajectoryPlayer"]
