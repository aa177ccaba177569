"""Our console as a kernel of real JupyterLab: cells are run by keyboard, interrupted, and run all at once."""

import json
from pathlib import Path

import pytest

from repl_rl.sandbox import jupyter_kernelspec as kernelspec
from tests.e2e.test_jupyterlab import jupyter
from tests.support.chromium import SHIFT, Tab, chromium

pytestmark = pytest.mark.heavy

CELLS = (
    "x = 6\nfor i in range(2):\n    i\nx * 7",
    "import sys; from IPython.display import HTML, display\n"
    "print('oops', file=sys.stderr); display(HTML('<b id=\"shown\">rich</b>'))",
    "import time\nprint('begun')\nwhile True: time.sleep(0.01)",
    "input('name? ')",
    "1/0",
    "print('never')",
)
NOTEBOOK = "jupyterapp.shell.currentWidget"


def written(folder: Path) -> None:
    cells: list[dict[str, object]] = [
        {"cell_type": "code", "id": str(n), "execution_count": None, "metadata": {}, "outputs": [], "source": source}
        for n, source in enumerate(CELLS)
    ]
    kernel = {"name": kernelspec.NAME, "display_name": "Python console (repl-rl)", "language": "python"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "play.ipynb").write_text(json.dumps(notebook))


def output(cell: int, kind: str = "") -> str:
    """The text of a cell's outputs, as an expression of the page. `kind`: of one MIME type only."""
    selector = ".jp-OutputArea-output" + (f"[data-mime-type='{kind}']" if kind else "")
    found = f"[...document.querySelectorAll('.jp-Notebook .jp-Cell')[{cell}].querySelectorAll({json.dumps(selector)})]"
    return f"{found}.map(e => e.innerText).join('|')"


def shows(cell: int, words: str, kind: str = "") -> str:
    return f"{output(cell, kind)}.includes({json.dumps(words)})"


def test_in_jupyterlab_cells_run_are_interrupted_ask_and_stop_at_an_error(tmp_path: Path) -> None:
    written(tmp_path)
    kernelspec.install_kernelspec(tmp_path / ".data")
    with jupyter(tmp_path, "jupyterlab") as address, chromium(offline=False) as tab:
        tab.open(address)
        tab.wait("globalThis.jupyterapp?.shell.currentWidget?.sessionContext", 90)
        tab.run(f"jupyterapp.restored.then(() => {NOTEBOOK}.sessionContext.ready).then(String)")
        tab.wait(f"{NOTEBOOK}.sessionContext.session?.kernel?.status === 'idle'", 90)
        tab.mouse("document.querySelector('.jp-Notebook .jp-Cell .cm-content')")
        tab.press("Enter", SHIFT)
        tab.wait(shows(0, "42", "text/plain"))
        assert tab.run(shows(0, "0\n1\n", "application/vnd.jupyter.stdout"))
        tab.press("Enter", SHIFT)
        tab.wait("document.querySelector('.jp-OutputArea-output #shown')")
        assert tab.run(shows(1, "oops", "application/vnd.jupyter.stderr"))
        interrupted(tab)
        asked(tab)
        run_all_stops(tab)
        tab.run(f"{NOTEBOOK}.context.save().then(String)")
    cells = json.loads((tmp_path / "play.ipynb").read_text())["cells"]
    assert [output["output_type"] for output in cells[4]["outputs"]] == ["error"]
    assert (cells[5]["execution_count"], cells[5]["outputs"]) == (None, [])


def interrupted(tab: Tab) -> None:
    tab.press("Enter", SHIFT)
    tab.wait(shows(2, "begun"))
    tab.run("jupyterapp.commands.execute('notebook:interrupt-kernel').then(String)")
    tab.wait(shows(2, "KeyboardInterrupt"))


def asked(tab: Tab) -> None:
    tab.press("Enter", SHIFT)
    tab.wait("document.querySelector('.jp-Stdin-input')")
    tab.mouse("document.querySelector('.jp-Stdin-input')")
    for key in "ada":
        tab.press(key)
    tab.press("Enter")
    tab.wait(shows(3, "'ada'", "text/plain"))


def run_all_stops(tab: Tab) -> None:
    """From the error on: what waits behind it is not run."""
    tab.run(f"{NOTEBOOK}.content.activeCellIndex = 4")
    tab.run("jupyterapp.commands.execute('notebook:run-all-below').then(String)")
    tab.wait(shows(4, "ZeroDivisionError: division by zero"))
    tab.wait(f"{NOTEBOOK}.sessionContext.session.kernel.status === 'idle'")
