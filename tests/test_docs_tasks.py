"""The pages about tasks, judges, evaluation and the cold start: their Python runs, their commands are accepted."""

import asyncio
import re
import shlex
import sys
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path

import pytest

from repl_rl.cli import VERBS
from repl_rl.cli.arguments import parse
from repl_rl.tasks import Task
from repl_rl.trajectory import Observed
from tests.worlds import world

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("tasks", "judges", "evaluation", "coldstart", "training")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "\n".join(blocks(page, "python"))
    monkeypatch.chdir(tmp_path)
    exec(compile(source, f"{page}.md", "exec"), {"__name__": f"{page}_page"})


def test_the_sampler_of_several_turns_asks_all_of_them_and_rewards_each_line() -> None:
    namespace: dict[str, object] = {"__name__": "tasks_page"}
    (source,) = [block for block in blocks("tasks", "python") if "class Interview" in block]
    exec(source, namespace)
    interview, task = namespace["Interview"], namespace["task"]
    assert isinstance(interview, type)
    assert isinstance(task, Task)
    (t,) = asyncio.run(world(["42\n", "83\n"], interview()).collect([task]))
    assert [[(r.name, r.value) for r in line.rewards] for line in t.lines] == [[("turn", 1.0)], [("turn", 0.0)]]
    assert [s.text for s in t.segments if isinstance(s, Observed)] == ["And doubled?\n>>> "]
    assert (t.answer, t.outcome) == ("42", 1.0)


def commands() -> list[str]:
    joined = [block.replace("\\\n", " ") for page in PAGES for block in blocks(page, "sh")]
    found = [line.partition("  #")[0] for block in joined for line in block.splitlines()]
    return [line for line in found if line.strip()]


@pytest.mark.parametrize("command", commands() if all((DOCS / f"{p}.md").exists() for p in PAGES) else [])
def test_the_commands_of_the_pages_are_accepted(command: str) -> None:
    program, verb, *flags = shlex.split(command)
    assert program == "repl-rl"
    assert verb in VERBS
    module = import_module(f"repl_rl.cli.{verb}")
    (config,) = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__
    ]
    assert parse(config, verb, flags)
    assert "torch" not in vars(sys.modules[module.__name__])
