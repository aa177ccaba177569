"""A small disk that fills up or turns read-only, and a process without files.

    python -m tests.support.full_disk WHAT PLACE

Run as root of a mount namespace (`unshare --user --map-root-user --mount`), where `PLACE` is a folder for the disk. It
prints what was told, a line each, and ends well if nothing else was lost.
"""

import errno
import gc
import hashlib
import io
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import TrainerState

from repl_rl import cli
from repl_rl.errors import ConfigError
from repl_rl.runs.run_folder import RunFolder
from repl_rl.runs.store import read_trajectories
from repl_rl.trainer.plugins.checkpoint import StepSnapshot, find_newest_state, get_rng_state
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trainer.weight_sync import SHARED
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.atomic_files import Json
from repl_rl.utils.installed_versions import collect_versions
from tests.support.run_folders import rollout
from tests.support.trainer.resumed_runs import PLAIN, STEPS, TASKS, check_alike, play
from tests.support.trainer.tiny_policies import SampledSource, tiny_model, tiny_tokenizer

PAGE = os.sysconf("SC_PAGE_SIZE")
"""What a tmpfs gives at a time: room ends at a multiple of it, in whatever file is written then."""
VERSIONS = collect_versions()
OFFSETS = 8
"""Places for each kind of write at which the room ends."""


class Disk:
    """A tmpfs, and a file on it that takes all room but what a test leaves."""

    def __init__(self, place: Path, size: int) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)
        self.place = place
        self._ballast = place / ".ballast"

    @property
    def free(self) -> int:
        return shutil.disk_usage(self.place).free

    def leave(self, room: int) -> None:
        with self._ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.free - room)

    def clear(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def remount(self, how: str) -> None:
        # `bind`: a user without privileges may change this mount, but not the file system behind it.
        subprocess.run(["mount", "-o", f"remount,bind,{how}", str(self.place)], check=True)


def boundary(step: int) -> StepSnapshot:
    said: dict[str, Json] = {"step": step, "policy_step": step, "processes": 1, "versions": VERSIONS, "said": {}}
    order = torch.Generator().get_state()
    return StepSnapshot(step, said, TrainerState(), {}, [get_rng_state()], order)


def save(folder: RunFolder, step: int) -> None:
    boundary(step).save(folder.states_folder, {"weights": {"w": torch.randn(16_384)}})


def trajectories(step: int, count: int) -> list[Trajectory]:
    """Of about 12 KiB each, packed."""
    rng = random.Random(step)
    return [rollout(step, f"task {n}", 1, rng.randbytes(6000).hex()) for n in range(count)]


def wide(step: int) -> dict[str, float]:
    """A row of some 40 KiB."""
    rng = random.Random(step)
    return {f"error/{rng.randrange(10**30)}": rng.random() for _ in range(650)}


WRITES: Mapping[str, Callable[[RunFolder], None]] = {
    "state": lambda folder: save(folder, 3),
    "trajectory": lambda folder: folder.write_step(3, {"loss": 1.0}, trajectories(3, 4)),
    "metric": lambda folder: folder.write_step(3, wide(3), []),
    "summary": lambda folder: folder.write_summary({"status": "finished", "steps": 3, "families_last": wide(9)}),
}


def digests(folder: Path) -> dict[Path, str]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def begun(path: Path) -> RunFolder:
    """A run of two steps with their states and a summary."""
    folder = RunFolder(path, overwrite=True)
    folder.create("seed = 0\n")
    for step in (1, 2):
        folder.write_step(step, {"loss": step / 2}, trajectories(step, 2))
        save(folder, step)
    folder.write_summary({"status": "interrupted", "steps": 2})
    return folder


def refused(write: Callable[[RunFolder], None], folder: RunFolder, reason: int) -> str:
    """What is told of a write that does not succeed."""
    with pytest.raises(ConfigError) as caught:
        write(folder)
    told = " ".join(str(caught.value).split())
    for part in (str(folder.path), os.strerror(reason), "then --resume"):
        assert part in told, told
    return told


def check_kept(folder: RunFolder, before: Mapping[Path, str]) -> None:
    """Every file is what it was, but that a row may be torn; all of it can be read."""
    now = digests(folder.path)
    changed = {file.name for file, digest in before.items() if now.get(file) != digest}
    assert changed <= {"metrics.jsonl"}, changed
    assert len(list(read_trajectories(folder.path / "trajectories" / "000001.jsonl.gz"))) == 2
    state = find_newest_state(folder.states_folder)
    assert state is not None
    assert state.step == 2


def check_goes_on(path: Path, write: Callable[[RunFolder], None]) -> None:
    """After the cause is gone the run is taken up, and what could not be written is."""
    folder = RunFolder(path, overwrite=False, resume=True)
    folder.open_at_step("seed = 0\n", 2, 2)
    assert [(row["step"], row["loss"]) for row in folder.metric_rows] == [(1, 0.5), (2, 1.0)]
    write(folder)
    again = RunFolder(path, overwrite=False, resume=True)
    again.open_at_step("seed = 0\n", 3, 3)
    assert [row["step"] for row in again.metric_rows][:2] == [1, 2]
    assert len({row["step"] for row in again.metric_rows}) == len(again.metric_rows)
    assert sum(1 for _ in read_trajectories(path)) in (4, 8)


def writes(disk: Disk) -> None:
    """Each kind of write, with the room ending at `OFFSETS` places in it."""
    for kind, write in WRITES.items():
        folder = begun(disk.place / "run")
        gc.collect()  # what was read of the run before holds its files, which were removed, until then
        before = disk.free
        write(folder)
        needed = (before - disk.free) // PAGE
        assert needed >= OFFSETS, (kind, needed)
        for room in sorted({n * needed // OFFSETS for n in range(OFFSETS)}):
            folder = begun(disk.place / "run")
            files = digests(folder.path)
            disk.leave(room * PAGE)
            print(f"{kind} {room * PAGE}: {refused(write, folder, errno.ENOSPC)}")
            check_kept(folder, files)
            disk.clear()
            check_goes_on(folder.path, write)


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def runs(disk: Disk) -> None:
    """A whole training whose disk fills up three times, at other places of it, and is emptied again."""
    play(disk.place / "whole")
    run, used = disk.place / "run", size(disk.place / "whole")
    for share in (0.25, 0.5, 0.8):
        disk.leave(max(0, int(used * share) - size(run)))
        with pytest.raises(ConfigError) as caught:
            play(run)
        print(f"run, {share:.0%} of its room: {' '.join(str(caught.value).split())}")
        disk.clear()
    play(run)
    check_alike(run, disk.place / "whole")


OUTPUTS = (
    ["sft", "--fresh"],
    ["transcripts", "--from-tasks", "builtin:count", "--count", "40", "--sandbox", "inprocess"],
)


def command(argv: Sequence[str]) -> tuple[int, str]:
    """Exit code of a command and its line about an error."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
        return cli.main(argv), " ".join(said.getvalue().split())


def outputs(disk: Disk) -> None:
    """Write the outputs of `sft` and `transcripts` on a disk that fills up, with an older output and without."""
    out = disk.place / "out"
    for verb in OUTPUTS:
        assert command([*verb, "--out", str(out)])[0] == 0
        needed = size(out)
        for older in (False, True):
            if not older:
                shutil.rmtree(out)
            files = digests(disk.place)
            for room in (PAGE, needed // 2):
                disk.leave(room)
                code, told = command([*verb, "--overwrite", "--seed", "1", "--out", str(out)])
                disk.clear()
                print(f"{verb[0]}: {told}")
                assert code == 2
                assert digests(disk.place) == files
                assert os.listdir(disk.place) == ["out"] * older
            assert command([*verb, "--overwrite", "--out", str(out)])[0] == 0
        shutil.rmtree(out)


def protected(disk: Disk) -> None:
    """A disk that becomes read-only, and a process that may open no further file."""
    folder = begun(disk.place / "run")
    files = digests(folder.path)
    for reason, hindered in ((errno.EROFS, read_only(disk)), (errno.EMFILE, no_files())):
        for kind, write in WRITES.items():
            with hindered():
                told = refused(write, folder, reason)
            print(f"{kind}: {told}")
            check_kept(folder, files)
    check_goes_on(folder.path, WRITES["trajectory"])


def read_only(disk: Disk) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def hindered() -> Iterator[None]:
        disk.remount("ro")
        try:
            yield
        finally:
            disk.remount("rw")

    return hindered


def no_files() -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def hindered() -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return hindered


def shared(place: Path) -> None:
    """Memory that fills up while a run goes on: its weights take another way, which is said once."""
    memory = Disk(SHARED, 20 << 20)
    said: list[str] = []
    ways: list[Path] = []

    class Watching(SampledSource):
        def load_weights(self, folder: Path, policy_step: int) -> None:
            ways.append(folder)
            super().load_weights(folder, policy_step)

    def on_step(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        if record.step == 2:
            memory.leave(0)

    source, ids = Watching(tiny_model()), [task.id for task in TASKS]
    config = replace(PLAIN, num_iterations=1)
    run_training(
        tiny_model(), tiny_tokenizer(), ids, source, config, place / "run", TrainingOptions(on_step, warn=said.append)
    )
    assert len(ways) >= STEPS - 1, ways
    assert SHARED in ways[0].parents
    assert SHARED not in ways[-1].parents
    assert not ways[-1].exists(), "it is removed at the end"
    (line,) = said
    print(" ".join(line.split()))


def main(what: str, place: Path) -> None:
    torch.set_num_threads(1)
    if what == "shared":
        shared(place)
    else:
        {"writes": writes, "runs": runs, "outputs": outputs, "protected": protected}[what](Disk(place, 24 << 20))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
