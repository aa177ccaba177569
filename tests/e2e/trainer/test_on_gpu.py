"""Training, scoring and sampling on a device that is not the CPU, and what turns red where code forgets that."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from repl_rl.utils.atomic_files import Json
from tests.support.trainer.device_cases import CASES

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(300)


def run(place: str, cases: Sequence[str], root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """In a process of its own: PyTorch can be told of a device once, and forgets none."""
    command = [sys.executable, "-m", "tests.support.trainer.device_cases", place, *cases]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False, timeout=280)


def told(done: subprocess.CompletedProcess[str]) -> dict[str, list[float]]:
    assert done.returncode == 0, done.stderr[-3000:]
    found: Json = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.heavy
def test_a_device_that_is_not_the_cpu_comes_to_what_the_cpu_comes_to() -> None:
    here, there = (told(run(place, list(CASES))) for place in ("cpu", "pretend:0"))
    for case in CASES:
        # attention is computed by another of PyTorch's ways there, which bfloat16 rounds elsewhere
        close = 0.2 if "bfloat16" in case else 1e-3
        assert there[case] == pytest.approx(here[case], rel=close, abs=close), case


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("file", "right", "wrong", "case", "message"),
    [
        (
            "trainer/grpo.py",
            "broadcast_to_tokens(advantages_B_L, rows, width).to(self.accelerator.device)",
            "broadcast_to_tokens(advantages_B_L, rows, width)",
            "fast",
            "all tensors must be on pretend:0",
        ),
        (
            "trainer/forward_pass.py",
            "pass_logprobs.float()",
            "pass_logprobs.bfloat16()",
            "float32",
            "same dtype",
        ),
        (
            "trainer/prefix_tree.py",
            "torch.arange(keys, device=self.ids.device)",
            "torch.arange(keys)",
            "trees, float32",
            "all tensors must be on pretend:0",
        ),
        (
            "engine/transformers_engine.py",
            "return torch.Generator(self.device)",
            "return torch.Generator()",
            "sampled",
            "a generator of cpu",
        ),
    ],
    ids=["a tensor left on the CPU", "another number format", "a mask left on the CPU", "a generator of the CPU"],
)
def test_a_mistake_about_devices_turns_red(
    file: str, right: str, wrong: str, case: str, message: str, tmp_path: Path
) -> None:
    broken = copied(tmp_path) / file
    text = broken.read_text()
    assert right in text
    broken.unlink()
    broken.write_text(text.replace(right, wrong))
    done = run("pretend:0", [case], tmp_path)
    assert done.returncode
    assert message in done.stderr


def copied(folder: Path) -> Path:
    """The package and its tests again, as links: a file of it may be replaced."""
    for name in ("repl_rl", "tests", "benchmarks", "sandbox", "prompts"):
        for file in (ROOT / name).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                link = folder / file.relative_to(ROOT)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file)
    return folder / "repl_rl"
