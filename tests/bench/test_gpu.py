"""`repl-rl doctor --gpu`: every check runs on a CPU too, through the same code, and a check that hangs is ended."""

import ast
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu as page
from repl_rl.cli import main
from repl_rl.cli.gpu import told, try_on
from repl_rl.errors import ConfigError
from repl_rl.lab.gpu import BUDGET_S, CHECKS, Check, Row, Verdict, run_checks
from tests import documents
from tests.processes import wait_for

ROOT = Path(__file__).parent.parent.parent
WITHOUT = {
    "vLLM asleep and awake": "a CPU has no memory of its own that a sleeping vLLM could leave to others",
    "rows laid end to end (FlashAttention)": "FlashAttention is not here; on a GPU: pip install flash-attn",
}
"""What a CPU has not, and what is said of it."""


SHORTER = {"20 steps of the quickstart": {"steps": 2, "prompts": 2}}
"""What is shorter on a CPU, where it takes minutes and shows no more."""


def toy(name: str, limit_s: float = 60.0, **options: str | int) -> Check:
    return Check(name, f"tests.bench.gpu_toys:{name}", options, limit_s)


def tried(check: Check, device: str = "cpu") -> Row:
    (row,) = run_checks(device, [check], lambda _: None)
    return row


def alive(pid: int) -> bool:
    try:
        return (Path(f"/proc/{pid}/stat")).read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_check_is_given_its_device_its_options_and_an_empty_folder() -> None:
    row = tried(toy("passing", more=3))
    assert (row.verdict, row.why) == (Verdict.PASSED, "")
    assert row.figures == {"device": "cpu", "seen": "", "more": 3, "empty": True}


def test_a_check_on_a_gpu_sees_that_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert tried(toy("passing"), "cuda:1").figures["seen"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    row = tried(toy("passing"), "cuda:1")
    assert (row.figures["seen"], row.figures["device"]) == ("7", "cuda")


@pytest.mark.parametrize(
    ("name", "verdict", "why"),
    [
        ("failing", Verdict.FAILED, "AssertionError: two log probabilities are apart"),
        ("missing", Verdict.NOT_RUN, "a part is not here; install it"),
        ("dying", Verdict.FAILED, "its process ended with 3; its last line: its last words"),
    ],
)
def test_how_a_check_ended_is_told_in_a_line(name: str, verdict: Verdict, why: str) -> None:
    row = tried(toy(name))
    assert (row.verdict, row.why, row.figures) == (verdict, why, {})


def test_a_check_that_hangs_is_ended_with_its_processes_and_the_next_one_runs(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    lines: list[str] = []
    hung, after = run_checks("cpu", [toy("hanging", 8.0, told=str(pids)), toy("passing")], lines.append)
    assert hung.verdict is Verdict.FAILED
    assert hung.why.startswith("it was not done after 8 s and was ended")
    assert hung.seconds < 30
    wait_for(lambda: not any(map(alive, map(int, pids.read_text().split()))), None)
    assert after.verdict is Verdict.PASSED
    assert [line.partition(":")[0] for line in lines] == ["hanging", "passing"]


def test_what_a_check_leaves_behind_is_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    assert tried(toy("leaving", told=str(pid))).verdict is Verdict.PASSED
    wait_for(lambda: not alive(int(pid.read_text())), None)


def test_what_has_no_time_left_is_not_run_and_says_so() -> None:
    rows = run_checks("cpu", [toy("passing"), Check("x", "", unbuilt="not built: a reason")], lambda _: None, 0.0)
    assert [(row.verdict, row.why) for row in rows] == [
        (Verdict.NOT_RUN, "the 0 s for all checks were over"),
        (Verdict.NOT_RUN, "not built: a reason"),
    ]


def test_all_checks_together_end_within_a_quarter_of_an_hour() -> None:
    """A check has no more than what is left of the budget; what it takes to end one is not in it."""
    assert BUDGET_S <= 14.5 * 60
    assert all(0 < check.limit_s <= BUDGET_S for check in CHECKS)


def test_every_check_has_a_name_of_its_own_and_a_function_or_a_reason() -> None:
    functions = {
        node.name
        for node in ast.parse((ROOT / "repl_rl" / "lab" / "gpu_checks.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        assert bool(check.unbuilt) != bool(check.function)
        assert check.unbuilt or check.function.removeprefix("repl_rl.lab.gpu_checks:") in functions


@pytest.mark.heavy
@pytest.mark.parametrize("check", [check for check in CHECKS if check.function], ids=lambda check: check.name)
def test_every_check_runs_on_a_cpu_through_the_same_code(check: Check) -> None:
    shorter = {**check.options, **SHORTER.get(check.name, {})}
    row = tried(replace(check, options=shorter, limit_s=280.0))
    if check.name in WITHOUT:
        assert row.verdict is Verdict.NOT_RUN
        assert row.why.startswith(WITHOUT[check.name])
    else:
        assert (row.verdict, row.why) == (Verdict.PASSED, "")
        assert row.figures


def test_what_was_found_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    assert try_on("cpu", [toy("passing"), toy("missing")], file) == 0
    assert "not run" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["device"] == "cpu"
    assert [(row["name"], row["verdict"]) for row in found["rows"]] == [("passing", "passed"), ("missing", "not run")]
    assert try_on("cpu", [toy("passing"), toy("failing")], None) == 1
    assert told({"gap": 0.00012345, "rows": 8}) == "gap 0.000123, rows 8"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--json gpu.json", "json is 'gpu.json'; only what --gpu finds is written; add --gpu"),
        ("--gpu", "CUDA devices is 0; PyTorch sees none here; run this on a machine with one"),
    ],
)
def test_without_a_gpu_and_without_the_option_it_is_refused_in_a_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    if words == "--gpu" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["doctor", *shlex.split(words)]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert said in error


def test_a_file_where_there_is_no_folder_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        try_on("cpu", [toy("dying")], tmp_path / "nowhere" / "gpu.json")


def test_the_page_shows_what_was_published_or_that_nothing_was() -> None:
    found = json.loads(page.FIGURES.read_text()) if page.FIGURES.exists() else None
    assert page.PAGE.text == page.block(found)


def test_without_published_figures_the_page_says_that_no_gpu_has_run_them() -> None:
    assert page.block(None).startswith("Not yet run on a GPU")
    rows = [{"name": "a", "verdict": "passed", "why": "", "figures": {"gpu": "X", "gap": 0.5}, "seconds": 7.4}]
    text = page.block({"made": "2027-01-02T03:04:05+00:00", "device": "cuda:0", "rows": rows})
    assert "Not yet" not in text
    assert "| a | passed | gpu X, gap 0.5 | 7 |" in text
    assert "2027-01-02" in text


def test_no_figure_of_a_check_stands_outside_of_the_generated_block() -> None:
    assert not re.search(r"\b(passed|failed) \|", page.PAGE.around)
    assert "repl-rl doctor --gpu --json gpu.json" in documents.commands()
