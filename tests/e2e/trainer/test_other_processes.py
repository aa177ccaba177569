"""A run goes on in more or fewer processes than saved it: its weights are those of one that was never stopped."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from repl_rl.trainer.plugins.checkpoint import find_newest_state
from tests.support.trainer.launch import launch
from tests.support.trainer.tiny_policies import tiny_model

SMOOTH = "adamw_torch(eps=0.01)"
"""Where a gradient is nearly 0, Adam's usual epsilon blows up its rounding, and sums of other processes round
otherwise."""
FSDP2: Mapping[str, str] = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def part(run: Path, processes: int, stop_at: int, sharded: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    """Train in `run`, from where it is, until that step or to the end. Returns what was said."""
    with monkeypatch.context() as patched:
        for name, value in FSDP2.items() if sharded and processes > 1 else ():
            patched.setenv(name, value)
        return "".join(launch(processes, "tests.support.trainer.paused_training", str(run), str(stop_at), SMOOTH))


def tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    below: Sequence[object] = (
        [*value.values()] if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    )
    return [found for one in below for found in tensors(one)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process."""
    run = tmp_path_factory.mktemp("whole")
    launch(1, "tests.support.trainer.paused_training", str(run), "0", SMOOTH)
    return run


@pytest.mark.timeout(1200)  # launches one after the other, each with a limit of its own
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize(
    "ways",
    [pytest.param((2, 1, 2), marks=pytest.mark.heavy), pytest.param((1, 2, 1), marks=pytest.mark.soak)],
    ids=lambda ways: "-".join(map(str, ways)),
)
def test_a_run_goes_on_in_other_processes_and_back_with_equal_weights(
    ways: tuple[int, int, int], sharded: bool, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [part(tmp_path / "run", *place, sharded, monkeypatch) for place in zip(ways, (2, 4, 0), strict=True)]
    told = [f"saved by {before} processes, resumed by {now}" for before, now in pairwise(ways)]
    assert [text.count("resumed by") for text in said] == [0, 1, 1], "the first process says it, once"
    assert all(line in text for line, text in zip(told, said[1:], strict=True))
    ends = [find_newest_state(run / "states") for run in (tmp_path / "run", undisturbed)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert (ends[0].step, ends[0].processes) == (5, ways[-1])
    for name in ("weights", "optimizer"):
        mine, theirs = (tensors(end.load_tensors()[name]) for end in ends if end is not None)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    memories = [json.loads(end.metadata["parts"]) for end in ends if end is not None]
    assert memories[0]["curriculum"] == memories[1]["curriculum"][:1] * ways[-1], "its draws and solve rates"
    one = load_file(tmp_path / "run" / "checkpoints" / "final" / "model.safetensors")
    start = tiny_model().state_dict()
    assert max((weight - start[name]).abs().max().item() for name, weight in one.items()) > 1e-3
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
