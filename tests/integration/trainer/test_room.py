"""Weights on their way to the engine: where there is room for them, and what is said where there is none."""

import shutil
from pathlib import Path

import pytest
import torch

from repl_rl.errors import ConfigError, EngineError
from repl_rl.trainer.weight_sync import (
    SHARED,
    compute_weight_bytes,
    find_folder_with_space,
    open_weights_folder,
    save_weights,
)
from tests.support.trainer.tiny_policies import tiny_model

SIZE = 1 << 30


def test_weights_go_through_memory_where_they_fit_and_through_files_where_they_do_not(tmp_path: Path) -> None:
    memory, files = tmp_path / "memory", tmp_path / "files"
    memory.mkdir()
    files.mkdir()
    roomy = {memory: 2 * SIZE, files: 9 * SIZE}.__getitem__
    tight = {memory: SIZE - 1, files: 9 * SIZE}.__getitem__
    assert find_folder_with_space(SIZE, [memory, files], roomy) == memory
    assert find_folder_with_space(SIZE, [memory, files], tight) == files
    assert find_folder_with_space(SIZE, [tmp_path / "nowhere", files], tight) == files


def test_no_room_anywhere_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is '7 MiB in .*'; the policy takes 1024 MiB; free some, or set TMPDIR"):
        find_folder_with_space(SIZE, [tmp_path], lambda place: 7 << 20)


def test_going_another_way_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    with open_weights_folder(SIZE, said.append, find_folder=lambda size: tmp_path) as folder:
        assert folder.parent == tmp_path
    assert len(said) == 1
    assert f"{SHARED} has no room for 1024 MiB" in said[0]
    assert not folder.exists()


def test_weights_that_cannot_be_written_after_all_are_an_error_with_a_remedy(tmp_path: Path) -> None:
    model = tiny_model()
    with pytest.raises(EngineError, match=r"could not be written to .*gone: .*; free some room there, or set TMPDIR"):
        save_weights(model, model.state_dict(), tmp_path / "gone")


def test_the_size_is_that_of_the_file(tmp_path: Path) -> None:
    model = tiny_model().to(torch.bfloat16)
    save_weights(model, model.state_dict(), tmp_path)
    written = (tmp_path / "model.safetensors").stat().st_size
    assert abs(written - compute_weight_bytes(model)) < 16384
    assert shutil.disk_usage(tmp_path).free > 0
