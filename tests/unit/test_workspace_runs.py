"""Rollouts whose consoles begin with a workspace: played, stored, shown, executed again, and gone on with."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from repl_rl.credit.credited_trajectory import CreditedTrajectory
from repl_rl.errors import SetupError, StoreError, UserCodeError
from repl_rl.rollout import Rollouts
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.replay import branch, get_branch_point, verify_all
from repl_rl.runs.report.report_data import build_detail
from repl_rl.runs.store import SCHEMA_VERSION, Store, from_record, to_record, write_step
from repl_rl.runs.store.export_formats import read_notebook, write_notebook
from repl_rl.sandbox import InProcessSandbox
from repl_rl.tasks import Task, Workspace
from repl_rl.trajectory.trajectory import Stop, Trajectory
from tests.support.scripted_rollouts import world

SETUP = Workspace({"rows": [[1, 10], [2, 32]]}, lines=("def total():", "    return sum(n for _, n in rows)"))
TASK = Task("sum", "What do the second columns add up to?", "42", workspace=SETUP, fields={"level": 2})
LINES = ("n = len(rows)\n", "rows\n", "t = total()\n", "print(t)\n", "submit_final_answer(t)\n")


def played(count: int = 4, task: Task = TASK, lines: Sequence[str] = LINES) -> list[Trajectory]:
    return asyncio.run(world(lines).collect([task] * count))


def damaged(run: Path, text: str | None) -> None:
    """Replace the only workspace of a run, or (None) remove it."""
    (path,) = (run / "workspaces").iterdir()
    path.unlink()
    if text is not None:
        path.write_text(text)


def test_a_rollout_begins_with_its_tasks_workspace_and_its_record_says_so() -> None:
    t = played(1)[0]
    assert (t.outcome, t.answer, t.workspace) == (1.0, "42", SETUP)
    assert t.prompt.text == (
        "What do the second columns add up to? In the console already: names rows (list of 2), total (defined).\n>>> "
    )
    assert to_record(CreditedTrajectory(t))["workspace"] == SETUP.digest
    assert played(1, replace(TASK, workspace=None), ["1 + 1\n", "submit_final_answer(42)\n"])[0].workspace is None


def test_a_workspace_is_stored_once_beside_its_trajectories_and_found_again(tmp_path: Path) -> None:
    write_step(tmp_path, 1, played())
    write_step(tmp_path, 2, played(2))
    assert [path.name for path in (tmp_path / "workspaces").iterdir()] == [f"{SETUP.digest}.json"]
    found = [entry.trajectory for entry in Store(tmp_path)]
    assert len(found) == 6
    assert {t.workspace for t in found} == {SETUP}
    assert all(t.workspace is not None and t.workspace.content == SETUP.content for t in found)
    again = tmp_path / "again"
    write_step(again, 1, found)  # as it was stored: from the one folder into the other
    assert (again / "workspaces" / f"{SETUP.digest}.json").read_bytes() == SETUP.content


def test_every_rollout_verifies_from_the_record_alone(tmp_path: Path) -> None:
    write_step(tmp_path, 1, played())
    stored = [entry.trajectory for entry in Store(tmp_path)]
    found = asyncio.run(verify_all(stored, InProcessSandbox()))
    assert (found.verified_count, found.match_rate) == (4, 1.0)
    bare = [replace(t, workspace=None) for t in stored]
    assert asyncio.run(verify_all(bare, InProcessSandbox())).match_rate == 0.0


@pytest.mark.parametrize(
    ("text", "message"), [(None, "cannot be read: No such file"), ("{}", "is damaged: its digest is")]
)
def test_a_workspace_that_is_gone_or_changed_is_never_passed_over(
    tmp_path: Path, text: str | None, message: str
) -> None:
    write_step(tmp_path, 1, played(1))
    damaged(tmp_path, text)
    t = next(iter(Store(tmp_path))).trajectory
    assert t.workspace is not None
    with pytest.raises(StoreError, match=message):
        _ = t.workspace.content
    (verification,) = asyncio.run(verify_all([t], InProcessSandbox())).verifications
    assert message in verification.skip_reason
    assert message in str(build_detail(CreditedTrajectory(t))["workspace"])
    with pytest.raises(StoreError, match=message):
        asyncio.run(branch(world(LINES), get_branch_point(t, 2), TASK, 1))


def test_a_digest_that_would_lead_elsewhere_is_refused() -> None:
    record = to_record(CreditedTrajectory(played(1)[0]))
    record["workspace"] = "../../etc/passwd"
    with pytest.raises(StoreError, match="is no digest"):
        from_record(record)


def test_a_branch_begins_with_the_recorded_workspace_not_with_that_of_todays_task(tmp_path: Path) -> None:
    write_step(tmp_path, 1, played(1))
    t = next(iter(Store(tmp_path))).trajectory
    changed = replace(TASK, workspace=Workspace({"rows": []}))
    policy: Rollouts = world(["print(t)\n", "submit_final_answer(total())\n"])
    for task in (changed, None):
        found = asyncio.run(branch(policy, get_branch_point(t, 3), task, 2))
        assert [(each.answer, each.workspace) for each in found.trajectories] == [("42", SETUP)] * 2
        assert all(each.lines[:3] == t.lines[:3] for each in found.trajectories)


def test_the_page_shows_a_workspace_cut_and_as_text() -> None:
    setup = Workspace({"rows": list(range(9999)), "evil": "</script>"}, {}, ("x = 1", "y = 2"), ("json",), told="")
    drawn = build_detail(CreditedTrajectory(replace(played(1)[0], workspace=setup)))["workspace"]
    assert isinstance(drawn, dict)
    assert drawn["digest"] == setup.digest
    parts = drawn["parts"]
    assert isinstance(parts, list)
    assert [part[:2] for part in parts if isinstance(part, list)] == [
        ["evil", "str of 9"],
        ["rows", "list of 9,999"],
        ["imported", ""],
        ["lines", "2"],
    ]
    assert "characters not shown" in str(parts[1])
    assert len(str(parts)) < 2000
    assert build_detail(CreditedTrajectory(replace(played(1)[0], workspace=None)))["workspace"] is None


def test_records_of_schema_3_had_no_workspace() -> None:
    t = replace(played(1)[0], workspace=None)
    record = to_record(CreditedTrajectory(t))
    assert record["schema_version"] == SCHEMA_VERSION == 4
    older = json.loads(json.dumps({name: value for name, value in record.items() if name != "workspace"}))
    older["schema_version"] = 3
    assert from_record(older).trajectory == t


def test_a_notebook_takes_the_workspace_along(tmp_path: Path) -> None:
    t = played(1)[0]
    write_notebook(CreditedTrajectory(t), tmp_path / "one.ipynb")
    again = read_notebook(tmp_path / "one.ipynb").trajectory
    assert again == t
    assert again.workspace is not None
    assert again.workspace.content == SETUP.content


def test_a_workspace_that_cannot_be_made_drops_its_rollouts_and_names_task_and_line() -> None:
    bad = replace(TASK, workspace=Workspace({"rows": []}, lines=("rows[0]",)))
    good = replace(TASK, id="good")
    policy = world(LINES)
    found = asyncio.run(policy.collect([good, good, bad]))
    assert [t.stop for t in found] == [Stop.ANSWERED, Stop.ANSWERED, Stop.FAULT]
    assert found[2].failure is not None
    assert "task sum: workspace" in found[2].failure.message
    assert "IndexError" in found[2].failure.message
    with pytest.raises(UserCodeError, match="task sum: workspace"):
        asyncio.run(policy.collect([bad] * 2))


def test_a_value_that_is_named_as_a_host_function_is_refused_before_an_engine_opens() -> None:
    taken = replace(TASK, workspace=Workspace(values={"llm_query": 1}))
    with pytest.raises(SetupError, match=f"task {TASK.id}: workspace value is 'llm_query'; a host function has"):
        RolloutConfig(sandbox="unsafe", host_functions={"llm_query": {}}).try_workspaces([TASK, taken])
