"""`repl-rl runs`: every folder is listed as what it is, with its figures and what it takes of the disk."""

import json
import os
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.errors import ConfigError
from repl_rl.runs.list_runs import RunStatus, compute_disk_bytes, list_runs, read_run_info
from repl_rl.utils.file_lock import lock_folder
from tests.support.run_folders import HOSTILE, run_folder

CONFIG = 'model = "builtin:quickstart"\nengine = "vllm"\nname = "mine"\n\n[trainer]\nsteps = 9\n'


def begun(path: Path, **summary: object) -> Path:
    """A run that has two rows and, if anything is said, a summary."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(CONFIG)
    (path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "so')
    if summary:
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def only(found: object) -> dict[str, object]:
    assert isinstance(found, list)
    (row,) = found
    assert isinstance(row, dict)
    return row


@pytest.mark.parametrize(
    ("summary", "status", "why"),
    [
        ({"status": "finished", "steps": 2}, RunStatus.FINISHED, ""),
        ({"status": "interrupted", "error": "Terminated: 15"}, RunStatus.INTERRUPTED, "Terminated: 15"),
        ({"status": "failed", "error": "EngineDied: it is gone"}, RunStatus.FAILED, "EngineDied: it is gone"),
        ({}, RunStatus.KILLED, ""),
    ],
)
def test_a_run_is_listed_by_how_it_ended(
    tmp_path: Path, summary: dict[str, object], status: RunStatus, why: str
) -> None:
    run = read_run_info(begun(tmp_path / "run", **summary))
    assert (run.status, run.reason, run.step, run.steps) == (status, why, 2, summary.get("steps", 9))
    assert run.is_resumable is (status is not RunStatus.FINISHED)


def test_a_run_that_a_process_is_at_work_on_is_running_whatever_its_summary_says(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", status="interrupted")
    with lock_folder(run):
        assert read_run_info(run).status is RunStatus.RUNNING
    assert read_run_info(run).status is RunStatus.INTERRUPTED


def test_who_looks_at_a_run_is_never_taken_for_who_works_on_it(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    reader = os.open(run, os.O_RDONLY)
    with lock_folder(run):
        pass
    os.close(reader)
    with lock_folder(run), pytest.raises(BlockingIOError), lock_folder(run):
        pass


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("summary.json", b'{"status": "fin', "summary.json' cannot be read"),
        ("summary.json", b"\xff\xfe", "summary.json' cannot be read"),
        ("summary.json", b"[" * 100_000, "summary.json' cannot be read"),
        ("summary.json", b"[]", "it holds no object"),
        ("config.toml", b"= nothing", "config.toml' cannot be read"),
    ],
)
def test_a_broken_folder_is_told_as_such_and_stops_no_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, told: str
) -> None:
    broken = begun(tmp_path / "broken")
    (broken / name).write_bytes(content)
    begun(tmp_path / "sound", status="finished")
    found = {run.path.name: run for run in list_runs(tmp_path)}
    assert (found["broken"].status, found["sound"].status) == (RunStatus.UNREADABLE, RunStatus.FINISHED)
    assert told in found["broken"].reason
    assert main(["runs", str(tmp_path)]) == 0
    assert "broken" in capsys.readouterr().out
    assert main(["view", str(broken), "--no-open"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "broken" in error


def test_a_run_of_a_status_that_nobody_knows_is_broken(tmp_path: Path) -> None:
    run = read_run_info(begun(tmp_path / "run", status="odd"))
    assert (run.status, "the unknown status 'odd'" in run.reason) == (RunStatus.UNREADABLE, True)


def test_what_no_training_made_is_listed_as_no_run_and_hidden_folders_and_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / ".models").mkdir()
    (tmp_path / "file").write_text("")
    evaluation = tmp_path / "before"
    evaluation.mkdir()
    (evaluation / "config.toml").write_text('tasks = "builtin:quickstart"\n')
    assert {run.path.name: run.status for run in list_runs(tmp_path)} == {"notes": "no run", "before": "no run"}


def test_figures_that_are_no_numbers_and_rows_that_are_none_hurt_nobody(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", status="finished", steps="many", solve_rate_last="high", stopped_at_step=None)
    (run / "metrics.jsonl").write_bytes(b'nonsense\n[1]\n{"step": "two"}\n\xff\xfe\n')
    found = read_run_info(run)
    assert (found.step, found.steps, found.get_number("solve_rate_last")) == (1, None, None)


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1" + "0" * 400, "1e400", "1" + "0" * 5000])
def test_a_number_that_is_too_large_hides_no_other_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: str
) -> None:
    large = begun(tmp_path / "large", status="finished")
    names = ("wall_s", "solve_rate_first", "steps", "stopped_at_step")
    figures = "".join(f', "{name}": {number}' for name in names)
    (large / "summary.json").write_text(f'{{"status": "finished"{figures}}}')
    with (large / "metrics.jsonl").open("w") as file:
        file.write(f'{{"step": {number}}}\n')
    begun(tmp_path / "sound", status="finished")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["large"]["wall_s"] is None
    assert main(["runs", str(tmp_path)]) == 0
    assert "sound" in capsys.readouterr().out


def test_json_has_every_figure_of_every_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"solve_rate_first": 0.1, "solve_rate_last": float("nan"), "wall_s": 12.5, "engine": "vllm"}
    run = begun(tmp_path / "runs" / "one", status="finished", steps=2, **figures)
    assert main(["runs", str(tmp_path / "runs"), "--json"]) == 0
    row = only(json.loads(capsys.readouterr().out))
    assert row | {"disk_bytes": 0, "changed": ""} == {
        "name": "one", "path": str(run), "status": "finished", "why": "", "step": 2, "steps": 2, "model": None,
        "engine": "vllm", "sandbox": None, "solve_rate_first": 0.1, "solve_rate_last": None, "greedy_first": None,
        "greedy_last": None, "line_error_rate_first": None, "line_error_rate_last": None, "wall_s": 12.5,
        "disk_bytes": 0, "changed": "",
    }  # fmt: skip
    assert row["disk_bytes"] == compute_disk_bytes(run)
    assert str(row["changed"]).endswith("+00:00")


def test_the_table_has_status_figures_and_disk_use_and_nothing_that_steers_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    begun(tmp_path / "one", status="finished", steps=2, solve_rate_first=0.212, solve_rate_last=0.921, wall_s=213.0)
    begun(tmp_path / "[b]two\x1b[2J", status="failed", error=HOSTILE)
    assert main(["runs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("finished", "2/2", "21.2%", "92.1%", "3.5 min", "kB", "[b]two", "failed"))
    assert not {"\x1b", "\x00", "\u202e"} & set(shown)
    assert "2 folders, " in shown


def test_the_newest_run_comes_first(tmp_path: Path) -> None:
    for name, at in (("old", 1_000), ("new", 2_000)):
        run = begun(tmp_path / name)
        for place in (*run.iterdir(), run):
            os.utime(place, (at, at))
    assert [run.path.name for run in list_runs(tmp_path)] == ["new", "old"]


def test_disk_use_counts_a_file_of_two_names_once_and_follows_no_link(tmp_path: Path) -> None:
    folder, far = tmp_path / "run", tmp_path / "far"
    (folder / "states").mkdir(parents=True)
    empty = compute_disk_bytes(folder)
    (folder / "weights").write_bytes(os.urandom(100_000))
    os.link(folder / "weights", folder / "states" / "weights")
    far.write_bytes(os.urandom(1_000_000))
    (folder / "link").symlink_to(far)
    assert 100_000 <= compute_disk_bytes(folder) - empty < 130_000


def test_a_folder_of_runs_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="folder of runs is"):
        list_runs(tmp_path / "none")
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert "--out folder of train" in capsys.readouterr().err
    assert main(["runs", str(tmp_path)]) == 0
    assert "`repl-rl train` makes one" in " ".join(capsys.readouterr().out.split())


def test_a_run_folder_of_a_training_is_listed_with_its_model(tmp_path: Path) -> None:
    run = read_run_info(run_folder(tmp_path / "run"))
    assert (run.status, run.step, run.get_number("solve_rate_last")) == (RunStatus.FINISHED, 3, 0.9)
