"""The player in real JupyterLab and Notebook 7, worked by mouse and keyboard; and what is left without a kernel."""

import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.chromium import SHIFT, Tab, chromium

pytestmark = pytest.mark.heavy

CELL = """
from dataclasses import replace

from repl_rl import SyncRollouts, ScriptedEngine, TrajectoryPlayer, RolloutConfig
from tests.support.run_folders import HOSTILE, rollout

setup = RolloutConfig(engine="transformers", concurrency=4)
(task,) = setup.draw_tasks("train", 1)
source = SyncRollouts(setup.open_rollouts, {task.id: task}).__enter__()
world = source.rollouts
lines = ["x = 6\\n", "x * 6\\n", "submit_final_answer(x * 6)\\n"]
scripted = replace(world, engine=ScriptedEngine.from_text(lines, world.renderer.encode))
recorded = [*source.run(scripted.collect([task, task])), rollout(0, "hostile", 1, HOSTILE)]
player = TrajectoryPlayer(recorded, policy=source, tasks=[task])
player
"""


PROGRAMS = {"jupyterlab": ("LabApp", "/lab/tree/"), "notebook": ("JupyterNotebookApp", "/notebooks/")}
"""Python module of a Jupyter server -> its name in settings, and where it shows notebooks."""


@contextmanager
def jupyter(folder: Path, program: str) -> Iterator[str]:
    """A Jupyter server on the loopback interface, with the address of its notebook `play.ipynb`."""
    name, place = PROGRAMS[program]
    token = secrets.token_hex(8)
    flags = ["--ServerApp.port=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}"]
    flags += ["--ServerApp.open_browser=False", "--allow-root", f"--{name}.expose_app_in_browser=True"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for kind in ("CONFIG", "DATA", "RUNTIME"):
        environment[f"JUPYTER_{kind}_DIR"] = str(folder / f".{kind.lower()}")
    quiet = folder / ".config" / "lab" / "user-settings" / "@jupyterlab" / "apputils-extension"
    quiet.mkdir(parents=True)
    (quiet / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    command = [sys.executable, "-m", program, *flags]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            address = next(line.split()[-1] for line in process.stderr if "http://127.0.0.1:" in line)
            threading.Thread(target=process.stderr.read, daemon=True).start()  # or it would wait for a reader
            yield f"{address.rpartition('/')[0]}{place}play.ipynb?token={token}"
        finally:
            process.terminate()


INSIDE = "[...document.querySelectorAll('.jp-OutputArea-output *')].find(e => e.shadowRoot).shadowRoot"


def inside(selector: str) -> str:
    """An element of the player, as an expression of the page."""
    return f"{INSIDE}.querySelector({json.dumps(selector)})"


def shows(selector: str, text: str) -> str:
    return f"{inside(selector)}?.innerText.includes({json.dumps(text)})"


def write_line(tab: Tab, text: str, act: str) -> None:
    """Type a line key by key, as a person does, then press a button."""
    tab.mouse(inside(".live input[type=text]"))
    for key in text:
        tab.press(key)
    assert tab.run(f"{inside('.live input[type=text]')}.value") == text
    tab.mouse(inside(f"[data-act={act}]"))


def write_notebook(folder: Path, source: str) -> None:
    """The notebook `play.ipynb` with one cell."""
    cell: dict[str, object] = {
        "cell_type": "code",
        "id": "0",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": source,
    }
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    notebook = {"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "play.ipynb").write_text(json.dumps(notebook))


def run_notebook(tab: Tab, address: str) -> None:
    """Open it, wait for its kernel, run its cell by Shift+Enter, wait for the player."""
    tab.open(address)
    tab.wait("globalThis.jupyterapp?.shell.currentWidget?.sessionContext", 90)
    tab.run("jupyterapp.restored.then(() => jupyterapp.shell.currentWidget.sessionContext.ready).then(String)")
    tab.wait("jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'", 90)
    tab.mouse("document.querySelector('.jp-Notebook .jp-Cell .cm-content')")
    tab.press("Enter", SHIFT)
    tab.wait("[...document.querySelectorAll('.jp-OutputArea-output *')].some(e => e.shadowRoot)", 120)
    tab.wait(inside(".session"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_in_jupyter_lines_are_stepped_scrubbed_edited_run_and_branched_from(program: str, tmp_path: Path) -> None:
    write_notebook(tmp_path, CELL)
    with jupyter(tmp_path, program) as address, chromium(offline=False) as tab:
        run_notebook(tab, address)
        cells = tab.count(".jp-Notebook .jp-Cell")
        step_and_scrub(tab)
        edit_and_branch(tab)
        hostile_output_does_nothing(tab)
        # Keys that were typed into the player were no commands of JupyterLab.
        assert tab.count(".jp-Notebook .jp-Cell") == cells
        tab.run("jupyterapp.shell.currentWidget.context.save().then(String)")
    saved_page_shows_the_lines(tmp_path)


def step_and_scrub(tab: Tab) -> None:
    tab.mouse(inside("[data-act=first]"))
    tab.wait(shows(".place", "line 0 of 3"))
    tab.mouse(inside("[data-act=next]"))
    tab.wait(shows(".place", "line 1 of 3"))
    tab.mouse(inside("input[type=range]"), 0.33, 0.7, 1.0)
    tab.wait(shows(".place", "line 3 of 3"))
    tab.press("Home")
    tab.wait(shows(".place", "line 0 of 3"))
    tab.press("ArrowRight")
    tab.wait(shows(".place", "line 1 of 3"))
    assert tab.run(f"{INSIDE}.querySelectorAll('.row.line').length") == 1


def edit_and_branch(tab: Tab) -> None:
    write_line(tab, "x + 100", "type")
    tab.wait(shows(".console", "106"))
    tab.mouse(inside("[data-act=step]"))
    tab.wait(shows(".console", "36"))
    tab.mouse(inside("[data-act=first]"))
    write_line(tab, "x = 7", "edit")
    tab.wait(shows(".console", "x = 7"))
    tab.mouse(inside("[data-act=step]"))
    tab.wait(shows(".console", "42"))
    assert tab.run(shows(".console", "not as recorded: edit"))
    tab.mouse(inside("[data-act=branch]"))
    tab.wait(f"{inside('.worth, .note')}", 120)
    assert "mean outcome of 4 continuations: " in str(tab.run(f"{inside('.stage')}.innerText"))
    assert tab.run(f"{INSIDE}.querySelectorAll('.branch').length") == 4
    tab.run(f"{inside('.branch')}.open = true")
    assert tab.run(shows(".branch", ">>> x = 7"))


def hostile_output_does_nothing(tab: Tab) -> None:
    tab.mouse(inside("input[type=search]"))
    for key in "hostile":
        tab.press(key)
    tab.wait(shows(".session", "␛[2J␀U+202Eevil"))
    assert tab.run(f"{INSIDE}.querySelectorAll('.session .row.line').length") == 2
    assert tab.run("window.hacked === undefined")


def saved_page_shows_the_lines(folder: Path) -> None:
    """The notebook as it was saved, made a page, without kernel and network."""
    command = [sys.executable, "-m", "nbconvert", "--to=html", str(folder / "play.ipynb")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    with chromium() as tab:
        tab.open((folder / "play.html").as_uri())
        tab.wait("document.querySelector('iframe[srcdoc]')")
        shown = tab.framed()
    assert ">>> x = 6" in shown
    assert "36" in shown
    assert "run the next line" not in shown
