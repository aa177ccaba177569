"""Rollouts that begin alike, for the tests of trees."""

import random
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from repl_rl.trainer.logprobs import LogprobScorer
from repl_rl.trainer.plugins.prefix_sharing import PrefixSharing, PrefixSharingScorer
from repl_rl.trajectory.trajectory import Prompt, Trajectory
from tests.support.trainer.tiny_policies import PAD, VOCAB, SampledSource, draw, logprobs_of, trajectory_of

Row = list[int]
ROWS = st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=9), min_size=1, max_size=7)
"""Few ids and short rows: many begin alike, are equal, or begin others."""


def forest(seed: int, prompt: int = 24, completion: int = 6, groups: int = 2, size: int = 4) -> list[Row]:
    """Groups of rows with a prompt each, of which the first halves of the completions are equal by twos."""
    rng = random.Random(seed)

    def drawn(count: int) -> Row:
        return [rng.randrange(3, VOCAB) for _ in range(count)]

    rows = []
    for _ in range(groups):
        root, halves = drawn(prompt), [drawn(completion // 2) for _ in range(size // 2)]
        rows += [[*root, *halves[n // 2], *drawn(completion - completion // 2 + n)] for n in range(size)]
    rng.shuffle(rows)
    return rows


def padded(rows: Sequence[Row], prompt: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """ids, attention and sampled tokens of rows whose prompts are `prompt` tokens, as TRL pads; half is sampled."""
    generator = torch.Generator().manual_seed(seed)
    width = max(map(len, rows)) - prompt
    ids = torch.full((len(rows), prompt + width), PAD)
    attention = torch.zeros_like(ids)
    sampled = torch.zeros(len(rows), width, dtype=torch.bool)
    for b, row in enumerate(rows):
        ids[b, : len(row)] = torch.tensor(row)
        attention[b, : len(row)] = 1
        sampled[b, : len(row) - prompt] = torch.rand(len(row) - prompt, generator=generator) < 0.6
    # TRL pads prompts too
    return torch.nn.functional.pad(ids, (2, 0), value=PAD), torch.nn.functional.pad(attention, (2, 0)), sampled


class TaskTextSource(SampledSource):
    """As `SampledSource`, with prompts of 40 tokens: its groups share most of what passes through a model."""

    def rollout(self, task_id: str, number: int, policy_step: int, rng: random.Random) -> Trajectory:
        """See `SampledSource.rollout`."""
        dice = random.Random(task_id)
        prompt = Prompt(task_id, tuple(dice.randrange(3, VOCAB) for _ in range(40)))
        skeleton = draw(rng, self.forbidden_ids)
        logprobs = logprobs_of(self.model, prompt, skeleton)
        return trajectory_of(prompt, skeleton, logprobs, number, policy_step, fault=number in self.faulty)


def make_scorer(model: PreTrainedModel, tokens_per_pass: int, sharing: PrefixSharing | None) -> LogprobScorer:
    """Scorer of a model that has the attention of `sharing`, if that is given."""
    if sharing is None:
        return LogprobScorer(model, tokens_per_pass=tokens_per_pass)
    return PrefixSharingScorer(model, tokens_per_pass=tokens_per_pass, sharing=sharing)
