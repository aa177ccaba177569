"""A training that is killed and resumed, again and again.

    python -m tests.support.trainer.killed_training OUT KIND KILLS SEED

It prints `mortal: N kills` and leaves OUT/whole, which was never killed, and OUT/killed.
"""

import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from repl_rl import cli
from repl_rl.cli import train_and_evaluate as _imported_before_the_fork  # noqa: F401
from repl_rl.engine import ENGINES, Engine, EngineConfig, EngineOptions, ScriptedEngine
from repl_rl.engine.vllm_subprocess import disable_tqdm_semaphores
from tests.support.tokenizers import merged_tokenizer
from tests.support.trainer.tiny_policies import tiny_model

STEPS = 12
_LOOK_S = 0.02
SMALL = (
    *("--name", "run", "--sandbox", "local", "--concurrency", "1", "--train-tasks", "24", "--eval-tasks", "2"),
    *("--trainer.steps", str(STEPS), "--trainer.prompts-per-step", "2", "--trainer.group-size", "2"),
    *(
        "--rollout.max-lines",
        "2",
        "--rollout.max-line-tokens",
        "8",
        "--checkpoint.every-s",
        "0",
        "--checkpoint.max-time-share",
        "1.0",
    ),
    # Learning that shows in the weights, whatever the defaults of a model are.
    *("--prompt", "bare", "--rollout.max-observation-tokens", "128", "--trainer.per-device-batch-size", "0"),
    *("--trainer.learning-rate", "5e-4", "--trainer.warmup-steps", "5"),
    # Which line a clock cuts short depends on the machine's other work.
    *("--limits.line-timeout-s", "300", "--rollout.max-wall-s", "3000"),
)
KINDS: Mapping[str, Sequence[str]] = {
    "transformers": ("--engine", "transformers", "--trainer.num-iterations", "2", "--trainer.num-mini-batches", "2"),
    "curriculum": (
        "--engine",
        "transformers",
        "--curriculum",
        "--trainer.no-fast-logprobs",
    ),
    "lora": ("--engine", "transformers", "--trainer.lora-rank", "2", "--trainer.kl", "k3"),
    "ahead": (
        "--engine",
        "scribe",
        "--trainer.max-staleness-steps",
        "2",
        "--trainer.importance-sampling",
        "token_truncate(tolerance=100.0)",
    ),
    "checkpoints": (
        *(
            "--engine",
            "scribe",
            "--trainer.max-staleness-steps",
            "2",
            "--trainer.importance-sampling",
            "token_truncate(tolerance=100.0)",
        ),
        *("--trainer.save-steps", "1", "--eval-steps", "2", "--trainer.lora-rank", "2"),
    ),
    "scripted": ("--engine", "scribe", "--trainer.importance-sampling", "token_truncate(tolerance=100.0)"),
}


@dataclass(frozen=True, slots=True)
class Scribe(EngineConfig):
    """The scripted engine around arithmetic."""

    kind: ClassVar[str] = "scribe"
    about: ClassVar[str] = "arithmetic"

    @asynccontextmanager
    async def open(self, opening: EngineOptions) -> AsyncIterator[Engine]:
        """See `EngineConfig.open`."""
        allowed = sorted(set(range(300)) - opening.forbidden_ids)
        scripts = [[allowed[7 * i * i * (n + 3) % len(allowed)] for i in range(200)] for n in range(40)]
        yield ScriptedEngine(scripts, context_tokens=512, forbidden_ids=opening.forbidden_ids)


def model_folder(folder: Path) -> Path:
    """A tiny policy with a tokenizer."""
    tokenizer = merged_tokenizer()
    tiny_model(vocab=len(tokenizer), hidden=16, layers=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def use_one_thread() -> None:
    """Let torch compute in one thread; a fork calls it again before it starts threads.

    The first call of torch in a fork replaces the thread pool that it inherits. Where several threads make that call
    at once, as transformers does to load weights, one of them can find no pool ("Invalid thread pool!").
    """
    torch.set_num_threads(1)


def begin(arguments: Sequence[str], log: Path) -> int:
    """The program in a process of its own, forked, so that nothing is imported again. Returns its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        use_one_thread()
        # tqdm's lock is in memory that all forks share: one that is killed with it would block the later ones.
        disable_tqdm_semaphores()
        code = cli.main(arguments)
        sys.stdout.flush()
    finally:
        os._exit(code)


def over(pid: int, within_s: float | None) -> bool:
    """Whether a process ends within that time; it is not waited for."""
    watched = os.pidfd_open(pid)
    try:
        return bool(select.select([watched], [], [], within_s)[0])
    finally:
        os.close(watched)


def ended(pid: int, within_s: float | None) -> bool:
    """Whether a process ends within that time; it is killed otherwise."""
    by_itself = over(pid, within_s)
    if not by_itself:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if by_itself and status:
        raise SystemExit(f"mortal: the training ended with {os.waitstatus_to_exitcode(status)}")
    return by_itself


def rows(run: Path) -> int:
    """Steps that a run has told of."""
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def wait_for_row(pid: int, run: Path, number: int) -> None:
    """Until a run has told of so many steps, or is over."""
    while rows(run) < number and not over(pid, _LOOK_S):
        pass


def main(out: Path, kind: str, kills: int, seed: int) -> None:
    use_one_thread()
    ENGINES.register(Scribe)
    model = model_folder(out / "model")
    command = ["train", "--model", str(model), *SMALL, *KINDS[kind]]
    started = time.monotonic()
    whole = begin([*command, "--out", str(out / "whole")], out / "whole.log")
    wait_for_row(whole, out / "whole" / "run", 1)
    first_s = time.monotonic() - started
    ended(whole, None)
    whole_s = time.monotonic() - started
    rng, done, run = random.Random(seed), 0, out / "killed" / "run"
    while True:
        pid = begin([*command, "--out", str(out / "killed"), "--resume"], out / "killed.log")
        within_s = None
        if done < kills:  # while it starts, or within two steps after it was told of one or two
            told = rng.choice((0, 1, 1, 2))
            wait_for_row(pid, run, rows(run) + told)
            within_s = rng.uniform(0, 2 * (whole_s - first_s) / STEPS if told else first_s)
        if ended(pid, within_s):
            break
        done += 1
    summary = json.loads((out / "killed" / "run" / "summary.json").read_text())
    print(f"mortal: {done} kills, seed {seed}, {whole_s:.1f} s unkilled, on at {summary.get('resumed_at_steps')}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
