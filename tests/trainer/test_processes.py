"""Two processes equal one: a group may straddle them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


def run(
    processes: int, estimator: str, fast: bool, out: Path
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Train two steps in `processes` processes; the weights and the records of the first process."""
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
        command = [sys.executable, "-m", "tests.trainer.worker", estimator, str(int(fast)), str(out)]
        workers.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    outputs = [worker.communicate(timeout=280)[0].decode() for worker in workers]
    assert all(worker.returncode == 0 for worker in workers), outputs
    return load_file(out / "final" / "model.safetensors"), json.loads((out / "records.json").read_text())


@pytest.mark.heavy
@pytest.mark.parametrize("fast", [True, False])
def test_two_processes_train_the_same_weights_as_one(fast: bool, tmp_path: Path) -> None:
    # Three groups of two over two processes of three rollouts: the second group begins on one, ends on the other.
    one, records = run(1, "two_stream", fast, tmp_path / "one")
    two, records_two = run(2, "two_stream", fast, tmp_path / "two")
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=0, atol=1e-6)
    for a, b in zip(records, records_two, strict=True):
        for key in ("loss", "reward_mean", "sampled_tokens", "logprob_gap_max", "grad_norm"):
            assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-5), key
