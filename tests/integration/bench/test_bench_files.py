"""`bench` replaces figures and logs that it wrote, and no other file."""

import json
from pathlib import Path

import pytest

from benchmarks.cli import WHAT, is_benchmark_file
from benchmarks.faults.fault_injection import is_log, log_file
from repl_rl.cli import main

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
PUBLISHED = {
    "sandbox": "sandbox.json", "update": "update.json", "rollout": "rollouts.json", "credit": "credit.json",
    "fleet": "scaling.json", "serve": "serve.json",
}  # fmt: skip
"""Figures as a benchmark wrote them; `faults` has none, but in a page."""


@pytest.mark.parametrize("what", PUBLISHED)
def test_figures_of_a_release_are_recognised_by_their_benchmark_and_by_no_other(what: str) -> None:
    file = RESULTS / PUBLISHED[what]
    assert [one for one in WHAT if is_benchmark_file(one, file)] == [what]


def test_figures_of_faults_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "faults").write_text(json.dumps({"seed": 3, "steps": 6, "faults": {}}))
    assert [one for one in WHAT if is_benchmark_file(one, tmp_path / "faults")] == ["faults"]


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize(
    "content", ['{"name": "my-package", "version": "1.0"}', "[]", "[1, 2]", "{}", "[" * 9999, "\0"]
)
def test_figures_take_the_place_of_no_other_file(
    tmp_path: Path, what: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "package.json"
    file.write_text(content)
    assert main(["bench", what, "--json", str(file)]) == 2
    assert "another file is there, which is not replaced" in capsys.readouterr().err
    assert file.read_text() == content


def test_figures_do_not_take_the_place_of_another_benchmarks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    file.write_bytes((RESULTS / PUBLISHED["sandbox"]).read_bytes())
    assert main(["bench", "update", "--json", str(file)]) == 2
    assert "another file is there" in capsys.readouterr().err


def test_a_log_of_a_users_is_not_replaced_and_nothing_is_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = log_file(tmp_path, "torn-state")
    log.write_text("what I wrote about it")
    assert main(["bench", "faults", "--faults", "sigkill", "torn-state", "--out", str(tmp_path)]) == 2
    assert f"log of a run is '{log}'; another file is there" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["torn-state.log"]
    assert log.read_text() == "what I wrote about it"
    assert not is_log(tmp_path)
