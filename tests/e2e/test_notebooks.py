"""The notebooks run from clean, and nothing of a run is kept in them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_is_a_notebook_for_each_use_and_none_keeps_outputs() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["01_quickstart", "02_replay", "03_custom_sampler", "04_line_credit"]
    for path in NOTEBOOKS:
        code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code), path.name


@pytest.mark.heavy
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_clean(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_text(path.read_text())
    program = Path(sys.executable).with_name("jupyter-execute")
    command = [str(program), str(copy), "--inplace", "--timeout=280", "--kernel_name=python3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-4000:]
    cells = json.loads(copy.read_text())["cells"]
    shown = [output for cell in cells for output in cell.get("outputs", [])]
    assert shown
    assert not [output for output in shown if output["output_type"] == "error"]
