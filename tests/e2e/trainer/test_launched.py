"""`torchrun` and `accelerate launch` with `repl-rl train` on the command line: two processes, DDP and FSDP2."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from repl_rl.errors import ConfigError
from repl_rl.trainer.plugins.checkpoint import list_states
from repl_rl.trainer.plugins.fsdp import validate_fsdp
from tests.support.documents import PAGES, ROOT
from tests.support.processes import wait_for


def _of_the_page(program: str, *more: str) -> tuple[str, ...]:
    """How docs/howto.md launches the command, with flags that let several launches be under way on one machine."""
    (line,) = re.findall(rf"^{program} (.*) -m repl_rl.cli train", PAGES["docs/howto.md"], re.MULTILINE)
    module = {"torchrun": "torch.distributed.run", "accelerate launch": "accelerate.commands.launch"}[program]
    return module, *more, *shlex.split(line)


TORCHRUN = _of_the_page("torchrun", "--standalone")
FSDP2 = _of_the_page("accelerate launch", "--num_machines", "1", "--main_process_port", "0")
SMALL = shlex.split(
    "--engine transformers --sandbox unsafe --concurrency 1 --trainer.dtype float32 --trainer.prompts-per-step 2 "
    "--trainer.group-size 4 --trainer.warmup-steps 0 --train-tasks 16 --eval-tasks 2 --rollout.max-lines 3 "
    "--rollout.max-line-tokens 24 --limits.line-timeout-s 60 --rollout.max-wall-s 600"
)
STEPS = 3


@contextmanager
def started(out: Path, how: Sequence[str], *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """`repl-rl train` in two processes; whatever is left of them ends with the block."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *how, "-m", "repl_rl.cli", "train", "--out", str(out), *SMALL, *flags]
    with subprocess.Popen(command, env=env, cwd=out, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            for each in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
                each.kill()
            process.kill()


def done(out: Path, how: Sequence[str], *flags: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a run that ends by itself."""
    with started(out, how, *flags) as process:
        output, errors = process.communicate(timeout=280)
    return process.returncode, output.decode(), errors.decode()


def rows_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def cut_back(run: Path, to: int) -> None:
    """As if the run had been stopped by a power failure after its state of a step."""
    for state in list_states(run / "states"):
        if int(state.name) > to:
            shutil.rmtree(state)
    shutil.rmtree(run / "checkpoints" / "final")
    (run / "summary.json").unlink()


@pytest.mark.heavy
@pytest.mark.parametrize("how", [TORCHRUN, FSDP2], ids=["torchrun-ddp", "accelerate-fsdp2"])
def test_two_processes_train_from_the_command_line_and_go_on_bit_for_bit(how: Sequence[str], tmp_path: Path) -> None:
    flags = [
        "--name",
        "run",
        "--trainer.steps",
        str(STEPS),
        "--checkpoint.every-s",
        "0",
        "--checkpoint.keep-last",
        "9",
        "--eval-steps",
        "2",
    ]
    code, output, errors = done(tmp_path, how, *flags)
    assert code == 0, errors
    run = tmp_path / "run"
    assert output.count("held-out tasks, first") == output.count("held-out tasks, last") == 1
    assert output.count(f"step    {STEPS}/{STEPS}") == 1
    undisturbed, first = rows_of(run), load_file(run / "checkpoints" / "final" / "model.safetensors")
    assert [row["step"] for row in undisturbed] == [1, 2, 3]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["processes"]) == ("finished", 2)
    assert (run / "report.html").is_file()
    cut_back(run, 1)
    code, output, errors = done(tmp_path, how, *flags, "--resume")
    assert code == 0, errors
    assert output.count("after step 1") == 1
    again = load_file(run / "checkpoints" / "final" / "model.safetensors")
    assert again.keys() == first.keys()
    assert all(torch.equal(again[name], weight) for name, weight in first.items())
    told = [(row["step"], row["loss"], row["grad_norm"], row["sampled_tokens"]) for row in rows_of(run)]
    assert told == [(row["step"], row["loss"], row["grad_norm"], row["sampled_tokens"]) for row in undisturbed]
    assert json.loads((run / "summary.json").read_text())["resumed_at_steps"] == [1]


@pytest.mark.heavy
@pytest.mark.parametrize("blow", ["the launcher's SIGTERM", "the death of one process"])
def test_all_processes_end_with_one(blow: str, tmp_path: Path) -> None:
    with started(tmp_path, TORCHRUN, "--name", "run", "--trainer.steps", "500") as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_for(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) >= 2, process, 200)
        family = psutil.Process(process.pid).children(recursive=True)
        ranks = {each.environ()["RANK"]: each for each in psutil.Process(process.pid).children()}
        assert ranks.keys() == {"0", "1"}
        if blow.endswith("SIGTERM"):
            process.send_signal(signal.SIGTERM)
        else:
            ranks["1"].kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert psutil.wait_procs(family, timeout=10)[1] == []
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] in ("interrupted", "failed"), errors.decode()
    assert list_states(tmp_path / "run" / "states")


@pytest.mark.heavy
def test_what_is_wrong_is_said_once_by_the_first_process(tmp_path: Path) -> None:
    code, output, errors = done(
        tmp_path, TORCHRUN, "--name", "run", "--trainer.prompts-per-step", "3", "--trainer.group-size", "3"
    )
    assert code != 0
    assert errors.count("repl-rl: error: rollouts a step is 9; 2 processes must share them evenly") == 1
    assert output == ""
    assert not (tmp_path / "run").exists()


def test_fsdp_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    validate_fsdp(1, 8)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match=r"FSDP_VERSION is '1'.*--fsdp_version 2"):
        validate_fsdp(2, 0)
    monkeypatch.setenv("FSDP_VERSION", "2")
    validate_fsdp(2, 0)
    with pytest.raises(ConfigError, match=r"processes is 1; FSDP needs at least 2"):
        validate_fsdp(1, 0)
    with pytest.raises(ConfigError, match=r"trainer.lora_rank is 8; adapters are not trained under FSDP"):
        validate_fsdp(2, 8)
