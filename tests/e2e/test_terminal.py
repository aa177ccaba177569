"""Text of others steers no terminal: not in what a verb prints, nor in errors, logs, warnings, tracebacks."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from repl_rl.cli.terminal_output import SafeStream, make_terminal
from tests.support.run_folders import run_folder

CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4=\x07"
"""OSC 52: it sets the clipboard of whoever looks at it."""
OTHERS = ("\x1b[2J", "\x9b2J", "\x1bc", "\x08", "\u202e", "\x1b]0;title\x1b\\")
"""Clear, clear by one byte, reset, go back, write from right to left, set the title."""
FOLDERS = str(Path(sys.executable).parent)


def steers(text: str) -> bool:
    return any(character in text for character in "\x1b\x9b\x07\x08\u202e")


def run_program(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(FOLDERS, "repl-rl"), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "TERM": "xterm-256color"},
    )


@pytest.mark.parametrize("text", [CLIPBOARD, *OTHERS])
def test_what_a_verb_shows_is_free_of_control_characters_in_every_kind_of_renderable(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    console = make_terminal()
    table = Table(text, title=text, caption=text)
    table.add_row(text)
    table.add_row(Text(text))
    for each in (text, Text(text, style="bold"), table):
        console.print(each)
    console.print(text, Text(text), soft_wrap=True)
    console.log(text)
    shown = capsys.readouterr().out
    assert not steers(shown)
    assert repr(text[0])[1:-1] in shown or text == "\x08", "Rich drops that one itself"


def test_styles_and_bars_of_our_own_still_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    console = make_terminal()
    console.print(Text(f"bold {CLIPBOARD}", style="bold"))
    assert screen.getvalue().startswith("\x1b[1m")
    assert CLIPBOARD not in screen.getvalue()
    with Progress(console=console) as progress:
        progress.add_task("loading", total=2)
    assert "loading" in screen.getvalue()


def test_a_safe_stream_lets_bars_go_back_and_nothing_else() -> None:
    inner = io.StringIO()
    stream = SafeStream(inner)
    assert stream.write(f"\r 50%|##|{CLIPBOARD}\n") == len(f"\r 50%|##|{CLIPBOARD}\n")
    stream.writelines(["é 中 \t", "\x1b[1A"])
    assert inner.getvalue() == "\r 50%|##|\\x1b]52;c;cm0gLXJmIH4=\\x07\né 中 \t\\x1b[1A"
    assert stream.isatty is inner.isatty or stream.encoding == inner.encoding


def test_logs_warnings_and_tracebacks_of_the_program_are_free_of_them(tmp_path: Path) -> None:
    code = (
        "import logging, sys, warnings, repl_rl.cli as cli\n"
        f"text = {CLIPBOARD!r}\n"
        "def main():\n"
        "    logging.basicConfig()\n"
        "    logging.warning('the task %s', text)\n"
        "    warnings.warn(text)\n"
        "    print(text)\n"
        "    raise ValueError(text)\n"
        "cli.main = main\n"
        "cli.run()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert not steers(done.stdout + done.stderr)
    assert done.stderr.count("\\x1b]52") >= 3
    assert "ValueError" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("view", f"runs/{CLIPBOARD}"),
        ("replay", f"runs/{CLIPBOARD}"),
        ("runs", f"{CLIPBOARD}"),
        (CLIPBOARD,),
        ("rollout", "--tasks", f"{CLIPBOARD}.jsonl"),
        ("eval", "--model", f"./{CLIPBOARD}"),
        ("export", f"runs/{CLIPBOARD}"),
        ("rollout", "--sampler", f"nothing{CLIPBOARD}:Sampler"),
    ],
    ids=lambda arguments: arguments[0] if arguments[0].isalpha() else "verb",
)
def test_an_error_names_what_was_typed_and_steers_nothing(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run_program(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert not steers(done.stdout + done.stderr)
    assert "]52;c;" in done.stderr + done.stdout


def test_an_error_in_a_file_of_others_names_it_and_steers_nothing(tmp_path: Path) -> None:
    file = tmp_path / f"{CLIPBOARD}.jsonl"
    file.write_text('{"question": "What is 6 * 7?"}\n')
    done = run_program("rollout", "--tasks", file.name, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert not steers(done.stdout + done.stderr)
    assert "]52;c;" in done.stderr


def test_a_run_of_others_steers_nothing_in_the_verbs_that_read_it(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "runs" / f"a{CLIPBOARD}b")
    for arguments in (("runs", tmp_path / "runs"), ("replay", run), ("runs",), ()):
        done = run_program(*arguments, cwd=tmp_path)
        assert not steers(done.stdout + done.stderr), arguments
        assert done.stdout, arguments


@pytest.mark.heavy
def test_tasks_of_others_steer_nothing_while_they_are_played(tmp_path: Path) -> None:
    """Every text of a task has the sequence: id, family, question, answer, a field, the file."""
    rows = [
        {"id": f"{n}{CLIPBOARD}", "family": f"f{CLIPBOARD}", "question": f"What is {n} + 1? {CLIPBOARD}",
         "answer": f"{n + 1}{CLIPBOARD}", "more": CLIPBOARD}
        for n in range(40)
    ]  # fmt: skip
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ("--engine", "transformers", "--tasks", file)
    for arguments in (
        ("rollout", *common, "--count", "1"),
        ("eval", *common, "--samples", "1", "--out", tmp_path / "eval"),
    ):
        done = run_program(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert not steers(done.stdout + done.stderr)
        assert "\\x1b]52" in done.stdout
