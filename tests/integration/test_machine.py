"""What belongs to this machine: files and folders that are whole, calls that are left behind, installed packages."""

import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.errors import ConfigError
from repl_rl.trajectory.console_text import clip_middle
from repl_rl.utils.atomic_files import (
    OutputFolder,
    list_contents,
    replace_file_atomically,
    replace_folder_atomically,
    validate_replaceable_file,
    write_named,
    write_text_atomically,
)
from repl_rl.utils.installed_versions import collect_versions, get_version
from repl_rl.utils.timeouts import DaemonThread
from tests.support.processes import identity, wait_for


def test_a_file_that_is_not_finished_leaves_the_older_one_and_nothing_else(tmp_path: Path) -> None:
    final = tmp_path / "a" / "figures.json"
    write_text_atomically(final, "first\n")
    with pytest.raises(IsADirectoryError), replace_file_atomically(final) as torn:
        torn.write_text(str(final.parent.write_text("half")))
    assert final.read_text() == "first\n"
    assert os.listdir(final.parent) == ["figures.json"]


def test_a_finished_file_takes_the_place_of_the_older_one_at_once(tmp_path: Path) -> None:
    final = tmp_path / "figures.json"
    final.write_text("first\n")
    with replace_file_atomically(final) as torn:
        torn.write_text("second ⊢\n", encoding="utf-8")
        assert final.read_text() == "first\n"
    assert final.read_text(encoding="utf-8") == "second ⊢\n"
    assert os.listdir(tmp_path) == ["figures.json"]


def _link(place: Path) -> Path:
    (place / "kept").mkdir()
    (place / "kept" / "figures.json").write_text("older\n")
    (place / "hop").symlink_to("kept/figures.json")
    (place / "named").symlink_to("hop")
    return place / "kept" / "figures.json"


def _dangling(place: Path) -> Path:
    (place / "named").symlink_to("made/figures.json")
    return place / "made" / "figures.json"


def _missing(place: Path) -> Path:
    return place / "named"


@pytest.mark.parametrize("lay", [_link, _dangling, _missing])
def test_a_link_that_a_user_names_stands_for_its_target(lay: Callable[[Path], Path], tmp_path: Path) -> None:
    target, named = lay(tmp_path), tmp_path / "named"
    was = os.readlink(named) if named.is_symlink() else None
    validate_replaceable_file("json", named, lambda file: True)
    with write_named(named) as torn:
        torn.write_text("newer\n")
        assert not target.exists() or target.read_text() == "older\n"
    assert target.read_text() == "newer\n"
    assert (os.readlink(named) if named.is_symlink() else None) == was
    assert os.listdir(target.parent) == [target.name]
    with pytest.raises(ZeroDivisionError), write_named(named) as torn:
        torn.write_text(str(1 // 0))
    assert target.read_text() == "newer\n"


def test_a_pipe_that_a_user_names_gets_the_content_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe, place = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    place.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for named in (pipe, place):
            validate_replaceable_file("json", named, lambda file: False)
            with write_named(named) as torn:
                torn.write_text("figures\n")
            assert os.read(reader, 99) == b"figures\n"
        with pytest.raises(ZeroDivisionError), write_named(pipe) as torn:
            torn.write_text(str(torn.write_text("half") // 0))
        assert os.read(reader, 99) == b""
    finally:
        os.close(reader)
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


def test_a_terminal_that_a_user_names_gets_the_content() -> None:
    master, terminal = os.openpty()
    try:
        with write_named(Path(os.ttyname(terminal))) as torn:
            torn.write_text("figures\n")
        assert os.read(master, 99) == b"figures\r\n"
        assert stat.S_ISCHR(os.stat(os.ttyname(terminal)).st_mode)
    finally:
        os.close(master)
        os.close(terminal)


def _socket(place: Path) -> str:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(place))
    return "it is a socket; name a file"


def _folder(place: Path) -> str:
    place.mkdir()
    return "it is a folder; name a file"


def _loop(place: Path) -> str:
    place.symlink_to(place.name)
    return "it is a link that leads to itself; name a file"


@pytest.mark.parametrize("lay", [_socket, _folder, _loop])
def test_what_takes_no_content_is_refused_in_one_line(lay: Callable[[Path], str], tmp_path: Path) -> None:
    place = tmp_path / "p"
    told = lay(place)
    before = place.lstat()
    with pytest.raises(ConfigError, match=rf"^json is '{place}'; {told}$"):
        validate_replaceable_file("json", place, lambda file: True)
    with pytest.raises(ConfigError, match=told), write_named(place):
        pass
    assert place.lstat().st_ino == before.st_ino


def test_the_file_that_a_command_prints_to_is_refused_and_keeps_what_was_printed(tmp_path: Path) -> None:
    code = "from pathlib import Path; from repl_rl.utils.atomic_files import is_stream; print('printed', flush=True)"
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run(
            [sys.executable, "-c", f"{code}; is_stream(Path('/dev/stdout'))"],
            stdout=out, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert "this command prints to that file; name another" in done.stderr
    assert (tmp_path / "out").read_text() == "printed\n"


@pytest.mark.parametrize("lay", [_link, lambda place: os.mkfifo(place / "named")])
def test_what_a_stranger_put_in_the_place_of_a_file_is_replaced_and_not_written_to(
    lay: Callable[[Path], Path | None], tmp_path: Path
) -> None:
    target = lay(tmp_path)
    write_text_atomically(tmp_path / "named", "report\n")
    assert stat.S_ISREG((tmp_path / "named").lstat().st_mode)
    assert target is None or target.read_text() == "older\n"


def test_a_folder_is_replaced_by_a_finished_one_only(tmp_path: Path) -> None:
    final = tmp_path / "policy"
    kind = OutputFolder("make", "folder", ("old", "new"), lambda folder: False)
    with replace_folder_atomically(final, kind) as made:
        (made / "old").touch()
    with pytest.raises(FileNotFoundError), replace_folder_atomically(final, kind) as made:
        (made / "half" / "file").touch()
    assert list_contents(final) == ["old"]
    with replace_folder_atomically(final, kind) as made:
        (made / "new").touch()
    assert list_contents(final) == ["new"]
    assert os.listdir(tmp_path) == ["policy"]


def test_a_call_in_a_thread_gives_what_it_returns_and_what_it_raises() -> None:
    assert DaemonThread(lambda: 6 * 7, "multiply").future.result() == 42
    assert isinstance(DaemonThread(sys.exit, "leave").future.exception(), SystemExit)


def test_a_call_that_hangs_is_left_behind_and_keeps_no_process_alive() -> None:
    release = threading.Event()
    thread = DaemonThread(release.wait, "hang")
    with pytest.raises(TimeoutError):
        thread.future.result(timeout=0.01)
    assert thread.daemon
    assert not thread.future.cancel()  # who stops waiting takes nothing from the thread
    release.set()
    assert thread.future.result() is True


ENDING = """
import os, signal, sys, time
from repl_rl.utils.processes import exit_with_parent
if os.fork():
    signal.pause()
exit_with_parent()
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
    assert set(collect_versions(("torch", "no-such-package"))) == {"torch"}
    assert get_version("no-such-package") is None


@given(st.text(), st.integers(min_value=1, max_value=50))
def test_a_clipped_text_keeps_both_ends_and_says_how_much_is_left_out(text: str, most: int) -> None:
    shown = clip_middle(text, most)
    if len(text) <= most:
        assert shown == text
        return
    half = most // 2
    assert shown.startswith(text[:half])
    assert shown.endswith(text[len(text) - half :])
    assert f"[... {len(text) - 2 * half} characters not shown ...]" in shown
