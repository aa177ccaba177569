"""A folder that is replaced is there through SIGKILL at any moment: the older or the newer one, and each is whole."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.cli.transcripts import TRANSCRIPTS
from repl_rl.errors import ConfigError
from repl_rl.runs.store.export_formats import TABLE
from repl_rl.sft.finetune_config import POLICY
from repl_rl.utils import atomic_files as folders
from repl_rl.utils.atomic_files import (
    OutputFolder,
    exchange_names,
    find_damage,
    list_contents,
    open_output_folder,
    replace_folder_atomically,
    restore_backup,
    write_folder_durably,
)
from repl_rl.utils.file_lock import lock_folder, write_marker
from tests.support.kill_at_write import killed_at_each_write

FILES = {POLICY: "config.json", TRANSCRIPTS: "transcripts.json", TABLE: "state.json"}
"""A file of each kind of folder."""
OLD, NEW = "seed = 0\n", "seed = 1\n"


@pytest.fixture(params=["exchange", "two renames"])
def exchanges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True where the file system exchanges two names."""
    if request.param == "two renames":
        monkeypatch.setattr(folders, "exchange_names", lambda one, other: False)
    return bool(request.param == "exchange")


def fill(folder: Path, kind: OutputFolder, said: str) -> None:
    (folder / FILES[kind]).write_text(said)
    if kind is TRANSCRIPTS:
        (folder / "trajectories").mkdir(exist_ok=True)
        (folder / "config.toml").write_text(said)


def older(final: Path, kind: OutputFolder) -> Path:
    final.mkdir(parents=True)
    write_marker(final, kind.verb)
    fill(final, kind, OLD)
    return final


def says(folder: Path, kind: OutputFolder) -> str:
    """Content of a complete folder."""
    said = (folder / FILES[kind]).read_text()
    if kind is TRANSCRIPTS:
        assert list_contents(folder) == ["config.toml", "trajectories", "transcripts.json"]
        assert (folder / "config.toml").read_text() == said
    else:
        assert list_contents(folder) == [FILES[kind]]
    return said


def replace(final: Path, kind: OutputFolder) -> None:
    """As `export` does."""
    with replace_folder_atomically(final, kind) as made:
        fill(made, kind, NEW)


def overwrite(final: Path, kind: OutputFolder) -> None:
    """As `sft` and `transcripts` do."""
    with open_output_folder(final, kind, overwrite=True) as made:
        fill(made, kind, NEW)


@pytest.mark.parametrize(("work", "kind"), [(replace, TABLE), (overwrite, POLICY), (overwrite, TRANSCRIPTS)])
def test_a_folder_that_is_replaced_is_there_through_a_kill_at_any_write(
    tmp_path: Path, exchanges: bool, work: Callable[[Path, OutputFolder], None], kind: OutputFolder
) -> None:
    final = tmp_path / "out"
    older(final, kind)
    seen, restored = set[str](), 0
    for _ in killed_at_each_write(lambda: work(final, kind)):
        if not final.exists():
            assert not exchanges
            assert restore_backup(final, kind)
            restored += 1
        seen.add(says(final, kind))
        work(final, kind)  # the next call
        assert says(final, kind) == NEW
        assert os.listdir(tmp_path) == ["out"]
        shutil.rmtree(final)
        older(final, kind)
    assert seen == {OLD, NEW}
    assert bool(restored) is not exchanges


@pytest.mark.parametrize("kind", [POLICY, TRANSCRIPTS])
def test_a_new_folder_is_there_whole_or_not_at_all_through_a_kill_at_any_write(
    tmp_path: Path, kind: OutputFolder
) -> None:
    final = tmp_path / "out"
    seen = set[str]()
    for _ in killed_at_each_write(lambda: overwrite(final, kind)):
        seen.add(says(final, kind) if final.exists() else "nothing")
        overwrite(final, kind)  # the next call
        assert says(final, kind) == NEW
        assert os.listdir(tmp_path) == ["out"]
        shutil.rmtree(final)
    assert seen == {"nothing", NEW}


def stopped_between_two_renames(final: Path, kind: OutputFolder) -> None:
    older(final, kind).rename(final.with_name(f".{final.name}.older"))


def test_a_call_that_does_not_replace_brings_the_older_one_back_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for command, kind in (("sft --fresh", POLICY), ("export runs", TABLE)):
        final = tmp_path / kind.verb
        stopped_between_two_renames(final, kind)
        (tmp_path / "link").symlink_to(final)
        assert main([*command.split(), "--out", str(tmp_path / "link")]) == 2
        (tmp_path / "link").unlink()
        assert f"{final} was restored: a command that was to replace it was stopped" in caplog.text
        assert "--overwrite" in capsys.readouterr().err
        assert says(final, kind) == OLD
    assert sorted(os.listdir(tmp_path)) == ["export", "sft"]


def test_nothing_is_brought_back_in_the_place_of_another_or_from_a_process_at_work(tmp_path: Path) -> None:
    final, kept = tmp_path / "out", tmp_path / ".out.older"
    stopped_between_two_renames(final, POLICY)
    with lock_folder(kept):
        assert not restore_backup(final, POLICY)
    assert not restore_backup(final, TABLE)  # another verb's
    final.mkdir()
    assert not restore_backup(final, POLICY)
    final.rmdir()
    assert restore_backup(final, POLICY)
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_of_a_users_that_has_the_name_of_an_older_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "exchange_names", lambda one, other: False)
    final = older(tmp_path / "out", TABLE)
    (tmp_path / ".out.older").mkdir()
    (tmp_path / ".out.older" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match=r"\.out\.older.*thesis\.txt"):
        replace(final, TABLE)
    assert says(final, TABLE) == OLD
    assert sorted(os.listdir(tmp_path)) == [".out.older", "out"]


def test_what_is_refused_for_another_reason_is_raised(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as raised:
        exchange_names(tmp_path / "one", tmp_path / "other")
    assert raised.value.errno == errno.ENOENT


def test_a_state_that_is_written_again_is_there_through_a_kill_at_any_write(tmp_path: Path) -> None:
    final = tmp_path / "000001"

    def write(said: str) -> None:
        def fill_state(made: Path) -> None:
            (made / "state").write_text(said)

        write_folder_durably(final, fill_state)

    write(OLD)
    for _ in killed_at_each_write(lambda: write(NEW)):
        assert find_damage(final) is None
        assert (final / "state").read_text() in (OLD, NEW)
