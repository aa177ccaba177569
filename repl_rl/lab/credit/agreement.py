"""How far the gradients of two batches of one policy agree: how much of an update is signal, and how much is noise.

Where they agree almost, runs are limited by how many steps they take, and no credit can make them learn faster.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from repl_rl.credit.advantages import Advantages
from repl_rl.credit.group import Credit, earned_by, group_advantages
from repl_rl.engine.forbidden import forbid
from repl_rl.lab.loop import Batch, Groups, batch_of, logprobs_of, loss_of
from repl_rl.record.group import Group
from repl_rl.record.trajectory import Trajectory
from repl_rl.tasks import Task

_LONG = 32
"""Sampled tokens of a rollout that is rather long."""
_AT_ONCE = 1 << 20
"""Numbers of a gradient that are widened together."""

Play = Callable[[Sequence[Task]], Sequence[Trajectory]]
"""Plays one rollout a task with the policy of now."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of the gradients of two independent batches."""

    cosine: float
    """Of the angle between them, in [-1, 1]."""
    signal: float
    """Share of a gradient's squared length that is the true gradient's, at most 1; below 0 by chance alone."""
    tokens: float
    """Sampled tokens of a batch, mean of both."""


def agreement(one: Tensor, other: Tensor) -> tuple[float, float]:
    """The cosine of two gradients of equally large independent batches, shape (P,) each, and their share of signal.

    signal = one . other / ((|one|^2 + |other|^2) / 2)

    A batch's gradient is the true one, g, and noise of mean 0, which is independent in the other batch. So one . other
    estimates |g|^2 without bias, and the mean of both squared lengths |g|^2 and the variance of the noise. It is the
    estimate of |g|^2 from batches of one size and of twice that size in McCandlish et al. 2018, An Empirical Model of
    Large-Batch Training (arXiv 1812.06162), appendix A.1: 2 |mean of both|^2 - mean of |one|^2 and |other|^2. Their
    noise scale, in tokens, is tokens * (1 / signal - 1). Both are 0 where a gradient is.
    """
    dot, lengths = _dot(one, other), (_dot(one, one), _dot(other, other))
    if not all(lengths):
        return 0.0, 0.0
    return dot / (lengths[0] * lengths[1]) ** 0.5, 2 * dot / sum(lengths)


def _dot(one: Tensor, other: Tensor) -> float:
    """In float64, of which a real model's gradients have no room for whole copies."""
    parts = zip(torch.split(one, _AT_ONCE), torch.split(other, _AT_ONCE), strict=True)
    return sum(float(part.double() @ its.double()) for part, its in parts)


def gradient(model: PreTrainedModel, groups: Groups, credit: Credit) -> Tensor:
    """The gradient of the first step's loss on these groups, all parameters in a row, float32, shape (P,).

    The loss is that of one update: the mean over sampled tokens. Rollouts that may not be trained on take no part. The
    gradients of single ones are added up: a real model's activations for a whole batch take gigabytes.
    """

    def credited(group: Sequence[Trajectory]) -> Advantages:
        return group_advantages(Group(tuple(earned_by(t, credit) for t in group)), credit, 0)

    batch = batch_of(groups, credited)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.zeros(sum(p.numel() for p in parameters))
    places = torch.split(found, [p.numel() for p in parameters])
    for alone in _rollouts(batch):
        share = len(alone.advantages_N) / len(batch.advantages_N)  # `loss_of` is the mean over the rollout's tokens
        loss = share * loss_of(logprobs_of(model, alone), alone)
        for place, g in zip(places, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
            if g is not None:
                place += g.flatten()
    return found


def _rollouts(batch: Batch) -> Iterator[Batch]:
    """Each rollout of a batch as one."""
    tokens: list[int] = batch.sampled_B_S.sum(dim=1).tolist()
    rows = zip(torch.split(batch.ids_B_S, 1), torch.split(batch.sampled_B_S, 1), strict=True)
    numbers = zip(torch.split(batch.advantages_N, tokens), torch.split(batch.sampler_N, tokens), strict=True)
    for (ids, sampled), (advantages, sampler) in zip(rows, numbers, strict=True):
        yield Batch(ids, sampled, advantages, sampler)


def measured(
    model: PreTrainedModel,
    play: Play,
    tasks: Sequence[Task],
    credit: Credit,
    group_size: int,
    tokens: int,
    never: frozenset[int],
    seed: int,
) -> Agreement:
    """Play two batches of other tasks each with the policy that `model` is, and compare their gradients.

    Args:
        model: the policy; whoever plays has the same weights.
        play: plays the rollouts.
        tasks: what is drawn from, by `seed`.
        credit: of the condition.
        group_size: rollouts of a task, >= 2.
        tokens: sampled tokens of each batch, >= 1: groups are added until it has them, so that conditions whose
            rollouts differ in length are compared at equal tokens.
        never: ids that are never sampled.
        seed: draws the tasks; equal ones give all conditions the same tasks.
    """
    forbid(model, never)
    model.eval()
    drawn = iter(random.Random(f"{seed}/agreement").sample(tasks, len(tasks)))
    batches = [_batch(play, drawn, group_size, tokens) for _ in range(2)]
    cosine, signal = agreement(*(gradient(model, groups, credit) for groups in batches))
    sampled = [sum(t.sampled_tokens for group in groups for t in group) for groups in batches]
    return Agreement(round(cosine, 5), round(signal, 5), sum(sampled) / 2)


def _batch(play: Play, drawn: Iterator[Task], group_size: int, tokens: int) -> Groups:
    """Groups of the next tasks until they have so many sampled tokens."""
    groups: list[list[Trajectory]] = []
    while (left := tokens - sum(t.sampled_tokens for group in groups for t in group)) > 0:
        # As many at once as will hardly be too many: the engine likes company.
        count = max(1, left // (group_size * _LONG))
        asked = [next(drawn) for _ in range(count)]
        played = play([task for task in asked for _ in range(group_size)])
        for task in asked:
            group = [t for t in played if t.task_id == task.id and t.trainable]
            groups += [group] if len(group) > 1 else []
    return groups
