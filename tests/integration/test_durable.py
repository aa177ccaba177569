"""A folder is there whole or not at all, wherever its writer was stopped."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from repl_rl.errors import ConfigError
from repl_rl.runs.run_folder import RUN, RunFolder
from repl_rl.utils.atomic_files import DIGESTS, find_damage, remove_all_but_newest, write_folder_durably
from repl_rl.utils.describe_os_errors import catch_os_errors
from repl_rl.utils.file_lock import lock_folder


def fill(folder: Path) -> None:
    (folder / "a").write_bytes(b"1" * 1000)
    (folder / "b").write_bytes(b"2" * 1000)


def fill_and_die(folder: Path) -> None:
    (folder / "a").write_bytes(b"3" * 500)
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(final: Path) -> int:
    child = os.fork()
    if child == 0:
        write_folder_durably(final, fill_and_die)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_whoever_is_killed_while_writing_leaves_the_older_one_and_no_trace_after_the_next(tmp_path: Path) -> None:
    write_folder_durably(tmp_path / "1", fill)
    assert os.WTERMSIG(in_child(tmp_path / "1")) == signal.SIGKILL
    assert os.WTERMSIG(in_child(tmp_path / "2")) == signal.SIGKILL
    assert find_damage(tmp_path / "1") is None
    assert not (tmp_path / "2").exists()
    write_folder_durably(tmp_path / "2", fill)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        fill(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_folder_durably(tmp_path / "1", fail)
    assert list(tmp_path.iterdir()) == []


def test_every_harm_is_noticed(tmp_path: Path) -> None:
    harms: dict[str, Callable[[Path], object]] = {
        "changed": lambda folder: (folder / "b").write_bytes(b"2" * 999 + b"3"),
        "cut": lambda folder: (folder / "b").write_bytes(b"2" * 999),
        "lost": lambda folder: (folder / "a").unlink(),
        "no digests": lambda folder: (folder / DIGESTS).unlink(),
        "torn digests": lambda folder: (folder / DIGESTS).write_text('{"a": '),
    }
    for name, harm in harms.items():
        write_folder_durably(tmp_path / name, fill)
        assert find_damage(tmp_path / name) is None
        harm(tmp_path / name)
        told = find_damage(tmp_path / name)
        assert told, name
        assert any(file in told for file in ("a", "b", DIGESTS)), told


def test_the_newest_are_kept(tmp_path: Path) -> None:
    folders = [tmp_path / str(n) for n in range(5)]
    for folder in folders:
        write_folder_durably(folder, fill)
    remove_all_but_newest(folders, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


def test_a_full_disk_is_a_line_with_path_and_remedy_and_what_was_written_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", overwrite=False)
    folder.create("seed = 0\n")
    folder.write_step(1, {"loss": 1.0}, [])
    kept = (folder.path / "metrics.jsonl").rename(tmp_path / "kept")
    (folder.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"No space left on device; free some room there, then --resume") as caught:
        folder.write_step(2, {"loss": 1.0}, [])
    assert str(folder.path) in str(caught.value)
    (folder.path / "metrics.jsonl").unlink()
    kept.rename(folder.path / "metrics.jsonl")
    folder.open_at_step("seed = 0\n", 1, 1)
    assert [row["step"] for row in folder.metric_rows] == [1]
    folder.write_step(2, {"loss": 1.0}, [])
    assert [row["step"] for row in folder.metric_rows] == [1, 2]


def test_a_resumed_run_has_nothing_of_a_process_that_was_killed_while_it_wrote(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", overwrite=False)
    folder.create("seed = 0\n")
    left = [
        place / ".unfinished-999999999-abcdefgh"
        for place in (folder.path, folder.checkpoints_folder, folder.states_folder)
    ]
    for each in left:
        each.mkdir(parents=True)
        with lock_folder(each):
            (each / "half").touch()
    RUN.validate_replaceable(folder.path)
    files = [folder.path / ".curves.png.999999999.unfinished", folder.path / "trajectories" / ".1.999999999.unfinished"]
    of_a_living_one = folder.path / f".report.html.{os.getpid()}.unfinished"
    for each in (*files, of_a_living_one):
        each.parent.mkdir(exist_ok=True)
        each.touch()
    folder.open_at_step("seed = 0\n", 0, 0)  # which has nothing of its own to write there
    assert not any(each.exists() for each in (*left, *files))
    assert of_a_living_one.exists()


USERS = [
    ".notes.2024.unfinished",
    ".unfinished-2024-chapters/thesis.txt",
    "trajectories/2024-notes.jsonl.gz",
    "checkpoints/checkpoint-12-kept/model.safetensors",
    "checkpoints/checkpoint-1-99/model.safetensors",
]


@pytest.mark.parametrize("name", USERS)
def test_a_resumed_run_keeps_what_a_user_put_into_its_folder(tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path / "run", overwrite=False)
    folder.create("seed = 0\n")
    mine = folder.path / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("years of work")
    folder.open_at_step("seed = 0\n", 0, 0)
    assert mine.read_text() == "years of work"
    if name.startswith("."):
        with pytest.raises(ConfigError, match="which `repl-rl train` did not write"):
            RUN.validate_replaceable(folder.path)


DAMAGED = ["\0" * 512, '{"step": 2, "lo', "[" * 100_000, "[]", "{}", '{"step": "2"}', "\ufffd"]


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_of_metrics_does_not_keep_a_run_from_going_on(
    tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path / "run", overwrite=False)
    folder.create("seed = 0\n")
    (folder.path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    folder.open_at_step("seed = 0\n", 3, 3)
    assert folder.metric_rows == [{"step": 1}, {"step": 3}]
    assert (folder.path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 3}\n'
    (told,) = caplog.messages
    assert told.endswith("metrics.jsonl: damaged lines that are left out: 1")


def test_a_disk_that_reports_errors_is_a_line_with_path_and_remedy(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", overwrite=False)
    folder.create("seed = 0\n")
    master, terminal = os.openpty()
    os.close(master)
    (folder.path / "metrics.jsonl").symlink_to(f"/proc/self/fd/{terminal}")  # whoever opens it is told EIO
    try:
        with pytest.raises(ConfigError, match=r"Input/output error; the disk reports errors: repair it.* --resume"):
            folder.write_step(1, {"loss": 1.0}, [])
    finally:
        os.close(terminal)


def test_what_is_no_matter_of_the_disk_passes(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a bug"), catch_os_errors("folder", tmp_path):
        raise RuntimeError("a bug")
    with (
        pytest.raises(ConfigError, match="No such file or directory; repair that"),
        catch_os_errors("folder", tmp_path),
    ):
        (tmp_path / "gone" / "file").write_text("")


def test_a_run_is_replaced_or_gone_on_with_not_both(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exclude each other; give one"):
        RunFolder(tmp_path / "run", overwrite=True, resume=True)
    with pytest.raises(ConfigError, match="--resume to continue"):
        RunFolder(tmp_path, overwrite=False)


def test_a_run_is_finished_when_it_says_so_after_as_many_steps(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", overwrite=False)
    folder.create("seed = 0\n")
    assert folder.exists
    assert not folder.is_finished(5)
    folder.write_summary({"status": "finished", "steps": 5})
    assert folder.is_finished(5)
    assert not folder.is_finished(6)
    folder.write_summary({"status": "interrupted", "steps": 5})
    assert not folder.is_finished(5)
