"""SIGTERM, as clusters send it: the run says where it stopped, and nothing of it is left."""

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from repl_rl.errors import EngineDied, EngineError
from repl_rl.utils.stop_signals import (
    Terminated,
    defer_signals,
    explain_error,
    handle_stop_signals,
    hold_signals,
    release_signals,
)
from tests.support.processes import command, descendants, identity, shared_files, wait_for

LIMIT_S = 10.0
"""From SIGTERM to the end of the process."""
PLUGINS = '''
import asyncio
from pathlib import Path

import torch

from repl_rl import ReplSampler
from repl_rl.credit.advantage_estimators import ESTIMATORS


class Stuck(ReplSampler):
    """Once there is the file `sampling`, a rollout that does not end; `passing` is only noted."""

    async def rollout(self, episode):
        if Path("passing").exists():
            Path("reached").touch()
        if Path("sampling").exists():
            Path("reached").touch()
            await asyncio.Event().wait()
        await super().rollout(episode)


def busy(group):
    """Once there is the file `updating`, a backward pass without end."""
    weights = torch.zeros(256, 256, requires_grad=True)
    while Path("updating").exists():
        Path("reached").touch()
        (weights @ weights).sum().backward()
    return ESTIMATORS["outcome"](group)
'''
FLAGS = shlex.split(
    "--name run --sampler plugins:Stuck --trainer.estimator plugins:busy --trainer.steps 500 --train-tasks 64 "
    "--trainer.prompts-per-step 2 --trainer.group-size 4 --eval-tasks 8 --rollout.max-lines 4 --concurrency 16"
)


@dataclass
class Run:
    """A training that is stuck somewhere."""

    process: subprocess.Popen[bytes]
    folder: Path
    below: set[tuple[int, str]] = field(default_factory=set)
    shared: set[Path] = field(default_factory=set)

    def look(self) -> None:
        """Take down what must be gone in the end."""
        self.below = set(descendants(self.process.pid))
        self.shared = {f for pid in (self.process.pid, *(pid for pid, _ in self.below)) for f in shared_files(pid)}

    def rows(self) -> int:
        metrics = self.folder / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@contextmanager
def training(desk: Path, where: str, engine: str, *before: str) -> Iterator[Run]:
    """A training in `desk` that hangs `where`: in an evaluation, a rollout, an update; or passes rollouts."""
    (desk / "plugins.py").write_text(PLUGINS)
    if where == "evaluation":
        (desk / "sampling").touch()
    command = [*before, sys.executable, "-m", "repl_rl.cli", "train", "--engine", engine, "--out", str(desk), *FLAGS]
    process = subprocess.Popen(
        command, cwd=desk, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    run = Run(process, desk / "run")
    try:
        if where != "evaluation":
            wait_for(run.rows, process)
            (desk / {"rollout": "sampling", "update": "updating"}.get(where, where)).touch()
        wait_for((desk / "reached").exists, process)
        run.look()
        assert run.below, "the sandbox is a process"
        if where != "evaluation":
            assert any("weights" in file.name for file in run.shared), "weights are on their way in memory"
        yield run
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def check_end(run: Run, told_s: float) -> None:
    """It ends in time, says so, and nothing of it is left."""
    _, errors = run.process.communicate(timeout=60)
    took = time.monotonic() - told_s
    assert run.process.returncode == 143, errors
    assert took < LIMIT_S
    assert b"repl-rl: interrupted" in errors
    assert b"Traceback" not in errors, errors
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["status"], summary["stopped_at_step"]) == ("interrupted", run.rows())
    assert "Terminated" in summary["error"]
    assert (run.folder / "report.html").is_file()
    wait_for(lambda: not {p for p in run.below if identity(p[0]) == p}, None)
    assert not [file for file in run.shared if file.exists()]


@pytest.mark.parametrize(
    "where", ["update", *(pytest.param(where, marks=pytest.mark.heavy) for where in ("evaluation", "rollout"))]
)
def test_sigterm_ends_a_run_with_a_summary_and_without_remains(tmp_path: Path, where: str) -> None:
    with training(tmp_path, where, "transformers") as run:
        told_s = time.monotonic()
        run.process.terminate()
        check_end(run, told_s)


@pytest.mark.heavy
@pytest.mark.alone
@pytest.mark.parametrize("where", ["evaluation", "rollout", "update"])
def test_sigterm_ends_vllm_too(tmp_path: Path, where: str) -> None:
    with training(tmp_path, where, "vllm") as run:
        told_s = time.monotonic()
        run.process.terminate()
        check_end(run, told_s)


@pytest.mark.heavy
@pytest.mark.alone
def test_sigterm_for_the_whole_group_is_no_crash_of_the_engine(tmp_path: Path) -> None:
    with training(tmp_path, "passing", "vllm") as run:
        engine = [p for p in run.below if "EngineCore" in command(p[0])]
        assert len(engine) == 1
        os.kill(engine[0][0], signal.SIGKILL)  # as a cluster may leave it: what is below has ended first
        wait_for(lambda: not [p for p in engine if identity(p[0]) == p], run.process)
        told_s = time.monotonic()
        run.process.terminate()
        check_end(run, told_s)


@pytest.mark.heavy
def test_sigterm_works_where_the_shell_ignores_ctrl_c_and_a_second_one_changes_nothing(tmp_path: Path) -> None:
    with training(tmp_path, "rollout", "transformers", "sh", "-c", 'trap "" INT; exec "$@"', "sh") as run:
        run.process.send_signal(signal.SIGINT)
        told_s = time.monotonic()
        run.process.terminate()
        run.process.terminate()
        check_end(run, told_s)


def test_a_second_signal_leaves_at_once(tmp_path: Path) -> None:
    code = (
        "import signal, threading\n"
        "from repl_rl.utils.stop_signals import QUIET_S, Terminated, handle_stop_signals\n"
        "with handle_stop_signals():\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGUSR1)\n"
        "    except Terminated as stop:\n"
        "        print(stop.signal_number, flush=True)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('the same stop', flush=True)\n"
        "    threading.Event().wait(QUIET_S)\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "    finally:\n"
        "        print('never')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (143, "10\nthe same stop\n"), done.stderr


def test_what_is_held_back_is_raised_by_the_last_release_and_ctrl_c_with_it() -> None:
    for number, kind in (
        (signal.SIGUSR1, Terminated),
        (signal.SIGHUP, Terminated),
        (signal.SIGINT, KeyboardInterrupt),
    ):
        with handle_stop_signals():
            hold_signals()
            hold_signals()
            signal.raise_signal(number)
            release_signals()
            with pytest.raises(kind):
                release_signals()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_every_verb_ends_with_143(tmp_path: Path) -> None:
    (tmp_path / "plugins.py").write_text(PLUGINS)
    (tmp_path / "sampling").touch()
    command = [sys.executable, "-m", "repl_rl.cli", "rollout", "--engine", "transformers", "--sampler", "plugins:Stuck"]
    process = subprocess.Popen(
        [*command, "--concurrency", "8"], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        wait_for((tmp_path / "reached").exists, process)
        told_s = time.monotonic()
        process.terminate()
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143, errors
    assert time.monotonic() - told_s < LIMIT_S
    assert errors.decode().splitlines()[-1] == "repl-rl: interrupted"


ON_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Makes standard input the terminal that the session belongs to, and goes on as another program."""


def hung_up(command: Sequence[str], desk: Path, begun: Callable[[], object]) -> tuple[int, float]:
    """The exit code of a program whose terminal is closed once it has `begun`, and the seconds that it took to end."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ON_TERMINAL, *command],
        cwd=desk,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        wait_for(begun, process)
        closed_s = time.monotonic()
        os.close(master)
        return process.wait(timeout=60), time.monotonic() - closed_s
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_terminal_that_is_closed_lets_the_program_end_in_order(tmp_path: Path) -> None:
    """What it prints on the way out is written nowhere, and is no error."""
    code = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from repl_rl.utils.stop_signals import Terminated, handle_stop_signals\n"
        "with handle_stop_signals():\n"
        "    try:\n"
        "        Path('begun').touch()\n"
        "        threading.Event().wait()\n"
        "    except Terminated as stop:\n"
        "        print('saving', flush=True)\n"
        "        print('stopped', file=sys.stderr, flush=True)\n"
        "        Path('saved').write_text(str(stop))\n"
        "        sys.exit(128 + stop.signal_number)\n"
    )
    ended, _ = hung_up([sys.executable, "-c", code], tmp_path, (tmp_path / "begun").exists)
    assert ended == 129
    assert (tmp_path / "saved").read_text() == "SIGHUP"


@pytest.mark.heavy
@pytest.mark.alone
def test_a_training_whose_terminal_is_closed_saves_and_reports(tmp_path: Path) -> None:
    (tmp_path / "plugins.py").write_text(PLUGINS)
    metrics = tmp_path / "run" / "metrics.jsonl"
    command = [sys.executable, "-m", "repl_rl.cli", "train", "--engine", "transformers", "--out", str(tmp_path), *FLAGS]
    ended, took_s = hung_up(command, tmp_path, lambda: metrics.exists() and metrics.read_text())
    assert ended == 129
    assert took_s < LIMIT_S
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows = len(metrics.read_text().splitlines())
    assert (summary["status"], summary["stopped_at_step"]) == ("interrupted", rows)
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.heavy
@pytest.mark.alone
def test_sigterm_ends_processes_that_train_side_by_side(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "repl_rl.cli", "bench", "credit", "--workers", "1", "--seeds", "1"]
    process = subprocess.Popen(
        [*command, "--conditions", "outcome/none", "--out", str(tmp_path / "credit")],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip

    def weights() -> set[Path]:
        return {file for pid, _ in descendants(process.pid) for file in shared_files(pid) if "weights" in file.name}

    try:
        wait_for(weights, process)
        left, below = weights(), set(descendants(process.pid))
        told_s = time.monotonic()
        process.terminate()
        _, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 143, errors
    assert time.monotonic() - told_s < LIMIT_S
    assert not [file for file in left if file.exists()]
    wait_for(lambda: not {p for p in below if identity(p[0]) == p}, None)


def test_a_handler_is_there_within_the_block_only() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), handle_stop_signals():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_sigterm_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with handle_stop_signals():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def disturbed(done: list[str]) -> None:
    signal.raise_signal(signal.SIGTERM)
    done.append("summary")


def test_what_is_not_to_be_disturbed_is_finished_first() -> None:
    done: list[str] = []
    with pytest.raises(Terminated), handle_stop_signals(), defer_signals():
        disturbed(done)
    assert done == ["summary"]


def test_a_second_sigterm_does_not_disturb_the_end_that_the_first_began() -> None:
    done: list[str] = []
    ending = ExitStack()
    ending.callback(disturbed, done)
    with pytest.raises(Terminated), handle_stop_signals(), ending:
        signal.raise_signal(signal.SIGTERM)
    assert done == ["summary"]


def test_an_engine_that_dies_of_the_same_sigterm_is_an_interruption() -> None:
    died = EngineDied("its process is gone")
    other = EngineError("out of memory")
    with handle_stop_signals():
        assert explain_error(other) is other
        late = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
        late.start()
        assert isinstance(explain_error(died), Terminated)
        late.join()
    assert explain_error(died) is died
