"""Agreement of the gradients of two batches of one policy: the shares of signal and noise in an update.

If they agree almost fully, the number of steps limits learning, and no credit assignment can speed it up.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from examples.minimal_grpo import Batch, Groups, batch_of, logprobs_of, loss_of
from repl_rl.credit.advantage_estimators import Advantages
from repl_rl.credit.rewards import CreditConfig, build_group_entry, compute_group_advantages
from repl_rl.models.transform_logits import forbid_ids
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Group, Trajectory

_LONG = 32
"""Sampled tokens of a rather long rollout."""
_AT_ONCE = 1 << 20
"""Entries of a gradient that are converted to float64 at once."""

Play = Callable[[Sequence[Task]], Sequence[Trajectory]]
"""Function that plays one rollout per task with the current policy."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of the gradients of two independent batches."""

    cosine: float
    """Cosine of the angle between them, in [-1, 1]."""
    signal: float
    """Share of the true gradient in a gradient's squared length, at most 1; chance alone can make it negative."""
    tokens: float
    """Sampled tokens of a batch, mean of both."""


def agreement(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the cosine of the gradients of two equally large, independent batches, shape (P,), and their signal.

    signal = one . other / ((|one|^2 + |other|^2) / 2)

    A batch's gradient is the true gradient g plus noise of mean 0, which is independent in the other batch. So one .
    other is an unbiased estimate of |g|^2. The mean of both squared lengths estimates |g|^2 plus the variance of the
    noise. It is the estimate of |g|^2 from batches of one size and of twice that size in McCandlish et al. 2018, An
    Empirical Model of Large-Batch Training (arXiv 1812.06162), appendix A.1: 2 |mean of both|^2 - mean of |one|^2 and
    |other|^2. Their noise scale, in tokens, is tokens * (1 / signal - 1). Both results are 0 if either gradient is 0.
    """
    dot, lengths = _dot(one, other), (_dot(one, one), _dot(other, other))
    if not all(lengths):
        return 0.0, 0.0
    return dot / (lengths[0] * lengths[1]) ** 0.5, 2 * dot / sum(lengths)


def _dot(one: Tensor, other: Tensor) -> float:
    """Return the dot product in float64, in parts, because memory has no room for float64 copies of whole gradients."""
    parts = zip(torch.split(one, _AT_ONCE), torch.split(other, _AT_ONCE), strict=True)
    return sum(float(part.double() @ its.double()) for part, its in parts)


def gradient(model: PreTrainedModel, groups: Groups, credit: CreditConfig) -> Tensor:
    """Return the gradient of the first step's loss on these groups, flattened over all parameters, float32, shape (P,).

    The loss is that of one update: the mean over sampled tokens. Rollouts that may not be trained on are left out.
    Gradients of single rollouts are summed, because the activations of a whole batch take gigabytes.
    """

    def credited(group: Sequence[Trajectory]) -> Advantages:
        return compute_group_advantages(Group(tuple(build_group_entry(t, credit) for t in group)), credit)

    batch = batch_of(groups, credited)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.zeros(sum(p.numel() for p in parameters))
    places = torch.split(found, [p.numel() for p in parameters])
    for alone in _rollouts(batch):
        # `loss_of` is a mean over the rollout's tokens, so weight it by its share of them.
        share = len(alone.advantages_N) / len(batch.advantages_N)
        loss = share * loss_of(logprobs_of(model, alone), alone)
        for place, g in zip(places, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
            if g is not None:
                place += g.flatten()
    return found


def _rollouts(batch: Batch) -> Iterator[Batch]:
    """Yield each rollout of a batch as a batch."""
    tokens: list[int] = batch.sampled_B_S.sum(dim=1).tolist()
    rows = zip(torch.split(batch.ids_B_S, 1), torch.split(batch.sampled_B_S, 1), strict=True)
    numbers = zip(torch.split(batch.advantages_N, tokens), torch.split(batch.sampler_N, tokens), strict=True)
    for (ids, sampled), (advantages, sampler) in zip(rows, numbers, strict=True):
        yield Batch(ids, sampled, advantages, sampler)


def measured(
    model: PreTrainedModel,
    play: Play,
    tasks: Sequence[Task],
    credit: CreditConfig,
    group_size: int,
    tokens: int,
    never: frozenset[int],
    seed: int,
) -> Agreement:
    """Play two batches of different tasks with the policy of `model`, and compare their gradients.

    Args:
        model: the policy; `play` must have the same weights.
        play: plays the rollouts.
        tasks: tasks to draw from, by `seed`.
        credit: credit assignment of the condition.
        group_size: rollouts per task, >= 2.
        tokens: sampled tokens of each batch, >= 1. Groups are added until the batch has them, so that conditions with
            rollouts of different lengths are compared at equal tokens.
        never: ids that are never sampled.
        seed: seed of the tasks; equal seeds give all conditions the same tasks.
    """
    forbid_ids(model, never)
    model.eval()
    drawn = iter(random.Random(f"{seed}/agreement").sample(tasks, len(tasks)))
    batches = [_batch(play, drawn, group_size, tokens) for _ in range(2)]
    cosine, signal = agreement(*(gradient(model, groups, credit) for groups in batches))
    sampled = [sum(t.sampled_tokens for group in groups for t in group) for groups in batches]
    return Agreement(round(cosine, 5), round(signal, 5), sum(sampled) / 2)


def _batch(play: Play, drawn: Iterator[Task], group_size: int, tokens: int) -> Groups:
    """Play groups of the next tasks until they have `tokens` sampled tokens."""
    groups: list[list[Trajectory]] = []
    while (left := tokens - sum(t.sampled_tokens for group in groups for t in group)) > 0:
        # Play many tasks at once for throughput, but so few that they hardly exceed the tokens.
        count = max(1, left // (group_size * _LONG))
        asked = [next(drawn) for _ in range(count)]
        played = play([task for task in asked for _ in range(group_size)])
        for task in asked:
            group = [t for t in played if t.task_id == task.id and t.trainable]
            groups += [group] if len(group) > 1 else []
    return groups
