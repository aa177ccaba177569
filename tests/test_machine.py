"""What belongs to this machine: files and folders that are whole, calls that are left behind, installed packages."""

import os
from pathlib import Path

import pytest

from repl_rl.machine.files import whole_file, write_whole
from repl_rl.machine.folders import whole_folder


def test_a_file_that_is_not_finished_leaves_the_older_one_and_nothing_else(tmp_path: Path) -> None:
    final = tmp_path / "a" / "figures.json"
    write_whole(final, "first\n")
    with pytest.raises(ZeroDivisionError), whole_file(final) as torn:
        torn.write_text("half")
        print(1 / 0)
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
    with whole_folder(final) as made:
        (made / "old").touch()
    with pytest.raises(ZeroDivisionError), whole_folder(final, replace=True) as made:
        (made / "half").touch()
        print(1 / 0)
    assert os.listdir(final) == ["old"]
    with whole_folder(final, replace=True) as made:
        (made / "new").touch()
    assert os.listdir(final) == ["new"]
    assert os.listdir(tmp_path) == ["policy"]
