"""How far gradients agree: by vectors whose answer is known, and with batches of a tiny policy."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.credit.agreement import _AT_ONCE, agreement, gradient, measured
from examples import minimal_grpo as loop
from repl_rl.tasks import Task
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.trl_arguments import build_credit_config
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.trainer.tiny_policies import SampledSource, tiny_model

SIZE = 4
TASKS = [Task(f"task {n}", "?", "0") for n in range(12)]


def test_equal_gradients_are_all_signal_and_opposite_ones_disagree() -> None:
    one = torch.tensor([3.0, 4.0])
    assert agreement(one, one) == pytest.approx((1.0, 1.0))
    assert agreement(one, -one) == pytest.approx((-1.0, -1.0))
    assert agreement(one, torch.tensor([-4.0, 3.0])) == (0.0, 0.0)
    assert agreement(one, torch.zeros(2)) == (0.0, 0.0)
    # Of one direction and unlike length: the cosine does not see that, the share of signal does.
    assert agreement(one, 3 * one) == pytest.approx((1.0, 2 * 75 / (25 + 225)))


vectors = st.lists(st.integers(-8, 8).map(float), min_size=3, max_size=3)


@settings(max_examples=80, deadline=None)
@given(vectors, vectors)
def test_the_share_of_signal_is_that_of_batches_of_one_size_and_of_twice_that_size(
    a: list[float], b: list[float]
) -> None:
    one, other = torch.tensor(a), torch.tensor(b)
    if not (one.any() and other.any()):
        return
    alone = (one.square().sum() + other.square().sum()) / 2
    together = ((one + other) / 2).square().sum()
    assert agreement(one, other)[1] == pytest.approx(float((2 * together - alone) / alone), abs=1e-5)


def test_of_many_noisy_pairs_the_share_is_the_true_gradients() -> None:
    drawn = torch.Generator().manual_seed(0)
    truth = torch.ones(400)
    shares = [agreement(*(truth + 2 * torch.randn(400, generator=drawn) for _ in range(2)))[1] for _ in range(50)]
    assert sum(shares) / len(shares) == pytest.approx(1 / 5, abs=0.02)


class Played:
    """Plays rollouts of a tiny policy, and remembers who was asked for."""

    def __init__(self) -> None:
        self.source = SampledSource(tiny_model())
        self.asked: list[list[str]] = []

    def __call__(self, tasks: Sequence[Task]) -> Sequence[Trajectory]:
        self.asked.append([task.id for task in tasks])
        return self.source.collect(self.asked[-1], len(self.asked))


def test_gradients_longer_than_what_is_widened_at_once_are_compared_whole() -> None:
    torch.manual_seed(0)
    one, other = torch.randn(2, _AT_ONCE + 1000)
    other[_AT_ONCE:] = 50 * one[_AT_ONCE:]  # the end decides
    cosine, signal = agreement(one, other)
    wide, wider = one.double(), other.double()
    assert cosine == pytest.approx(float(wide @ wider / (wide.norm() * wider.norm())))
    assert signal == pytest.approx(float(2 * wide @ wider / (wide @ wide + wider @ wider)))


def test_the_gradient_is_that_of_the_loop_with_the_credit_that_was_asked_for() -> None:
    play = Played()
    played = play([task for task in TASKS[:3] for _ in range(SIZE)])
    groups = [[t for t in played if t.task_id == task.id and t.trainable] for task in TASKS[:3]]
    default = gradient(tiny_model(), groups, build_credit_config(TrainerConfig()))
    model = tiny_model()
    batch = loop.batch_of(groups)
    torch.autograd.backward(loop.loss_of(loop.logprobs_of(model, batch), batch))
    expected = torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )
    torch.testing.assert_close(default, expected)
    assert not torch.equal(gradient(model, groups, build_credit_config(TrainerConfig(estimator="process"))), default)


def test_two_batches_of_other_tasks_have_the_tokens_that_were_asked_for() -> None:
    play, model = Played(), tiny_model()
    credit = build_credit_config(TrainerConfig(estimator="outcome"))
    tokens = 40
    found = measured(model, play, TASKS, credit, SIZE, tokens, frozenset(), seed=0)
    assert -1 <= found.cosine <= 1
    assert found.signal <= 1
    tasks = [name for asked in play.asked for name in asked]
    assert max(tasks.count(name) for name in set(tasks)) == SIZE, "no task is in both batches"
    assert found.tokens >= tokens
    again, other = Played(), Played()
    assert measured(model, again, TASKS, credit, SIZE, tokens, frozenset(), seed=0) == found
    assert again.asked == play.asked
    measured(model, other, TASKS, credit, SIZE, tokens, frozenset(), seed=1)
    assert other.asked != play.asked
