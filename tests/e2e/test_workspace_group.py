"""A group of 64 rollouts at once that begin with a table of a megabyte, a file and a package, in real consoles."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.console.workspaces import AMOUNTS, LARGE
from repl_rl.runs.replay import Branches, DeterminismReport, branch, get_branch_point, verify_all
from repl_rl.runs.report import write_report
from repl_rl.runs.store import Store, write_step
from repl_rl.sandbox import open_sandbox
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Observed, Trajectory
from tests.support.reports import data_of, unpacked
from tests.support.scripted_rollouts import world

ROLLOUTS = 64
LINES = (
    "import numpy\n",
    "amounts = numpy.array([amount for _, _, amount in rows])\n",
    "rows.clear(); by_name.clear()\n",
    "total = float(amounts.sum()); total\n",
    "n = len(open('data/notes.txt').readlines()); n\n",
    "open('data/notes.txt', 'w').write('mine')\n",
    "submit_final_answer(total + n)\n",
)
ANSWER = str(sum(AMOUNTS) + 1000)
TASK = Task(
    "large", "Amounts and lines of the notes, added up?", ANSWER, workspace=replace(LARGE, told="There is `rows`.")
)


async def _played(run: Path) -> tuple[list[Trajectory], DeterminismReport, Branches]:
    async with open_sandbox("local", warm=0) as sandbox:
        policy = replace(world(LINES, concurrency=ROLLOUTS), sandbox=sandbox)
        found = await policy.collect([TASK] * ROLLOUTS)
        write_step(run / "trajectories", 1, found)
        stored = [entry.trajectory for entry in Store(run)]
        determinism = await verify_all(stored, sandbox, 32)
        rest = replace(world(LINES[3:]), sandbox=sandbox)
        branches = await branch(rest, get_branch_point(stored[0], 3), TASK, 4)
    return found, determinism, branches


@pytest.mark.heavy
def test_every_rollout_of_a_group_has_its_own_table_and_file_and_verifies_branches_and_is_shown(tmp_path: Path) -> None:
    run = tmp_path / "run"
    found, determinism, branches = asyncio.run(_played(run))
    assert [t.outcome for t in found] == [1.0] * ROLLOUTS
    texts = {tuple(s.text for s in t.segments if isinstance(s, Observed)) for t in found}
    assert len(texts) == 1
    assert (determinism.verified_count, determinism.match_rate) == (ROLLOUTS, 1.0)
    assert branches.mean_outcome == 1.0  # the table had been cleared by then: what was computed of it is there again
    assert all(t.lines[:3] == found[0].lines[:3] for t in branches.trajectories)
    (stored,) = (run / "trajectories" / "workspaces").iterdir()
    assert stored.read_bytes() == TASK.workspace.content if TASK.workspace else False
    (run / "config.toml").write_text("")
    page = write_report(run).read_text()
    chunks = data_of(page)["chunks"]
    assert isinstance(chunks, list)
    shown = str(unpacked(chunks[0]))
    assert all(word in shown for word in ("customer 000000", "file data/notes.txt", "numpy", "by_name = {name"))
    assert len(page) < 300_000
