"""Snapshots of a seeded run: the files that it leaves, and each of its steps bit for bit.

Record a deliberate change with `pytest tests/e2e/test_seeded_run.py --snapshot-update`, and name it in CHANGELOG.md.
"""

import hashlib
import json
import platform
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from repl_rl.runs.store import read_trajectories
from tests.support.forked_commands import run_command

STEPS = 3
SNAPSHOTS = Path(__file__).parent / "__snapshots__" / "test_seeded_run.ambr"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a seeded run."""
    return _train(tmp_path_factory.mktemp("snapshots"))


def _train(out: Path) -> Path:
    """Train the bundled policy: one thread, one rollout at a time, a state after each step."""
    command = (
        *("train", "--engine", "transformers", "--concurrency", "1", "--seed", "7", "--name", "seeded"),
        *("--out", str(out), "--train-tasks", "24", "--eval-tasks", "2", "--trainer.steps", str(STEPS)),
        *("--trainer.prompts-per-step", "3", "--trainer.group-size", "4", "--trainer.save-steps", "2"),
        *("--checkpoint.every-s", "0", "--checkpoint.max-time-share", "1.0", "--checkpoint.keep-last", str(STEPS)),
        *("--trainer.learning-rate", "1e-3"),
        # Which line a clock cuts short depends on the machine's other work.
        *("--limits.line-timeout-s", "300", "--rollout.max-wall-s", "3000"),
    )
    run_command(*command, timeout_s=600).check_returncode()
    return out / "seeded"


def test_files_of_a_run(run: Path, snapshot: SnapshotAssertion) -> None:
    """The names of a run's files, and the keys and types of all that they say."""
    assert dict(_files(run)) == snapshot


def test_rollouts_of_the_first_step(run: Path, snapshot: SnapshotAssertion) -> None:
    """Sampled ids, observed ids and outcomes, before any update."""
    rows = [row for row in _rollouts(run) if row.startswith("0-")]
    assert len(rows) == 12
    assert rows == snapshot


def test_rollouts_gradients_and_weights_of_each_step(run: Path, snapshot: SnapshotAssertion, tmp_path: Path) -> None:
    """After each step: weights, the optimizer's moments (which are the gradients', averaged) and random generators.

    Floating point differs between kinds of processors, so there is a snapshot for each kind that it was made on. On
    another kind, a second run has to equal the first one.
    """
    kind = f"{_processor()} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"
    found = _numbers(run)
    assert len(found) == STEPS + 1
    if f"[{kind}]" in SNAPSHOTS.read_text(encoding="utf-8") or snapshot.session.update_snapshots:
        assert found == snapshot(name=kind)
    else:
        assert found == _numbers(_train(tmp_path))


def test_every_snapshot_is_of_a_test_that_is_there() -> None:
    names = re.findall(r"^# name: (.*)$", SNAPSHOTS.read_text(encoding="utf-8"), re.MULTILINE)
    of_a_processor = f"{test_rollouts_gradients_and_weights_of_each_step.__name__}["
    assert {name for name in names if not name.startswith(of_a_processor)} == {
        test_files_of_a_run.__name__,
        test_rollouts_of_the_first_step.__name__,
    }


def _processor() -> str:
    """The machine's instruction set, with vendor, family and model: math libraries choose their code by these."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return " ".join([platform.machine(), *(fields.get(key, "-") for key in ("vendor_id", "cpu family", "model"))])


def _rollouts(run: Path) -> list[str]:
    played = sorted(read_trajectories(run / "trajectories"), key=lambda t: t.id)
    return [f"{t.id} {t.stop.value} {t.outcome} {_digest(repr(t.completion_ids).encode())}" for t in played]


def _numbers(run: Path) -> Mapping[str, str]:
    """A digest of all rollouts, and of all tensors after each step."""
    states = {
        step.name: sorted(_tensors(torch.load(step / "tensors.pt", weights_only=False)))
        for step in sorted((run / "states").iterdir())
        if step.is_dir()
    }
    assert min(map(len, states.values())) > 100
    digests = {step: _digest("".join(rows).encode()) for step, rows in states.items()}
    return {"rollouts": _digest("".join(_rollouts(run)).encode()), **digests}


def _files(run: Path) -> Iterator[tuple[str, object]]:
    for file in sorted(file for file in run.rglob("*") if file.is_file()):
        name = file.relative_to(run).as_posix()
        text = file.read_text(encoding="utf-8") if file.suffix in {".json", ".jsonl", ".toml"} else ""
        match file.suffix:
            case ".jsonl":
                yield name, _shape([json.loads(line) for line in text.splitlines()])
            case ".json" if not name.startswith("checkpoints") or file.name == "repl_rl.json":
                yield name, _shape(json.loads(text))
            case ".toml":
                yield name, _shape(tomllib.loads(text))
            case ".gz":
                yield name, "gzip"
            case _:
                yield name, "file"


def _shape(value: object) -> object:
    """Keys and types of a JSON value; items of a list are merged."""
    if isinstance(value, Mapping):
        return {key: _shape(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        shapes = {json.dumps(_shape(item), sort_keys=True) for item in value}
        return [json.loads(shape) for shape in sorted(shapes)]
    return type(value).__name__


def _tensors(value: object) -> Iterator[str]:
    """A digest of each tensor in nested dictionaries and sequences."""
    if isinstance(value, torch.Tensor):
        yield f"{tuple(value.shape)} {value.dtype} {_digest(value.detach().cpu().contiguous().numpy().tobytes())}"
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            yield from _tensors(item)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
