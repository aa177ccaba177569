"""Standard streams that are closed, full or read by nobody: work is done, or ends with one line."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from repl_rl.utils.atomic_files import list_contents
from tests.support.run_folders import run_folder

PROGRAM = shlex.join([sys.executable, "-m", "repl_rl.cli"])
CLOSED, READ_BY_NOBODY, FULL = ">&-", "| :", ">/dev/full"
STREAMS = [READ_BY_NOBODY, *(pytest.param(stdout, marks=pytest.mark.heavy) for stdout in (CLOSED, FULL))]


def shell(command: str, folder: Path) -> tuple[int, str]:
    """Exit code of `command` in a shell, its own and no other's of a pipe, and what it said on standard error."""
    words = ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=800, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("stdout", STREAMS)
def test_what_makes_a_folder_makes_it_whole_wherever_its_words_go(tmp_path: Path, stdout: str) -> None:
    code, told = shell(f"{PROGRAM} sft --fresh --out whole {stdout}", tmp_path)
    assert code == 0, told
    assert "Traceback" not in told
    assert list_contents(tmp_path / "whole") == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    json.loads((tmp_path / "whole" / "config.json").read_text())
    assert told.count("standard output takes no more") == (stdout != CLOSED)


@pytest.mark.parametrize("stdout", STREAMS)
def test_a_training_whose_words_go_nowhere_is_finished(tmp_path: Path, stdout: str) -> None:
    small = (
        "--engine transformers --sandbox unsafe --trainer.steps 1 --trainer.prompts-per-step 2 --trainer.group-size 2"
    )
    code, told = shell(f"{PROGRAM} train {small} --train-tasks 8 --eval-tasks 2 {stdout}", tmp_path)
    assert code == 0, told
    assert "Traceback" not in told
    run = tmp_path / "runs" / "quickstart"
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    assert [json.loads(row)["step"] for row in (run / "metrics.jsonl").read_text().splitlines()] == [1]


@pytest.mark.parametrize(
    ("verb", "stdout", "code", "words"),
    [
        ("runs", CLOSED, 0, ""),
        ("runs", READ_BY_NOBODY, 141, ""),
        ("runs", FULL, 2, "standard output is 'not writable'; No space left on device"),
        ("--help", FULL, 2, "No space left on device"),
        ("--help", READ_BY_NOBODY, 141, ""),
        ("", FULL, 2, "No space left on device"),
        ("nothing", ">&- 2>&-", 2, ""),
        ("nothing", "2>/dev/full", 2, ""),
        ("nothing", ">&- <&- 2>&-", 2, ""),
    ],
)
def test_a_verb_whose_words_are_its_result_ends_with_one_line(
    tmp_path: Path, verb: str, stdout: str, code: int, words: str
) -> None:
    (tmp_path / "runs").mkdir()
    ended, told = shell(f"{PROGRAM} {verb} {stdout}", tmp_path)
    assert ended == code, told
    assert words in told
    assert told.count("\n") == (1 if words else 0), told


def test_no_file_gets_what_is_printed_where_standard_output_was_closed(tmp_path: Path) -> None:
    code = (
        "from repl_rl.cli.terminal_output import make_streams_safe\n"
        "make_streams_safe(outlast=True)\n"
        "with open('mine', 'w') as file:\n"
        "    print('words', flush=True)\n"
        "    import os, subprocess\n"
        "    subprocess.run(['echo', 'more words'])\n"
        "    file.write(str(file.fileno() > 2))\n"
    )
    ended, told = shell(f"{shlex.join([sys.executable, '-c', code])} {CLOSED} 2>&- <&-", tmp_path)
    assert (ended, told) == (0, "")
    assert os.listdir(tmp_path) == ["mine"]
    assert (tmp_path / "mine").read_text() == "True"


def test_characters_that_the_encoding_of_the_output_lacks_are_escaped(tmp_path: Path) -> None:
    run_folder(tmp_path / "runs" / "snowman ☃")
    code, told = shell(f"PYTHONIOENCODING=ascii {PROGRAM} runs > shown", tmp_path)
    assert (code, told) == (0, "")
    assert "snowman \\u2603" in (tmp_path / "shown").read_text(encoding="ascii")
