"""Workloads for measuring updates: a policy and rollouts, here random ones."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedModel

from repl_rl.sft.create_random_model import make_random_policy
from repl_rl.trajectory.trajectory import Line, LineEnd, Observed, Prompt, Sampled, Stop, Trajectory

PAD, EOS = 0, 1


class Work(Protocol):
    """Policy and rollouts to train it on. It is pickled for the process that measures."""

    def load(self) -> tuple[PreTrainedModel, Sequence[Trajectory]]:
        """Return both. The rollouts are groups of equal size, in order, all with an outcome."""


@dataclass(frozen=True, slots=True)
class Case:
    """Random workload: one group of rollouts of one task."""

    vocab: int
    """Vocabulary size."""
    observed_share: float
    """Share of a completion's tokens that are observations, in [0, 1)."""
    tokens: int = 2048
    """Tokens of a completion."""
    rollouts: int = 2
    """Rollouts in the batch, >= 2."""
    hidden: int = 128
    """Width of the model."""
    layers: int = 2
    """Layers of the model."""
    prompt: int = 32
    """Tokens of the prompt that the rollouts share."""

    def load(self) -> tuple[PreTrainedModel, Sequence[Trajectory]]:
        """See `Work.load`."""
        context_tokens = 2 * self.tokens + self.prompt
        model = make_random_policy(self.vocab, PAD, EOS, self.hidden, self.layers, context_tokens=context_tokens)
        return model, _rollouts(self)


CASES = tuple(Case(vocab, share) for vocab in (32_768, 151_936) for share in (0.5, 0.8))


def _rollouts(case: Case, line: int = 16) -> list[Trajectory]:
    """Return rollouts whose lines have 16 tokens, each followed by an observation that gives the share."""
    rng = random.Random(0)
    # Tokens of each observation, so that `observed_share` of all tokens is observed.
    observed = round(line * case.observed_share / (1 - case.observed_share))
    prompt = Prompt("task", tuple(rng.randrange(2, case.vocab) for _ in range(case.prompt)))
    rollouts = []
    for number in range(case.rollouts):
        segments: list[Sampled | Observed] = []
        for _ in range(case.tokens // (line + observed)):
            ids = tuple(rng.randrange(2, case.vocab) for _ in range(line))
            segments.append(Sampled((Line(ids, (-10.0,) * line, "x\n", LineEnd.NEWLINE),)))
            shown = tuple(rng.randrange(2, case.vocab) for _ in range(observed))
            segments.append(Observed("y" if shown else "", shown))
        # Alternate outcomes, so that the group has advantages.
        outcome = float(number % 2)
        rollouts.append(
            Trajectory(str(number), "task", prompt, tuple(segments), Stop.FINISHED, 0, number, 0.0, outcome)
        )
    return rollouts
