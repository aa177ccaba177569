"""OpenAI's own client asks a policy that was trained, as docs/serve.md shows it."""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.serving import openai_client as served
from repl_rl.tasks import Split, load_tasks

PIECE = re.compile(r" *(\d+) ms  (.+)")


def solved(shown: str) -> list[bool]:
    """Of what the page's program printed: whether each question, a task, was answered as it should be."""
    answers = {task.question: task.answer for task in load_tasks("builtin:quickstart", split=Split.HELD_OUT, count=240)}
    parts: list[list[str]] = []
    for line in shown.splitlines():
        if line in answers:
            parts.append([answers[line]])
        else:
            parts[-1].append(line)
    found = []
    for answer, *lines in parts:
        pieces = [match.groups() for line in lines if (match := PIECE.fullmatch(line))]
        assert len(pieces) == len(lines) >= 1
        assert all(int(before) <= int(after) for (before, _), (after, _) in pairwise(pieces))
        last = pieces[-1][1]
        found.append("submit_final_answer(" in last and answer in last)
    return found


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_trained_policy_streams_right_answers_to_openais_client(tmp_path: Path) -> None:
    train = [sys.executable, "-m", "repl_rl.cli", "train", "--name", "quickstart", "--trainer.steps", "24"]
    subprocess.run([*train, "--train-tasks", "512", "--eval-tasks", "24"], cwd=tmp_path, check=True)
    found = served.asked(tmp_path / "runs" / "quickstart")
    shown = str(found["shown"])
    assert sum(solved(shown)) >= 2, shown
    assert served.block(found).endswith(f"```text\n{shown}```\n")
