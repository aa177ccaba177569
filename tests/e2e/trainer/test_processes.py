"""Two processes equal one: a group may straddle them, and each may need another number of forward passes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.trainer import training_process
from tests.support.trainer.forward_pass_process import KINDS, WAYS, learned
from tests.support.trainer.launch import launch
from tests.support.trainer.tiny_policies import tiny_model


def stored(out: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """The weights of a training and the records of its first process."""
    return load_file(out / "final" / "model.safetensors"), json.loads((out / "records.json").read_text())


@pytest.fixture(scope="module")
def trained_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that two processes train in each of `training_process.WAYS`."""
    folder = tmp_path_factory.mktemp("two")
    launch(2, "tests.support.trainer.training_process", str(folder))
    return folder


@pytest.mark.heavy
@pytest.mark.parametrize("number", range(len(training_process.WAYS)))
def test_two_processes_train_the_same_weights_as_one(number: int, trained_by_two: Path, tmp_path: Path) -> None:
    # Three groups of two over two processes of three rollouts: the second group begins on one, ends on the other.
    training_process.trained(training_process.WAYS[number], tmp_path / "one")
    one, records = stored(tmp_path / "one")
    two, records_two = stored(trained_by_two / str(number))
    for name, expected in one.items():
        torch.testing.assert_close(two[name], expected, rtol=0, atol=1e-6)
    start = tiny_model()
    assert max((weight - start.get_parameter(name)).abs().max().item() for name, weight in one.items()) > 1e-3
    for a, b in zip(records, records_two, strict=True):
        for key in ("loss", "reward_mean", "sampled_tokens", "logprob_gap_max", "grad_norm"):
            assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-5), key


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(40, marks=pytest.mark.heavy),
        pytest.param(500, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
def by_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """So many steps, and the weights that two processes learned in them, by kind and way."""
    steps: int = request.param
    folder = tmp_path_factory.mktemp("two")
    launch(
        2, "tests.support.trainer.forward_pass_process", str(steps), str(folder), limit_s=1500 if steps > 99 else 280
    )
    return steps, folder


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_processes_that_need_other_numbers_of_passes_wait_for_nobody_and_equal_one(
    kind: str, way: str, by_two: tuple[int, Path], tmp_path: Path
) -> None:
    steps, folder = by_two
    learned("one", way == "trees", steps, tmp_path / "one.safetensors")
    one, two = load_file(tmp_path / "one.safetensors"), load_file(folder / f"{kind}-{way}.safetensors")
    start = tiny_model(hidden=16)
    apart = max((two[name] - weight).abs().max().item() for name, weight in one.items())
    moved = max((weight - start.get_parameter(name)).abs().max().item() for name, weight in one.items())
    print(f"{kind}, {steps} steps: weights moved by up to {moved:.3g}, two processes are {apart:.3g} from one")
    assert apart <= 1e-6
    assert moved > 1e-3
