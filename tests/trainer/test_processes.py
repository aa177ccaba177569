"""Two processes equal one: a group may straddle them, and each may need another number of forward passes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.policies import tiny_model

ROOT = Path(__file__).parents[2]


def launch(processes: int, module: str, *arguments: str, limit_s: float = 280) -> None:
    """Run a module in so many processes that know of each other, and see all of them end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = []
    for rank in range(processes):
        env = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        if processes == 1:
            env = {k: v for k, v in env.items() if "RANK" not in k and not k.startswith(("WORLD", "MASTER"))}
        command = [sys.executable, "-m", module, *arguments]
        workers.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    try:
        outputs = [worker.communicate(timeout=limit_s)[0].decode() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert all(worker.returncode == 0 for worker in workers), outputs


def run(
    processes: int, estimator: str, fast: bool, weight: float, out: Path
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Train two steps in `processes` processes; the weights and the records of the first process."""
    launch(processes, "tests.trainer.worker", estimator, str(int(fast)), str(weight), str(out))
    return load_file(out / "final" / "model.safetensors"), json.loads((out / "records.json").read_text())


@pytest.mark.heavy
@pytest.mark.parametrize(("fast", "weight"), [(True, 0.0), (False, 0.0), (True, 0.3)])
def test_two_processes_train_the_same_weights_as_one(fast: bool, weight: float, tmp_path: Path) -> None:
    """`weight` is that of what the console printed."""
    # Three groups of two over two processes of three rollouts: the second group begins on one, ends on the other.
    one, records = run(1, "two_stream", fast, weight, tmp_path / "one")
    two, records_two = run(2, "two_stream", fast, weight, tmp_path / "two")
    for name, expected in one.items():
        torch.testing.assert_close(two[name], expected, rtol=0, atol=1e-6)
    start = tiny_model()
    assert max((weight - start.get_parameter(name)).abs().max().item() for name, weight in one.items()) > 1e-3
    for a, b in zip(records, records_two, strict=True):
        told = ("observation_loss",) if weight else ()
        for key in ("loss", "reward_mean", "sampled_tokens", "logprob_gap_max", "grad_norm", *told):
            assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-5), key


@pytest.mark.parametrize("steps", [
    pytest.param(40, marks=pytest.mark.heavy),
    pytest.param(500, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
])  # fmt: skip
@pytest.mark.parametrize("alike", [(), ("trees",)], ids=["rows", "trees"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_processes_that_need_other_numbers_of_passes_wait_for_nobody_and_equal_one(
    kind: str, alike: tuple[str, ...], steps: int, tmp_path: Path
) -> None:
    found = []
    for name, processes in (("one", 1), (kind, 2)):
        folder = tmp_path / name
        folder.mkdir()
        limit_s = 1500 if steps > 99 else 280
        launch(processes, "tests.trainer.passes", name, str(steps), str(folder), *alike, limit_s=limit_s)
        found.append(load_file(folder / "weights.safetensors"))
    one, two = found
    start = tiny_model(hidden=16)
    apart = max((two[name] - weight).abs().max().item() for name, weight in one.items())
    moved = max((weight - start.get_parameter(name)).abs().max().item() for name, weight in one.items())
    print(f"{kind}, {steps} steps: weights moved by up to {moved:.3g}, two processes are {apart:.3g} from one")
    assert apart <= 1e-6
    assert moved > 1e-3
