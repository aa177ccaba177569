"""HTML documents of the report: markup, style and scripts from `page/`, with the packed data.

There are three pages: the report of a run, the player of single trajectories, and the comparison of two runs. The
comparison shows different settings, results, and curves in one chart.
"""

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from repl_rl.runs.report.report_data import build_metric_columns, build_payload, pack_json
from repl_rl.runs.run_metadata import read_summary, validate_run_folder
from repl_rl.utils.atomic_files import Json, write_text_atomically

_FILES = Path(__file__).parent / "page"
PLAYER_SCRIPTS = ("dom.js", "heat.js", "trajectory.js", "diff.js", "rows.js")
"""Scripts that the notebook player shares with the page, in order."""
PAGE_SCRIPTS = (*PLAYER_SCRIPTS, "chart.js", "curves.js", "browser.js", "theme.js", "main.js")
COMPARISON_SCRIPTS = ("dom.js", "rows.js", "chart.js", "curves.js", "theme.js", "compare.js")
SettingDifferences = Sequence[tuple[str, str, str]]
"""Rows of (name of a setting, value in the first run, value in the second run)."""

_TITLE_END = " · repl_rl</title>".encode()
"""End of the title of every page."""
_HEAD_BYTES = 8192
"""Beginning of a file in which a page of ours has its title, bytes."""
_START_PLAYER = """
unpacked(document.getElementById("data").textContent).then((data) => {
  const page = document.getElementById("page");
  page.replaceChildren();
  player(page, data, null);
  document.body.dataset.ready = "yes";
});
"""


def write_report(run: Path) -> Path:
    """Write `run/report.html` atomically and return its path.

    Raises:
        StoreError: `run` is not a run folder, or one of its records has an unknown version.
    """
    path = run / "report.html"
    write_text_atomically(path, render_page(build_payload(run)))
    return path


def render_page(data: Mapping[str, Json], follow: bool = False) -> str:
    """Return one HTML document that loads nothing from a network. With `follow` it polls its own server for updates.

    Data is packed, so nothing in it is markup. A content security policy allows only this style and these scripts, by
    their hashes. Text that is parsed as markup by mistake would not run.
    """
    return _render_document(str(data.get("name", "run")), data, read_scripts(PAGE_SCRIPTS), follow)


def is_report_page(file: Path) -> bool:
    """Return True if the file begins like a page of ours."""
    try:
        with file.open("rb") as stream:
            return _TITLE_END in stream.read(_HEAD_BYTES)
    except OSError:
        return False


def render_player_page(data: Mapping[str, Json]) -> str:
    """Return the player of `build_entries_payload` as one HTML document, for viewers without a kernel."""
    script = f"{read_scripts((*PLAYER_SCRIPTS, 'player.js'))}\n(() => {{{_START_PLAYER}}})();"
    return _render_document("trajectories", data, script, False)


def write_comparison(first_run: Path, second_run: Path, settings: SettingDifferences, file: Path) -> None:
    """Write the page to `file` atomically.

    Raises:
        StoreError: one of them is not a run folder, or one of its files cannot be read.
        OSError: it cannot be written.
    """
    write_text_atomically(file, render_comparison_page(build_comparison(first_run, second_run, settings)))


def build_comparison(first_run: Path, second_run: Path, settings: SettingDifferences) -> dict[str, Json]:
    """Return the data of the page.

    Raises:
        StoreError: one of them is not a run folder, or one of its files cannot be read.
    """
    names = make_distinct_names(first_run, second_run)
    runs: list[Json] = [_describe_run(run, name) for run, name in zip((first_run, second_run), names, strict=True)]
    return {"name": " and ".join(names), "runs": runs, "settings": [list(row) for row in settings]}


def render_comparison_page(data: Mapping[str, Json]) -> str:
    """Return the comparison of two runs as one HTML document; `data` comes from `build_comparison`."""
    return _render_document(str(data["name"]), data, read_scripts(COMPARISON_SCRIPTS), False)


def make_distinct_names(first_run: Path, second_run: Path) -> tuple[str, str]:
    """Return the names of two runs, or their whole paths if the names are equal."""
    first, second = first_run.resolve(), second_run.resolve()
    return (first.name, second.name) if first.name != second.name else (str(first), str(second))


def _describe_run(run: Path, name: str) -> Mapping[str, Json]:
    validate_run_folder(run)
    return {"name": name, "summary": read_summary(run) or {}, "metrics": build_metric_columns(run)}


def read_scripts(names: tuple[str, ...]) -> str:
    """Return the JavaScript files of these names, joined in order."""
    return "\n".join(read_page_file(name) for name in names)


def read_page_file(name: str) -> str:
    """Return a file of the page."""
    return (_FILES / name).read_text(encoding="utf-8")


def _render_document(title: str, data: Mapping[str, Json], script: str, follow: bool) -> str:
    """Fill the placeholders of `page.html`."""
    style = read_page_file("page.css")
    # The hashes allow exactly this style and this script.
    hashes = f"style-src {_compute_csp_hash(style)}; script-src {_compute_csp_hash(script)}"
    policy = f"default-src 'none'; {hashes}; img-src data:"
    policy += "; connect-src 'self'" if follow else ""
    values = {
        "policy": policy + "; base-uri 'none'; form-action 'none'",
        "title": html.escape(title),
        "style": style,
        "script": script,
        "data": pack_json(data),
        "follow": "yes" if follow else "no",
    }
    # Placeholders look like {{name}}; inserted text is not searched for further ones.
    head, *pieces = read_page_file("page.html").split("{{")
    return head + "".join(values[piece.partition("}}")[0]] + piece.partition("}}")[2] for piece in pieces)


def _compute_csp_hash(text: str) -> str:
    """Return the hash of a style or script, as a content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
