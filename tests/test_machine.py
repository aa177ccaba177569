"""What belongs to this machine: files and folders that are whole, calls that are left behind, installed packages."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.machine.files import whole_file, write_whole
from repl_rl.machine.folders import whole_folder
from repl_rl.machine.outputs import Output, contents
from repl_rl.machine.threads import InThread
from repl_rl.machine.versions import installed, versions
from repl_rl.record.clip import clip
from tests.processes import identity, wait_for


def test_a_file_that_is_not_finished_leaves_the_older_one_and_nothing_else(tmp_path: Path) -> None:
    final = tmp_path / "a" / "figures.json"
    write_whole(final, "first\n")
    with pytest.raises(IsADirectoryError), whole_file(final) as torn:
        torn.write_text(str(final.parent.write_text("half")))
    assert final.read_text() == "first\n"
    assert os.listdir(final.parent) == ["figures.json"]


def test_a_finished_file_takes_the_place_of_the_older_one_at_once(tmp_path: Path) -> None:
    final = tmp_path / "figures.json"
    final.write_text("first\n")
    with whole_file(final) as torn:
        torn.write_text("second ⊢\n", encoding="utf-8")
        assert final.read_text() == "first\n"
    assert final.read_text(encoding="utf-8") == "second ⊢\n"
    assert os.listdir(tmp_path) == ["figures.json"]


def test_a_folder_is_replaced_by_a_finished_one_only(tmp_path: Path) -> None:
    final = tmp_path / "policy"
    kind = Output("make", "folder", ("old", "new"), lambda folder: False)
    with whole_folder(final, kind) as made:
        (made / "old").touch()
    with pytest.raises(FileNotFoundError), whole_folder(final, kind) as made:
        (made / "half" / "file").touch()
    assert contents(final) == ["old"]
    with whole_folder(final, kind) as made:
        (made / "new").touch()
    assert contents(final) == ["new"]
    assert os.listdir(tmp_path) == ["policy"]


def test_a_call_in_a_thread_gives_what_it_returns_and_what_it_raises() -> None:
    assert InThread(lambda: 6 * 7, "multiply").outcome.result() == 42
    assert isinstance(InThread(sys.exit, "leave").outcome.exception(), SystemExit)


def test_a_call_that_hangs_is_left_behind_and_keeps_no_process_alive() -> None:
    release = threading.Event()
    thread = InThread(release.wait, "hang")
    with pytest.raises(TimeoutError):
        thread.outcome.result(timeout=0.01)
    assert thread.daemon
    assert not thread.outcome.cancel()  # who stops waiting takes nothing from the thread
    release.set()
    assert thread.outcome.result() is True


ENDING = """
import os, signal, sys, time
from repl_rl.machine.processes import end_with_parent
if os.fork():
    signal.pause()
end_with_parent()
print(os.getpid(), flush=True)
signal.pause()
"""


def test_a_process_that_ends_with_its_parent_is_gone_when_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ENDING], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = identity(int(parent.stdout.readline()))
        assert child is not None
        parent.kill()
        wait_for(lambda: identity(child[0]) != child, None, 30)


def test_versions_are_of_what_is_installed_and_of_nothing_else() -> None:
    assert set(versions(("torch", "no-such-package"))) == {"torch"}
    assert installed("no-such-package") is None


@given(st.text(), st.integers(min_value=1, max_value=50))
def test_a_clipped_text_keeps_both_ends_and_says_how_much_is_left_out(text: str, most: int) -> None:
    shown = clip(text, most)
    if len(text) <= most:
        assert shown == text
        return
    half = most // 2
    assert shown.startswith(text[:half])
    assert shown.endswith(text[len(text) - half :])
    assert f"[... {len(text) - 2 * half} characters not shown ...]" in shown
