"""The pages about samplers: their code runs, their transcripts are what happens, their commands work."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from repl_rl.cli import VERBS, main
from repl_rl.rollout import RolloutSampler
from repl_rl.samplers import load_sampler
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.samplers.marked_text import chat_renderer, play

PAGES = sorted((Path(__file__).parents[3] / "docs" / "samplers").glob("*.md"))
_END = re.compile(r"\[(\w+); outcome (\S+)\]\n\Z")


def blocks(page: Path, language: str) -> list[str]:
    fenced = re.findall(r"^(`{3,4})(\w+)\n(.*?)^\1$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for _, name, text in fenced if name == language]


@pytest.fixture(params=PAGES, ids=lambda page: page.stem)
def page(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A page whose code is a module that can be imported."""
    name = "plan_first" if request.param.stem == "README" else f"page_{request.param.stem}"
    (tmp_path / f"{name}.py").write_text("\n".join(blocks(request.param, "python")))
    for line in re.findall(r"`(patient = .*)`", request.param.read_text()):
        (tmp_path / "my_samplers.py").write_text(f"from repl_rl import FeedbackSampler\n\n{line}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield request.param
    for each in (name, "my_samplers"):
        sys.modules.pop(each, None)


def module_of(page: Path) -> ModuleType:
    (name,) = (path.stem for path in Path.cwd().glob("*.py") if path.stem != "my_samplers")
    load_sampler(f"{name}:sampler")
    return sys.modules[name]


def played(page: Path) -> list[Trajectory]:
    module = module_of(page)
    sampler, task = module.sampler, module.task
    assert isinstance(sampler, RolloutSampler)
    assert isinstance(task, Task)
    found = []
    for text in blocks(page, "text"):
        end = _END.search(text)
        assert end is not None, text
        prompt = sampler.prompt(task, chat_renderer(), "bare", "3").text
        marked = text[: end.start()]
        t = play(sampler, prompt + marked[3:] if marked.startswith("...") else marked, task)
        assert (t.stop, f"{t.outcome:g}") == (end[1], end[2])
        found.append(t)
    return found


def test_every_transcript_is_what_happens_token_by_token(page: Path) -> None:
    assert played(page)


def test_the_figures_in_the_text_are_right(page: Path) -> None:
    (t,) = played(page)
    given = [[round(r.value, 9) for r in line.rewards] for line in t.lines]
    if page.stem == "chat_tools":
        metrics = module_of(page).sampler.metrics([t])
        assert (metrics["tools/call_frequency"], metrics["tools/failure_frequency"]) == (2, 0.5)
        assert given == [[-0.2], [0.25], []]
    if page.stem == "feedback":
        assert given == [[0.15], [0.5], [1.0]]


def test_every_command_works(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in "".join(blocks(page, "sh")).splitlines():
        words = shlex.split(command)
        assert words[0] == "repl-rl"
        assert words[1] in VERBS
        if words[1:3] == ["sampler", "check"]:
            assert main(words[1:]) == 0
        else:
            assert words[2] == "--sampler"
            assert load_sampler(words[3])
