"""What the console printed as a teacher: the gradient of the formula, at the tokens that it printed and no others."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from repl_rl.credit.stops import StopPolicy
from repl_rl.record.printed import printed
from repl_rl.record.trajectory import Line, LineEnd, Observed, Sampled, Segment, Stop, Trajectory
from repl_rl.trainer import ReplGRPOTrainer, StepRecord, TrainerConfig, fit
from tests.trainer.policies import VOCAB, ReplayedSource, SampledSource, at_step, prompt_of, tiny_model, tiny_tokenizer
from tests.trainer.test_grpo import group_of, make, run

WEIGHT = 0.4
FORBIDDEN = frozenset(range(3, VOCAB, 5))
SMALL = TrainerConfig(
    steps=1, prompts_per_step=3, group_size=4, warmup_steps=0, estimator="two_stream", observation_weight=WEIGHT,
    optimizer="sgd", schedule="constant",
)  # fmt: skip


class CutSource(SampledSource):
    """Every third rollout's first observation lost its middle."""

    def collect(self, task_ids: Sequence[str], policy_step: int) -> list[Trajectory]:
        played = super().collect(task_ids, policy_step)
        self.steps[-1] = [first_cut(t) if number % 3 == 0 else t for number, t in enumerate(played)]
        return self.steps[-1]


def first_cut(t: Trajectory) -> Trajectory:
    segments = list(t.segments)
    for at, segment in enumerate(segments):
        if isinstance(segment, Observed) and segment.token_ids:
            segments[at] = replace(segment, cut=True)
            break
    return replace(t, segments=tuple(segments))


def logprobs_of(model: PreTrainedModel, t: Trajectory) -> Tensor:
    """Of all completion tokens, through all of the logits, (T,); -inf at forbidden ids."""
    ids = torch.tensor([[*t.prompt.token_ids, *t.completion_ids]])
    free = model(ids).logits[0].index_fill(-1, torch.tensor(sorted(FORBIDDEN)), -torch.inf)
    start = len(t.prompt.token_ids)
    logprobs: Tensor = free.log_softmax(-1)[torch.arange(start, ids.size(1)) - 1, ids[0, start:]]
    return logprobs


def learnable(t: Trajectory) -> Tensor:
    """Written out once more: the tokens that the console printed, whole, and that can have a probability."""
    found: list[bool] = []
    for segment in t.segments:
        for token in segment.token_ids:
            whole = isinstance(segment, Observed) and not segment.cut
            found.append(whole and token not in FORBIDDEN)
    return torch.tensor(found, dtype=torch.bool)


def brute(model: PreTrainedModel, trainer: ReplGRPOTrainer, tokens: int) -> tuple[Tensor, float]:
    """Both losses of a step's first update, and the mean of the second one."""
    rollouts = [t for t in trainer.step_state.learned if t.trainable]
    rows = [
        row for row, t in zip(trainer.step_state.advantages, trainer.step_state.learned, strict=True) if t.trainable
    ]
    sampled = sum(t.sampled_tokens for t in rollouts)
    loss, nats = torch.zeros(()), torch.zeros(())
    for t, row in zip(rollouts, rows, strict=True):
        logprobs = logprobs_of(model, t)
        mine = torch.tensor(t.loss_mask)
        ratio = (logprobs[mine] - logprobs[mine].detach()).exp()
        loss = loss - (ratio * row[: len(mine)][mine]).sum() / sampled
        nats = nats - logprobs[learnable(t)].sum() / tokens
    return loss + WEIGHT * nats, nats.item()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("micro_batch", [0, 3])
def test_gradients_are_those_of_both_formulas_over_all_logits(fast: bool, micro_batch: int, tmp_path: Path) -> None:
    start = tiny_model()
    config = replace(SMALL, fast=fast, micro_batch=micro_batch, stops=StopPolicy(mask=("eos",)))
    source = CutSource(copy.deepcopy(start), faulty=frozenset({5}), forbidden_ids=FORBIDDEN)
    trainer = make(copy.deepcopy(start), source, config, tmp_path)
    seen = run(trainer)
    learned = trainer.step_state.learned
    assert any(t.failure for t in learned), "one that failed on our side"
    assert any(not t.segments for t in learned), "one whose stop is masked"
    assert any(s.cut for t in learned for s in t.segments if isinstance(s, Observed))
    tokens = sum(int(learnable(t).sum()) for t in learned if t.trainable)
    loss, nats = brute(start, trainer, tokens)
    torch.autograd.backward(loss)
    clip_grad_norm_(start.parameters(), 1.0)
    (gradients,) = seen.steps
    for name, p in start.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-6)
    told = trainer.scored.metrics
    assert told == {"observation_loss": pytest.approx(nats, rel=1e-5), "observation_tokens": tokens}
    assert seen.logs[0]["loss"] == pytest.approx(loss.item(), abs=1e-4)


@pytest.mark.parametrize("fast", [True, False])
def test_parts_of_a_batch_add_up_to_the_mean_over_all_of_it(fast: bool, tmp_path: Path) -> None:
    """Two optimizer steps of half a batch each: at a learning rate of almost 0 their mean gradient is one's."""
    start = tiny_model()
    source = SampledSource(copy.deepcopy(start))
    whole = replace(SMALL, fast=fast, learning_rate=1e-9)
    halves = replace(whole, mini_batches=2, micro_batch=3)
    made = make(copy.deepcopy(start), source, whole, tmp_path / "whole")
    made.args.max_grad_norm = 1e9
    (one,) = run(made).steps
    again = ReplayedSource(source.steps, halves.optimizer_steps_per_step)
    made = make(copy.deepcopy(start), again, halves, tmp_path / "halves")
    made.args.max_grad_norm = 1e9
    left, right = run(made).steps
    for name, gradient in one.items():
        torch.testing.assert_close((left[name] + right[name]) / 2, gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("fast", [True, False])
def test_a_rollout_without_an_advantage_teaches_what_its_console_printed(fast: bool, tmp_path: Path) -> None:
    model = tiny_model()
    # Of one group a single rollout may be trained on: it has no advantage.
    source = SampledSource(copy.deepcopy(model), faulty=frozenset({0, 1}))
    config = replace(SMALL, prompts_per_step=1, group_size=3, fast=fast)
    trainer = make(model, source, config, tmp_path)
    calls: list[Tensor] = []

    def keep(module: torch.nn.Module, args: object, output: BaseModelOutput) -> None:
        if output.last_hidden_state.requires_grad:
            output.last_hidden_state.retain_grad()
            calls.append(output.last_hidden_state)

    model.base_model.register_forward_hook(keep)
    run(trainer)
    assert not trainer.step_state.advantages.any()
    alone = source.steps[0][2]
    moved = sum(int(hidden.grad.any(dim=-1).sum()) for hidden in calls if hidden.grad is not None)
    assert moved == alone.observed_tokens > 0


def test_without_a_weight_no_token_of_the_console_is_scored_and_rollouts_at_rest_have_no_graph(tmp_path: Path) -> None:
    def scored(weight: float) -> tuple[int, int]:
        """Tokens whose log probabilities the model is asked for, and those of them that keep a graph."""
        model = tiny_model()
        source = SampledSource(copy.deepcopy(model), faulty=frozenset({0, 1, 2}))
        trainer = make(
            model, source, replace(SMALL, estimator="outcome", observation_weight=weight), tmp_path / str(weight)
        )
        asked: list[tuple[int, bool]] = []
        original = model.forward

        def forward(*args: object, sampled: Tensor, **options: object) -> object:
            asked.append((int(sampled[:, 1:].sum()), torch.is_grad_enabled()))
            return original(*args, sampled=sampled, **options)

        model.forward = forward
        run(trainer)
        assert trainer.scored.metrics.keys() == ({"observation_loss", "observation_tokens"} if weight else set())
        return sum(count for count, _ in asked), sum(count for count, graph in asked if graph)

    plain, taught = scored(0.0), scored(WEIGHT)
    assert plain[1] < plain[0], "the fourth rollout is alone in its group"
    assert taught[1] == taught[0] > plain[0], "it teaches what its console printed"


def test_a_step_without_an_observed_token_has_the_loss_of_the_rollouts_alone(tmp_path: Path) -> None:
    group = group_of([[((9, 5, 2), ()), ((11, 12, 2), None)], [((13, 2), None)]])
    gradients = []
    for weight in (0.0, WEIGHT):
        config = replace(
            SMALL, prompts_per_step=1, group_size=2, observation_weight=weight,
            importance="token_truncate(tolerance=99.0)",
        )  # fmt: skip
        trainer = make(tiny_model(), ReplayedSource([group]), config, tmp_path / str(weight), [group[0].task_id])
        gradients.append(run(trainer).steps[0])
    assert trainer.scored.metrics == {"observation_loss": 0.0, "observation_tokens": 0.0}
    assert all(torch.equal(gradients[0][name], gradient) for name, gradient in gradients[1].items())


def test_the_record_of_a_step_tells_how_well_the_console_is_predicted_and_it_gets_better(tmp_path: Path) -> None:
    model = tiny_model()
    played = SampledSource(copy.deepcopy(model)).collect(["task 0"] * 4, 0)
    source = ReplayedSource([[at_step(t, step) for t in played] for step in range(12)])
    told: list[float] = []

    def on_step(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        told.append(record.metrics["observation_loss"])
        assert record.metrics["observation_tokens"] == sum(t.observed_tokens for t in trajectories)

    config = replace(
        SMALL, steps=12, prompts_per_step=1, observation_weight=1.0, optimizer="adamw_torch", learning_rate=1e-2,
        importance="token_truncate(tolerance=99.0)",
    )  # fmt: skip
    fit(model, tiny_tokenizer(), ["task 0"], source, config, tmp_path, on_step)
    assert told[-1] < told[0] - 0.5


ids_st = st.lists(st.integers(0, 20), max_size=5).map(tuple)
pairs_st = st.lists(st.tuples(ids_st.filter(bool), ids_st, st.booleans()), min_size=1, max_size=5)


@given(pairs=pairs_st, never=st.frozensets(st.integers(0, 20)))
def test_learned_are_the_allowed_ids_of_whole_observations_and_nothing_else(
    pairs: list[tuple[tuple[int, ...], tuple[int, ...], bool]], never: frozenset[int]
) -> None:
    segments: list[Segment] = []
    expected: list[bool] = []
    for sampled, observed, cut in pairs:
        cut = cut and bool(observed)
        segments.append(Sampled((Line(sampled, (-1.0,) * len(sampled), "x\n", LineEnd.NEWLINE),)))
        segments.append(Observed("y" if observed else "", observed, cut))
        expected += [False] * len(sampled) + [not cut and token not in never for token in observed]
    t = Trajectory("r", "t", prompt_of("t"), tuple(segments), Stop.MAX_LINES, 0, 0, 0.0)
    assert printed(t, never) == tuple(expected)
    assert not any(learned and own for learned, own in zip(printed(t, never), t.loss_mask, strict=True))
