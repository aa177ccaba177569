"""A disk that fills up anywhere or turns read-only, a process without files: nothing older is lost; a line says so."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = ("unshare", "--user", "--map-root-user", "--mount")
"""A mount namespace in which one may mount."""


@cache
def mounts() -> bool:
    asked = [*OWN, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def told(what: str, place: Path) -> list[str]:
    """What was told on a disk of its own, a line for each write that was refused."""
    if not mounts():
        pytest.skip("nothing can be mounted here, not even in a namespace of its own")
    command = [*OWN, sys.executable, "-m", "tests.support.full_disk", what, str(place)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout.splitlines()


@pytest.mark.heavy
def test_room_that_ends_at_any_of_32_places_loses_nothing_and_says_where_and_what_to_do(tmp_path: Path) -> None:
    lines = told("writes", tmp_path)
    kinds = [line.split()[0] for line in lines]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(("state", "trajectory", "metric", "summary"), 8)
    assert all("No space left on device; free some room there, then --resume" in line for line in lines)


@pytest.mark.heavy
def test_a_training_whose_disk_fills_up_three_times_ends_as_one_with_room(tmp_path: Path) -> None:
    assert len(told("runs", tmp_path)) == 3


@pytest.mark.heavy
def test_room_that_ends_while_sft_or_transcripts_write_leaves_the_older_output_or_none(tmp_path: Path) -> None:
    lines = told("outputs", tmp_path)
    assert [line.partition(":")[0] for line in lines] == ["sft"] * 4 + ["transcripts"] * 4
    assert all("No space left on device; free some room there, then give the command again" in line for line in lines)


@pytest.mark.heavy
def test_a_disk_that_turns_read_only_and_a_process_without_files_lose_nothing_and_say_so(tmp_path: Path) -> None:
    lines = told("protected", tmp_path)
    assert len([line for line in lines if "Read-only file system; have it mounted" in line]) == 4
    assert len([line for line in lines if "Too many open files" in line and "ulimit -n" in line]) == 4


@pytest.mark.heavy
def test_weights_take_another_way_where_shared_memory_fills_up_and_that_is_said_once(tmp_path: Path) -> None:
    (line,) = told("shared", tmp_path)
    assert "weights reach the engine through" in line
    assert "No space left on device" in line
