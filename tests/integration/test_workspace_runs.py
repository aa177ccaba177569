"""Workspaces that real consoles and processes of judges are given."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.errors import ConfigError, SetupError
from repl_rl.judges import grade_answer
from repl_rl.rollout_config import RolloutConfig
from repl_rl.tasks import Task
from tests.unit.test_workspace_runs import TASK


def test_a_bad_workspace_is_refused_before_an_engine_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"id": f"t{n}", "question": f"{n}?", "answer": n, "workspace": {"lines": ["x = 1", "x / 0"]}} for n in range(9)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "--tasks", "tasks.jsonl", "--sandbox", "unsafe", "--out", "found"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "task t" in told
    assert "line 2 is 'x / 0'; it raises ZeroDivisionError: division by zero; correct the workspace" in told
    assert not (tmp_path / "found").exists()


def test_workspaces_that_can_be_made_are_tried_without_a_word() -> None:
    RolloutConfig(sandbox="unsafe").try_workspaces([TASK, TASK])
    RolloutConfig(sandbox="unsafe").try_workspaces([replace(TASK, workspace=None)])
    assert issubclass(SetupError, ConfigError)


def test_a_judge_of_the_user_sees_every_field_of_the_row() -> None:
    fields = {"level": 0.25, "when": Path("x")}
    assert grade_answer(Task("t", "?", "", "tests.support.user_judges:level", fields=fields), "any") == 0.25
