"""`repl-rl doctor --gpu`: every check runs on a CPU too, through the same code, and a check that hangs is ended."""

import ast
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu_page as page
from repl_rl.cli import main
from repl_rl.cli.doctor import format_figures, run_checks_on, select_checks
from repl_rl.doctor_gpu import BUDGET_S, CHECKS, CHILD, Check, Row, Verdict, run_checks
from repl_rl.errors import ConfigError
from tests.support import documents
from tests.support.processes import wait_for

ROOT = Path(__file__).parents[3]
WITHOUT = {
    "vLLM asleep and awake": "a CPU has no separate memory that a sleeping vLLM could free",
    "running states, vllm": "vLLM loses running states on a CPU when several rollouts run at the same time",
    "rows laid end to end (FlashAttention)": "FlashAttention is not here; on a GPU: pip install flash-attn",
}
"""What a CPU has not, and what is said of it."""


SHORTER = {
    "20 steps of the quickstart": {"steps": 2, "prompts": 2},
    "an update, with shared prefixes and without": {"hidden": 128, "layers": 2, "repeats": 1},
}
"""What is shorter on a CPU, where it takes minutes and shows no more."""


def toy(name: str, limit_s: float = 60.0, **options: str | int) -> Check:
    return Check(name, f"tests.support.bench.gpu_checks:{name}", options, limit_s)


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
    told: list[str] = []
    checks = [toy("hanging", 8.0, told=str(pids)), toy("passing")]
    hung, after = run_checks("cpu", checks, lambda rows: told.append(rows[-1].name))
    assert hung.verdict is Verdict.FAILED
    assert hung.why.startswith("it was not done after 8 s and was ended")
    assert hung.seconds < 30
    wait_for(lambda: not any(map(alive, map(int, pids.read_text().split()))), None)
    assert after.verdict is Verdict.PASSED
    assert told == ["hanging", "passing"]


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
        for node in ast.parse((ROOT / "repl_rl" / "doctor_gpu" / "checks.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        assert bool(check.unbuilt) != bool(check.function)
        assert check.unbuilt or check.function.removeprefix("repl_rl.doctor_gpu.checks:") in functions


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
    assert run_checks_on("cpu", [toy("passing"), toy("missing")], file) == 0
    assert "not run" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["device"] == "cpu"
    assert [(row["name"], row["verdict"]) for row in found["rows"]] == [("passing", "passed"), ("missing", "not run")]
    assert run_checks_on("cpu", [toy("passing"), toy("failing")], None) == 1
    assert format_figures({"gap": 0.00012345, "rows": 8}) == "gap 0.000123, rows 8"


def test_of_one_that_failed_the_file_has_the_end_of_what_its_process_said(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    assert run_checks_on("cpu", [toy("passing"), toy("dying"), toy("failing")], file) == 1
    passed, died, failed = json.loads(file.read_text())["rows"]
    assert (passed["log"], died["log"].strip()) == ("", "its last words")
    assert "Traceback" in failed["log"]


def test_the_file_is_whole_after_each_check(tmp_path: Path) -> None:
    """A machine with a GPU may be taken away before the last one."""
    file = tmp_path / "gpu.json"
    seen = toy("counting", told=str(file))
    assert run_checks_on("cpu", [toy("passing"), toy("missing"), seen], file) == 0
    assert json.loads(file.read_text())["rows"][-1]["figures"] == {"rows": ["passing", "missing"]}


def test_some_checks_are_tried_alone_and_the_rows_of_the_others_stay(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    everything = [toy("passing"), toy("failing"), toy("missing")]
    assert select_checks(everything, ["fail", "miss"]) == everything[1:]
    assert select_checks(everything, []) == everything
    with pytest.raises(
        ConfigError, match=r"only is 'nothing'; no check has it in its name; they are: passing; failing"
    ):
        select_checks(everything, ["pass", "nothing"])
    assert run_checks_on("cpu", everything, file) == 1
    before = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert run_checks_on("cpu", [replace(toy("passing"), name="failing")], file) == 0
    after = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert after["failing"]["verdict"] == "passed"
    assert {**after, "failing": None} == {**before, "failing": None}


@pytest.mark.parametrize(("text", "said"), [
    ("{", "it is not what this command writes"),
    ('{"device": "cuda:0", "rows": [{"name": "x"}]}', "its rows are of cuda:0, these would be of cpu"),
])  # fmt: skip
def test_a_file_of_something_else_is_left_as_it_is(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        run_checks_on("cpu", [toy("dying")], file)
    assert file.read_text() == text


def test_a_check_whose_doctor_is_gone_before_its_turn_does_nothing(tmp_path: Path) -> None:
    """The next ones are started early, and wait."""
    command = [sys.executable, "-m", CHILD, "tests.support.bench.gpu_checks:passing", "cpu", "{}", str(tmp_path)]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--only vllm", "only is 'vllm'; it chooses among the checks of --gpu; add that"),
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
        run_checks_on("cpu", [toy("dying")], tmp_path / "nowhere" / "gpu.json")


def test_the_page_shows_what_was_published_or_that_nothing_was() -> None:
    found = json.loads(page.FIGURES.read_text()) if page.FIGURES.exists() else None
    assert page.PAGE.text == page.block(found)
    assert page.SUMMARY.text == page.summary(found)


def test_without_published_figures_the_page_says_that_no_gpu_has_run_them() -> None:
    assert page.block(None) == page.summary(None)
    assert page.block(None).startswith("Not yet run on a GPU")
    rows = [{"name": "a", "verdict": "passed", "why": "", "figures": {"gpu": "X", "gap": 0.5}, "seconds": 7.4}]
    text = page.block({"device": "cuda:0", "rows": [{**row, "made": "2027-01-02T03:04:05+00:00"} for row in rows]})
    assert "Not yet" not in text
    assert "| a | passed | gpu X, gap 0.5 | 7 |" in text
    assert "2027-01-02" in text
    assert "| 20 steps of the quickstart | not run | not tried there | |" in text
    assert "| one model on two GPUs | not run | not built" in text


def test_what_is_published_has_nothing_of_what_processes_said() -> None:
    found = {"device": "cuda:0", "rows": [{"name": "a", "verdict": "failed", "log": "/home/me"}]}
    assert page.published(found) == {"device": "cuda:0", "rows": [{"name": "a", "verdict": "failed"}]}
    assert page.FIGURES.exists()
    assert all("log" not in row for row in json.loads(page.FIGURES.read_text())["rows"])


def test_no_figure_of_a_check_stands_outside_of_the_generated_block() -> None:
    assert not re.search(r"\b(passed|failed) \|", page.PAGE.around + page.SUMMARY.around)
    assert "repl-rl doctor --gpu --json gpu.json" in documents.commands()
