"""`repl-rl replay`, with and without a terminal."""

import io
import os
import pty
import re
import sys
import termios
import threading
import tty
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from repl_rl.cli import main
from repl_rl.errors import SandboxLost
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.store import parse_session, write_step
from repl_rl.runs.store.export_formats import read_notebook
from repl_rl.sandbox import SANDBOXES, Sandbox, SandboxConfig, SandboxOptions, SandboxSession
from repl_rl.trajectory.trajectory import Observed
from tests.unit.test_replay import LINES, played


def run_cli(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    runs_lines = {"--verify", "--to-line", "--branch"} & {*argv}
    code = main(["replay", *argv, *(["--sandbox", "unsafe"] if runs_lines else [])])
    out = capsys.readouterr()
    return code, out.out + out.err


def test_verify_names_a_damaged_record_and_does_not_succeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_step(tmp_path, 1, [played(LINES)])
    damaged = write_step(tmp_path, 2, [replace(played(LINES), id="second")])
    damaged.write_bytes(damaged.read_bytes()[:-20])
    code, out = run_cli(capsys, str(tmp_path), "--verify")
    assert (code, "determinism 100.00%: 1 trajectories" in out) == (1, True)
    assert f"not readable: {damaged}" in out.replace("\n", "")
    damaged.unlink()
    assert run_cli(capsys, str(tmp_path), "--verify")[0] == 0


def test_the_terminal_shows_a_trajectory_with_statuses_and_no_control_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_step(tmp_path, 1, [played(["print('\\x1b[2J\\x00\\u202e')\n", "1/0\n", "exit()\n"])])
    code, out = run_cli(capsys, str(path))
    assert code == 0
    assert "\\x1b[2J\\x00\\u202e" in out
    assert "\x1b[2J" not in out
    assert "ZeroDivisionError" in out
    assert "exception" in out


def test_verify_prints_a_score_and_each_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = replace(played(["import time\n", "time.time_ns()\n", "exit()\n"]), id="bad")
    write_step(tmp_path, 1, [played(LINES), bad])
    code, out = run_cli(capsys, str(tmp_path), "--verify")
    assert code == 1
    assert "determinism 50.00%" in out
    assert "bad" in out
    assert "time" in out
    code, out = run_cli(capsys, str(tmp_path), "--verify", "--id", played(LINES).id)
    assert (code, "determinism 100.00%" in out) == (0, True)


def test_lines_are_typed_into_the_rebuilt_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_step(tmp_path, 1, [played(LINES)])
    monkeypatch.setattr("sys.stdin", io.StringIO("x + 100\nprint('\\x1b[2J')\n"))
    code, out = run_cli(capsys, str(path), "--to-line", "4")
    assert code == 0
    assert "107" in out
    assert "\x1b[2J" not in out


class Mortal:
    """A sandbox that makes no console any more."""

    name = "mortal"
    python_version = (3, 11, 0)

    def session(self) -> AbstractAsyncContextManager[SandboxSession]:
        raise SandboxLost("the fork server is gone")


@dataclass(frozen=True, slots=True)
class Lost(SandboxConfig):
    """Consoles that cannot be had."""

    kind: ClassVar[str] = "lost"
    about: ClassVar[str] = "for a test"

    @asynccontextmanager
    async def open(self, births: SandboxOptions) -> AsyncIterator[Sandbox]:
        yield Mortal()


@pytest.fixture
def lost() -> Iterator[str]:
    SANDBOXES.register(Lost)
    yield Lost.kind
    del SANDBOXES.entries[Lost.kind]


def test_consoles_that_are_lost_while_a_person_replays_are_one_line_of_error(
    lost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_step(tmp_path, 1, [played(LINES)])
    assert main(["replay", str(path), "--to-line", "0", "--sandbox", lost]) == 1
    told = capsys.readouterr().err
    assert told == "repl-rl: error: the fork server is gone; `repl-rl doctor` says whether consoles work here\n"


def test_a_run_of_which_nothing_can_be_executed_again_is_not_called_deterministic(
    lost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_step(tmp_path, 1, [played(LINES)])
    assert main(["replay", str(path), "--verify", "--sandbox", lost]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "determinism unknown: 0 trajectories executed again, 0 differ, 1 could not be executed" in told
    assert "could not be executed: 1: the fork server is gone" in told


def in_a_terminal(keys: str, *argv: str) -> str:
    """What a terminal gets from `repl-rl replay` while `keys` are typed into it."""
    far, near = pty.openpty()
    tty.setraw(near, termios.TCSANOW)
    shown: list[bytes] = []

    def watch() -> None:
        with suppress(OSError):
            while chunk := os.read(far, 65536):
                shown.append(chunk)

    watcher = threading.Thread(target=watch)
    watcher.start()
    os.write(far, keys.encode())
    with open(near, "r+b", buffering=0) as raw, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.TextIOWrapper(raw))
        patch.setattr("sys.stdout", io.TextIOWrapper(io.FileIO(os.dup(near), "w"), write_through=True))
        patch.setenv("TERM", "xterm-256color")
        assert main(["replay", *argv, "--sandbox", "unsafe"]) == 0
        sys.stdout.close()
    watcher.join()
    os.close(far)
    return b"".join(shown).decode()


def screen(shown: str) -> list[str]:
    """What stands on a terminal, line by line."""
    erased = re.sub(r"(>>> |\.\.\. )\x1b\[1A\x1b\[2K", "", re.sub(r"\x1b\[[0-9;]*m", "", shown))
    return erased.replace("\r", "").split("\n")


def test_a_person_steps_forth_and_back_types_a_line_and_leaves(tmp_path: Path) -> None:
    path = write_step(tmp_path, 1, [played(LINES)])
    keys = ["", "", "", ":b", "", "", "x + 1", "", ":b", ":b", "", "", ":q", "x = 'never'"]
    assert screen(in_a_terminal("\n".join([*keys, ""]), str(path)))[2:] == [
        ">>> x = 6   ok",
        ">>> for i in range(2):   incomplete",
        "...     x += i   incomplete",
        "... (back to line 2, in a fresh console)",
        "...     x += i   incomplete",
        "...    ok",
        ">>> 8",
        ">>> x * 6   ok",
        "42",
        ">>> (back to line 4, in a fresh console)",
        ">>> (back to line 3, in a fresh console)",
        "...    ok",
        ">>> x * 6   ok",
        "42",
        ">>> ",
    ]


def test_no_output_steers_a_terminal_fakes_a_prompt_or_floods_it(tmp_path: Path) -> None:
    lines = [
        "print('\\x1b[2J\\x00\\u202eevil\\n>>> submit_final_answer(666)')\n",
        "print('a' * 10_000_000)\n",
        "exit()\n",
    ]
    t = played(lines)
    flooded = replace(t, segments=(*t.segments[:3], Observed("a" * 10_000_000 + "\n>>> ", (1,)), *t.segments[4:]))
    path = write_step(tmp_path, 1, [flooded])
    for shown in (in_a_terminal("\n\n\n:q\n", str(path)), in_a_terminal(":q\n", str(path), "--to-line", "1")):
        assert re.findall(r"\x1b(?!\[[0-9;]*m|\[1A|\[2K)", shown) == []
        assert not set("\x00\u202e").intersection(shown)
        assert "\\x1b[2J\\x00\\u202eevil" in shown
        assert "\\>>> submit_final_answer(666)" in shown
        assert not any(line.startswith(">>> submit") for line in screen(shown))
        assert len(shown) < 20_000


def test_a_trajectory_is_exported_and_replayed_from_its_notebook_and_read_from_its_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    t, notebook, text = played(LINES), tmp_path / "one.ipynb", tmp_path / "one.txt"
    path = write_step(tmp_path, 1, [t])
    assert run_cli(capsys, str(path), "--export", str(notebook)) == (0, f"{notebook}\n")
    assert run_cli(capsys, str(path), "--export", str(text)) == (0, f"{text}\n")
    assert "determinism 100.00%: 1 trajectories" in run_cli(capsys, str(notebook), "--verify")[1]
    assert read_notebook(notebook).trajectory == t
    assert [turn.source + "\n" for turn in parse_session(text.read_text())] == LINES


def test_bad_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_step(tmp_path, 1, [played(LINES)])
    assert run_cli(capsys, str(path), "--id", "0-t1-1")[0] == 2
    assert run_cli(capsys, str(tmp_path / "none"))[0] == 2
    assert run_cli(capsys, str(path), "--branch", "-1")[0] == 2
    assert run_cli(capsys, str(path), "--verify", "--branch", "2")[0] == 2


@pytest.mark.parametrize("overshoot", ["carry", "refuse"])
def test_a_run_of_another_policy_about_newlines_is_replayed_and_branched_under_its_own(
    overshoot: str, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text(f'overshoot = "{overshoot}"\n')
    assert RolloutConfig.from_run(tmp_path).newline_tokens == overshoot
