"""HTML document of the report: markup, style and scripts from `page/`, with the packed data."""

import base64
import hashlib
import html
from collections.abc import Mapping
from pathlib import Path

from repl_rl.machine.files import Json, write_whole
from repl_rl.runs.report.data import payload
from repl_rl.runs.report.rollouts import pack

_FILES = Path(__file__).parent / "page"
PLAYER_SCRIPTS = ("dom.js", "heat.js", "trajectory.js", "diff.js", "rows.js")
"""Scripts that the notebook player shares with the page, in order."""
PAGE_SCRIPTS = (*PLAYER_SCRIPTS, "chart.js", "curves.js", "browser.js", "theme.js", "main.js")
COMPARISON_SCRIPTS = ("dom.js", "rows.js", "chart.js", "curves.js", "theme.js", "compare.js")


_TITLE_END = " · repl_rl</title>".encode()
_HEAD_BYTES = 8192
_START_PLAYER = """
unpacked(document.getElementById("data").textContent).then((data) => {
  const page = document.getElementById("page");
  page.replaceChildren();
  player(page, data, null);
  document.body.dataset.ready = "yes";
});
"""


def page(data: Mapping[str, Json], follow: bool = False) -> str:
    """Return one HTML document that loads nothing from a network. With `follow` it polls its own server for updates.

    Data is packed, so nothing in it is markup. A content security policy allows only this style and these scripts, by
    their hashes. Text that is parsed as markup by mistake would not run.
    """
    return _document(str(data.get("name", "run")), data, scripts(PAGE_SCRIPTS), follow)


def player_page(data: Mapping[str, Json]) -> str:
    """Return the player of `entries_payload` as one HTML document, for viewers without a kernel."""
    script = f"{scripts((*PLAYER_SCRIPTS, 'player.js'))}\n(() => {{{_START_PLAYER}}})();"
    return _document("trajectories", data, script, False)


def comparison_page(data: Mapping[str, Json]) -> str:
    """Return the comparison of two runs as one HTML document; `data` comes from `compared`."""
    return _document(str(data["name"]), data, scripts(COMPARISON_SCRIPTS), False)


def _document(title: str, data: Mapping[str, Json], script: str, follow: bool) -> str:
    style = read("page.css")
    # The hashes allow exactly this style and this script.
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:"
    policy += "; connect-src 'self'" if follow else ""
    parts = {
        "policy": policy + "; base-uri 'none'; form-action 'none'",
        "title": html.escape(title),
        "style": style,
        "script": script,
        "data": pack(data),
        "follow": "yes" if follow else "no",
    }
    # Placeholders look like {{name}}; inserted text is not searched for further ones.
    first, *rest = read("page.html").split("{{")
    return first + "".join(parts[piece.partition("}}")[0]] + piece.partition("}}")[2] for piece in rest)


def is_page(file: Path) -> bool:
    """Return True if the file begins like a page of ours."""
    try:
        with file.open("rb") as opened:
            return _TITLE_END in opened.read(_HEAD_BYTES)
    except OSError:
        return False


def write_report(run: Path) -> Path:
    """Write `run/report.html` atomically and return its path.

    Raises:
        StoreError: `run` is not a run folder, or one of its records has an unknown version.
    """
    path = run / "report.html"
    write_whole(path, page(payload(run)))
    return path


def scripts(names: tuple[str, ...]) -> str:
    """Return the scripts of these names, joined in order."""
    return "\n".join(read(name) for name in names)


def read(name: str) -> str:
    """Return a file of the page."""
    return (_FILES / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
