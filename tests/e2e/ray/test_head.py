"""The head of a cluster goes while a run is under way: the run ends by itself, and can be gone on with."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.processes import descendants, identity, wait_for

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
STEPS = 5_000
"""More than are played before the head goes, and in the time that nodes play on without it."""
ENDS_S = 90
"""30 s in which the cluster is waited for, one rollout's round, and what it takes to end."""
RUN = """--engine transformers --trainer.prompts-per-step 2 --trainer.group-size 2 --trainer.dtype float32
    --trainer.per-device-batch-size 4 --train-tasks 8 --eval-tasks 2 --rollout.max-lines 2
    --rollout.max-line-tokens 16"""


def start(folder: Path, fleet: str) -> subprocess.Popen[bytes]:
    words = f"train --name headless --resume {fleet} {RUN} --trainer.steps {STEPS}"
    words += " --checkpoint.every-s 0 --checkpoint.max-time-share 1.0"
    argv = [sys.executable, "-m", "repl_rl.cli", *words.split()]
    return subprocess.Popen(argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def rows(folder: Path) -> list[int]:
    """Steps that were told of."""
    file = folder / "runs" / "headless" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.is_file() else []


@pytest.fixture
def ended() -> Iterator[list[tuple[int, str]]]:
    """Processes that a test has started, which are ended with it."""
    seen: list[tuple[int, str]] = []
    yield seen
    for one in seen:
        if identity(one[0]) == one:
            os.kill(one[0], signal.SIGKILL)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_run_whose_head_is_killed_or_frozen_ends_with_one_line_and_is_gone_on_with_in_one_process(
    blow: signal.Signals, tmp_path: Path, ended: list[tuple[int, str]]
) -> None:
    run = start(tmp_path, "--workers ray --workers.max-workers 2 --workers.simulate-machines true")
    wait_for(lambda: len(rows(tmp_path)) >= 2, run, 600)
    ended += descendants(run.pid)
    (head,) = (p for p in psutil.Process(run.pid).children() if p.name() == "gcs_server")
    signal.sigtimedwait([], random.uniform(0, 2))
    head.send_signal(blow)
    _, said = run.communicate(timeout=ENDS_S)
    words = said.decode()
    assert run.returncode == 3, words
    assert "has not answered for" in words.splitlines()[-1]
    assert "Traceback" not in words
    played = rows(tmp_path)
    assert played == list(range(1, len(played) + 1))
    wait_for(lambda: not [one for one in ended if identity(one[0]) == one], None, 30)
    on = start(tmp_path, "--workers local")
    wait_for(lambda: len(rows(tmp_path)) >= len(played) + 2, on, 300)
    on.send_signal(signal.SIGTERM)
    _, said = on.communicate(timeout=ENDS_S)
    assert on.returncode == 128 + signal.SIGTERM, said.decode()
    told = rows(tmp_path)
    assert told == list(range(1, len(told) + 1))
