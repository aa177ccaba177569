"""`repl-rl runs compare A B`: two runs in one page that needs nothing but itself."""

import json
import re
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.cli.runs import find_setting_differences
from repl_rl.runs.report import build_comparison
from tests.support.reports import data_of, pick
from tests.support.run_folders import HOSTILE, run_folder

FIRST = 'model = "a"\nname = "one"\nengine = "vllm"\n[trainer]\nsteps = 3\nreport_to = ["trackio"]\n'
SECOND = 'model = "a"\nname = "two"\nprompt = "b"\n[trainer]\nsteps = 4\nreport_to = []\n'


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    one, two = run_folder(tmp_path / "one"), run_folder(tmp_path / "two", steps=4)
    (one / "config.toml").write_text(FIRST)
    (two / "config.toml").write_text(SECOND)
    return one, two


def test_the_page_has_the_settings_that_differ_the_figures_and_the_rows_of_both(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = runs
    assert main(["runs", "compare", str(one), str(two), "--no-open"]) == 0
    file = one.parent / "compare-one-two.html"
    assert capsys.readouterr().out.splitlines()[-1] == file.as_uri()
    data = data_of(file.read_text())
    assert data["name"] == "one and two"
    assert [pick(data, "runs", n, "name") for n in (0, 1)] == ["one", "two"]
    assert pick(data, "runs", 1, "summary", "solve_rate_last") == 0.9
    assert [pick(data, "runs", n, "metrics", "step") for n in (0, 1)] == [[1, 2, 3], [1, 2, 3, 4]]
    assert data["settings"] == [
        ["engine", '"vllm"', "not said"],
        ["prompt", "not said", '"b"'],
        ["trainer.report_to", '["trackio"]', "[]"],
        ["trainer.steps", "3", "4"],
    ]


def test_the_terminal_shows_the_same_in_a_table(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["runs", "compare", *map(str, runs), "--no-open", "--out", str(runs[0] / "page.html")]) == 0
    shown = capsys.readouterr().out
    assert (runs[0] / "page.html").is_file()
    assert re.search(r"solved after +│ 90\.0% +│ 90\.0%", shown)
    assert re.search(r"trainer\.steps +│ 3 +│ 4", shown)


def test_nothing_that_a_run_holds_is_markup_or_steers_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = run_folder(tmp_path / "<script>alert(1)<"), run_folder(tmp_path / "two")
    (one / "config.toml").write_text(f"prompt = {json.dumps(HOSTILE)}\n[trainer]\n")
    (one / "summary.json").write_text(json.dumps({"status": "finished", "engine": HOSTILE}))
    (one / "metrics.jsonl").write_text(json.dumps({"step": 1, HOSTILE: 1.0}) + "\n")
    assert main(["runs", "compare", str(one), str(two), "--no-open", "--out", str(tmp_path / "page.html")]) == 0
    html = (tmp_path / "page.html").read_text()
    assert "window.hacked" not in html
    assert "alert(1)" not in html.replace("&lt;script&gt;alert(1)&lt;", "")
    assert html.count("<script") == 2
    assert "window.hacked" in str(pick(data_of(html), "settings"))
    assert "default-src 'none'" in html
    assert not {"\x1b", "\x00", "\u202e"} & set(capsys.readouterr().out)


def test_runs_of_one_name_are_told_by_their_paths(tmp_path: Path) -> None:
    one, two = run_folder(tmp_path / "a" / "run"), run_folder(tmp_path / "b" / "run")
    assert [pick(build_comparison(one, two, []), "runs", n, "name") for n in (0, 1)] == [str(one), str(two)]


def test_what_is_no_run_is_refused_and_nothing_is_written(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = runs
    (tmp_path / "empty").mkdir()
    (two / "summary.json").write_text('{"status"')
    before = sorted(tmp_path.rglob("*"))
    for other, told in ((tmp_path / "empty", "no run folder"), (tmp_path / "none", "no run folder"), (one, "name two"),
                        (two, "cannot be read")):  # fmt: skip
        assert main(["runs", "compare", str(one), str(other), "--no-open"]) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert told in error
    assert sorted(tmp_path.rglob("*")) == before
    tmp_path.rename(tmp_path.with_name("runs"))
    monkeypatch.chdir(tmp_path.parent)
    assert main(["runs", "compare", "one", "runs/two"]) == 2
    assert "did you mean 'runs/one'" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_told_with_a_remedy(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "compare", *map(str, runs), "--no-open", "--out", "/dev/null/page.html"]) == 2
    assert "choose another --out" in capsys.readouterr().err


def test_equal_settings_differ_in_nothing_but_name_and_place(runs: tuple[Path, Path]) -> None:
    one, two = runs
    (two / "config.toml").write_text(FIRST.replace('"one"', '"two"') + "")
    assert find_setting_differences(one, two) == []
