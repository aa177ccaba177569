"""The pages about tasks, judges, evaluation and the cold start: their Python runs."""

import asyncio
from pathlib import Path

import pytest

from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Observed
from tests.support.documents import blocks
from tests.support.scripted_rollouts import world

PAGES = ("tasks", "judges", "rewards", "evaluation", "coldstart", "training", "workspace")


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "\n".join(blocks("python", f"docs/{page}.md"))
    monkeypatch.chdir(tmp_path)
    exec(compile(source, f"{page}.md", "exec"), {"__name__": f"{page}_page"})


def test_the_console_of_the_page_about_workspaces_has_what_it_says() -> None:
    namespace: dict[str, object] = {"__name__": "workspace_page"}
    first, *_, last = blocks("python", "docs/workspace.md")
    exec(first + last, namespace)
    looked = namespace["looked"]
    assert callable(looked)
    assert looked() == "(['alan', 41], 'ages in years\\n')\n"


def test_the_sampler_of_several_turns_asks_all_of_them_and_rewards_each_line() -> None:
    namespace: dict[str, object] = {"__name__": "tasks_page"}
    (source,) = [block for block in blocks("python", "docs/tasks.md") if "class Interview" in block]
    exec(source, namespace)
    interview, task = namespace["Interview"], namespace["task"]
    assert isinstance(interview, type)
    assert isinstance(task, Task)
    (t,) = asyncio.run(world(["42\n", "83\n"], interview()).collect([task]))
    assert [[(r.name, r.value) for r in line.rewards] for line in t.lines] == [[("turn", 1.0)], [("turn", 0.0)]]
    assert [s.text for s in t.segments if isinstance(s, Observed)] == ["And doubled?\n>>> "]
    assert (t.answer, t.outcome) == ("42", 1.0)
