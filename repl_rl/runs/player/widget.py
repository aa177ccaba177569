"""`TrajectoryPlayer`: the report's view of a trajectory as an anywidget, and as an HTML page that needs no kernel."""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import anywidget
import traitlets

from repl_rl.credit.credited import Credited
from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout import RolloutThread
from repl_rl.runs.player.live import Live
from repl_rl.runs.report import PLAYER_SCRIPTS, entries_payload, pack, player_page, read, scripts
from repl_rl.runs.store import Store
from repl_rl.tasks import Task
from repl_rl.world import World

MOST = 5000
"""Most trajectories that one player shows; the rest of a longer source is left out."""

_RENDER = """
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


def _world(source: object, sandbox: str | None, trust: bool) -> World:
    if isinstance(source, Path | str):
        return World.recorded_consoles(Path(source), sandbox=sandbox, trust=trust)
    return World(sandbox=sandbox or "local")


def _module() -> str:
    # A shadow tree has no root element; its host takes the variables.
    style = read("page.css").replace(":root", ":host")
    return f"{scripts((*PLAYER_SCRIPTS, 'player.js'))}\nconst STYLE = {json.dumps(style)};\n{_RENDER}"


class TrajectoryPlayer(anywidget.AnyWidget):
    """Notebook widget that plays trajectories: step, scrub, compare, and continue live from any line.

    Keys: arrows step, Home and End jump, space plays. The widget draws in a shadow tree, so its style and the
    notebook's do not affect each other.
    """

    _esm = _module()
    data = traitlets.Unicode("").tag(sync=True)
    live = traitlets.Bool(False).tag(sync=True)
    _live: Live | None = None

    def __init__(
        self,
        source: Path | str | Trajectory | Credited | Iterable[Trajectory | Credited],
        *,
        sandbox: str | None = None,
        policy: RolloutThread | None = None,
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
            policy: an open `RolloutThread`, which samples continuations in its own sandbox. None disables branches.
            tasks: tasks that grade continuations; continuations of other tasks are not graded.
            tokens: the text of each token id, if `source` is not a run folder that stores them.
            trust: start the container image that the run names.

        Raises:
            StoreError: nothing can be read there.
            ConfigError: the run's sandbox, or its image, must be chosen here.
        """
        self.entries, captions = _entries(source)
        self._payload = entries_payload(self.entries, tokens or captions)
        # No console starts here; `Live` opens one on first use.
        alive = sandbox != ""
        self._live = Live(self.entries, _world(source, sandbox, trust), policy, tasks) if alive else None
        super().__init__(data=pack(self._payload), live=alive)
        self.on_msg(self._asked)

    def html(self) -> str:
        """Return the player as one HTML document that needs no kernel and no network, without live lines."""
        return player_page(self._payload)

    def _repr_mimebundle_(self, **options: dict[str, object]) -> tuple[dict[str, object], dict[str, object]] | None:
        """Return the widget, with the HTML page in an isolated frame for viewers that show no widgets."""
        bundle = super()._repr_mimebundle_(**options)
        if bundle is None:
            return None
        kinds, metadata = bundle
        framed = (
            f'<iframe sandbox="allow-scripts" width="100%" height="480" srcdoc="{html.escape(self.html())}"></iframe>'
        )
        return {**kinds, "text/html": framed}, metadata

    def close(self) -> None:
        """Close the console, and remove the widget from the page."""
        if self._live is not None:
            self._live.close()
        super().close()

    def _asked(self, _: object, message: Mapping[str, object], buffers: object) -> None:
        if self._live is not None:
            self.send({**self._live.answer(message), "number": message.get("number")})


def _entries(
    source: Path | str | Trajectory | Credited | Iterable[Trajectory | Credited],
) -> tuple[list[Credited], Sequence[str]]:
    if isinstance(source, str | Path):
        store = Store(Path(source))
        return list(islice(store, MOST)), store.tokens()
    given = [source] if isinstance(source, Trajectory | Credited) else islice(source, MOST)
    return [entry if isinstance(entry, Credited) else Credited(entry) for entry in given], ()
