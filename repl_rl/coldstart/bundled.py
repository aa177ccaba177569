"""Makes the bundled policy, `repl_rl/policies/quickstart`, from nothing but seeds::

    OMP_NUM_THREADS=1 python -m repl_rl.coldstart.bundled --out FOLDER

First it learns the console: computing, reading, copying, and errors with their recoveries. Then the shares change: a
mix in which most demonstrations guess or err makes its most likely path wrong, while the good path stays within reach
of sampling. Reinforcement learning therefore has a change of strategy to find, and is not mere sharpening.

It runs the demonstrations' own code (sums, string methods) in this process, for about a quarter of an hour on one core.
With the same versions of Python and torch on the same kind of processor the weights are the same; elsewhere they differ
in rounding.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from repl_rl.coldstart.demonstrations import COLD, WARM, Mix
from repl_rl.coldstart.sft import SftConfig, sft
from repl_rl.coldstart.transcripts import write_transcripts
from repl_rl.coldstart.vocabulary import make_tokenizer
from repl_rl.errors import ConfigError
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.tasks import EASY, HARD

_FAMILIES = (*EASY, *HARD)
_STAGES: tuple[tuple[Mix, int, SftConfig], ...] = (
    (WARM, 48_000, SftConfig(steps=1900, seed=1)),
    (COLD, 16_000, SftConfig(steps=200, learning_rate=5e-4, seed=2)),
)
"""Mix of demonstrations, how many, and how they are learned; each stage starts from the one before."""


def make_bundled(out: Path) -> None:
    """Write tokenizer, configuration and weights into `out`.

    Raises:
        ConfigError: `out` exists already.
    """
    if out.exists():
        raise ConfigError("output folder", str(out), "it exists; name a new one")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        make_tokenizer(work / "0")
        for n, (mix, count, config) in enumerate(_STAGES):
            transcripts = work / f"{n}.jsonl"
            asyncio.run(write_transcripts(transcripts, InProcessSandbox(), _FAMILIES, mix, count, config.seed))
            sft(work / str(n), transcripts, work / str(n + 1), config, _report)
        shutil.move(work / str(len(_STAGES)), out)


def _report(step: int, loss: float) -> None:
    if step == 1 or step % 50 == 0:
        print(f"step {step:5d}  loss {loss:.4f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the bundled policy.")
    parser.add_argument("--out", type=Path, required=True, help="new folder to write")
    make_bundled(parser.parse_args().out)
