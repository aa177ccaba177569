"""An exported notebook is valid for Jupyter."""

import json
from pathlib import Path

import nbformat

from repl_rl.credit.credited_trajectory import CreditedTrajectory, LineCredit
from repl_rl.runs.store.export_formats import write_notebook
from tests.unit.test_store import full


def test_a_notebook_has_the_format_of_jupyter(tmp_path: Path) -> None:
    path = tmp_path / "one.ipynb"
    write_notebook(CreditedTrajectory(full(), (LineCredit(-0.1, 0.7, (-0.1, -0.2)),)), path)
    nbformat.validate(json.loads(path.read_text()))
