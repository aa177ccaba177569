"""Processes that Ray Train starts learn from a fleet on their own cluster."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.trainer.test_launched import SMALL, TORCHRUN
from tests.support.documents import PAGES, ROOT

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name leaves room for those of Ray's sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_the_script_of_the_page_trains_in_two_processes_of_ray_train(tmp_path: Path, short: Path) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGES["docs/scaling.md"], re.DOTALL)
    small = source.replace("RolloutConfig()", 'RolloutConfig(engine="transformers", sandbox="unsafe", concurrency=2)')
    small = small.replace("steps=100", "steps=2, prompts_per_step=3, group_size=2").replace("/shared", str(tmp_path))
    small = small.replace("num_workers=4, use_gpu=True", "num_workers=2")
    (tmp_path / "learn.py").write_text(small)
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_TMPDIR": str(short),
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "learn.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads((tmp_path / "wide" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    assert sum(node["groups"] for node in summary["fleet"]["nodes"]) == 6


def test_the_launchers_command_of_the_page_trains_on_two_nodes(tmp_path: Path) -> None:
    (line,) = re.findall(r"^torchrun (.*--workers.max-workers) \d+$", PAGES["docs/scaling.md"], re.MULTILINE)
    words = line.partition(" -m ")[2].split()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *TORCHRUN, "-m", *words, "2", *SMALL, "--trainer.steps", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads((tmp_path / "runs" / "wide" / "summary.json").read_text())
    assert (summary["status"], summary["processes"], len(summary["fleet"]["nodes"])) == ("finished", 2, 2)
