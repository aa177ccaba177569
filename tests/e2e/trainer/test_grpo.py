"""The trainer against TRL's own, token by token, and against a sampler that does not listen."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from repl_rl.credit.advantage_estimators import ESTIMATORS, GroupRewards, load_estimator
from repl_rl.credit.console_state_ids import compute_line_states
from repl_rl.credit.rewards import CreditConfig, RewardTable, compute_line_rewards
from repl_rl.errors import ConfigError, InvariantError, WeightSyncError
from repl_rl.trainer.config import IMPORTANCES
from repl_rl.trainer.grpo import ReplGRPOTrainer, TrainerComponents
from repl_rl.trainer.trl_arguments import grpo_args
from repl_rl.trajectory.trajectory import Observed, Sampled, Stop, Trajectory, spread
from tests.support.trainer.grpo_runs import SMALL, TASKS, make, run, token_gradients, trl_alone
from tests.support.trainer.tiny_policies import (
    PAD,
    ReplayedSource,
    SampledSource,
    Skeleton,
    logprobs_of,
    prompt_of,
    tiny_model,
    tiny_tokenizer,
    trajectory_of,
)


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "cispo"])
@pytest.mark.parametrize("micro_batch", [0, 4])
def test_with_outcome_credit_losses_gradients_and_weights_equal_trl_bit_for_bit(
    loss: str, micro_batch: int, tmp_path: Path
) -> None:
    config = replace(SMALL, loss=loss, per_device_batch_size=micro_batch)
    start = tiny_model()
    source = SampledSource(copy.deepcopy(start), faulty=frozenset({5}))
    ours, theirs = copy.deepcopy(start), copy.deepcopy(start)
    mine = run(make(ours, source, config, tmp_path / "ours"))
    trl = run(trl_alone(theirs, source.steps, config, tmp_path / "trl", corrected=True))
    assert len(mine.steps) == len(trl.steps) == 3
    for x, y in zip(mine.logs[:3], trl.logs[:3], strict=True):
        assert (x["loss"], x["grad_norm"], x["reward"]) == (y["loss"], y["grad_norm"], y["reward"])
    for step, (a, b) in enumerate(zip(mine.steps, trl.steps, strict=True)):
        assert all(torch.equal(a[name], b[name]) for name in b), f"gradients differ in step {step}"
        assert any(b[name].abs().max() > 0 for name in b)
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_when_sampler_and_trainer_agree_it_equals_trl_without_any_correction(tmp_path: Path) -> None:
    start = tiny_model()
    config = replace(SMALL, steps=1)
    source = SampledSource(copy.deepcopy(start))
    trainer = make(copy.deepcopy(start), source, config, tmp_path / "first")
    run(trainer)
    exact = trainer.scored_batch.logprobs
    agreed = [with_logprobs(t, row.tolist()) for t, row in zip(source.steps[0], exact, strict=True)]
    mine = run(make(copy.deepcopy(start), ReplayedSource([agreed]), config, tmp_path / "ours"))
    trl = run(trl_alone(copy.deepcopy(start), [agreed], config, tmp_path / "trl", corrected=False))
    assert mine.logs[0]["loss"] == trl.logs[0]["loss"]
    assert all(torch.equal(mine.steps[0][name], gradient) for name, gradient in trl.steps[0].items())


def with_logprobs(t: Trajectory, logprobs_T: list[float]) -> Trajectory:
    segments: list[Sampled | Observed] = []
    at = 0
    for segment in t.segments:
        size = len(segment.token_ids)
        if isinstance(segment, Sampled):
            (line,) = segment.lines
            segment = Sampled((replace(line, logprobs=tuple(logprobs_T[at : at + size])),))
        segments.append(segment)
        at += size
    return replace(t, segments=tuple(segments))


@pytest.mark.parametrize("micro_batch", [0, 4])
@pytest.mark.parametrize("estimator_name", ["outcome", "two_stream"])
def test_the_fast_path_has_the_same_loss_and_gradients(micro_batch: int, estimator_name: str, tmp_path: Path) -> None:
    config = replace(SMALL, steps=2, per_device_batch_size=micro_batch, estimator=estimator_name)
    start = tiny_model()
    source = SampledSource(copy.deepcopy(start), faulty=frozenset({0, 1, 2, 3, 6}))
    slow = run(make(copy.deepcopy(start), source, config, tmp_path / "slow"))
    fast = run(
        make(copy.deepcopy(start), ReplayedSource(source.steps), replace(config, fast_logprobs=True), tmp_path / "fast")
    )
    for a, b in zip(fast.steps, slow.steps, strict=True):
        for name in b:
            torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)
    for x, y in zip(fast.logs[:2], slow.logs[:2], strict=True):
        for key in ("loss", "grad_norm", "entropy", "reward", "completions/mean_length"):
            assert x[key] == pytest.approx(y[key], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kl", ["", "k3(beta=0.5)", "unbiased(beta=0.5)"])
@pytest.mark.parametrize("fast", [False, True])
def test_the_gradient_is_exactly_zero_at_observed_tokens_and_reaches_the_end_token(
    fast: bool, kl: str, tmp_path: Path
) -> None:
    model = tiny_model()
    source = SampledSource(copy.deepcopy(model), seed=3)
    trainer = make(model, source, replace(SMALL, steps=1, estimator="two_stream", fast_logprobs=fast, kl=kl), tmp_path)
    if kl:
        # The reference was copied; from here on the policy is another one, and the sampler takes its weights.
        model.load_state_dict(tiny_model(seed=1).state_dict())
    calls: list[tuple[Tensor, Tensor]] = []

    def keep(module: torch.nn.Module, args: object, kwargs: dict[str, Tensor], output: BaseModelOutput) -> None:
        hidden = output.last_hidden_state
        if hidden.requires_grad:
            hidden.retain_grad()
            calls.append((kwargs["input_ids"], hidden))

    model.base_model.register_forward_hook(keep, with_kwargs=True)
    run(trainer)
    by_ids = {(*t.prompt.token_ids, *t.completion_ids): t for t in source.steps[0]}
    seen: set[str] = set()
    ends = 0
    for input_ids, hidden in calls:
        assert hidden.grad is not None
        for ids, gradient in zip(input_ids.tolist(), hidden.grad, strict=True):
            first = next(i for i, token in enumerate(ids) if token != PAD)
            t = next(t for full, t in by_ids.items() if similar(ids[first:], full))
            seen.add(t.id)
            # The hidden state at a position predicts the next token.
            start = first + len(t.prompt.token_ids) - 1
            for at in range(len(ids)):
                inside = 0 <= at - start < len(t.loss_mask) and t.loss_mask[at - start]
                assert gradient[at].any().item() == inside
            ends += t.stop is Stop.EOS
    assert seen == {t.id for t in source.steps[0]}
    assert ends > 0


def test_a_rollout_that_teaches_nothing_is_held_to_its_sampler_all_the_same(tmp_path: Path) -> None:
    model = tiny_model()
    # The fourth rollout is alone in its group: it has no advantage.
    source = SampledSource(copy.deepcopy(model), faulty=frozenset({0, 1, 2}))
    trainer = make(model, source, replace(SMALL, steps=1, fast_logprobs=True), tmp_path)
    run(trainer)
    alone = source.steps[0][3]
    assert alone.trainable
    assert not trainer.train_batch.advantages[3].any()
    sampled = [p for line in alone.lines for p in line.logprobs]
    scored = trainer.scored_batch.logprobs[3, : len(alone.completion_ids)][torch.tensor(alone.loss_mask)]
    assert scored.tolist() == pytest.approx(sampled, abs=1e-4)


def test_only_sampled_tokens_are_scored_and_a_rollout_without_an_advantage_has_no_graph(tmp_path: Path) -> None:
    model = tiny_model()
    source = SampledSource(copy.deepcopy(model), faulty=frozenset({0, 1, 2}))
    trainer = make(model, source, replace(SMALL, steps=1, fast_logprobs=True), tmp_path)
    asked: list[tuple[int, bool]] = []
    original = model.forward

    def forward(*args: object, sampled: Tensor, **options: object) -> object:
        asked.append((int(sampled[:, 1:].sum()), torch.is_grad_enabled()))
        return original(*args, sampled=sampled, **options)

    model.forward = forward
    run(trainer)
    scored = [t.sampled_tokens if t.trainable else 0 for t in source.steps[0]]
    learning: list[bool] = trainer.train_batch.advantages.any(dim=1).tolist()
    assert scored[3] > 0
    assert not learning[3], "it is alone in its group"
    assert sum(count for count, _ in asked) == sum(scored)
    assert sum(count for count, graph in asked if graph) == sum(
        count for count, learned in zip(scored, learning, strict=True) if learned
    )


def similar(ids: list[int], full: tuple[int, ...]) -> bool:
    while ids and ids[-1] == PAD:
        ids = ids[:-1]
    return len(ids) >= 4 and full[: len(ids)] == tuple(ids)


def group_of(skeletons: Sequence[Skeleton]) -> list[Trajectory]:
    sizes = [sum(len(sampled) + len(observed or ()) for sampled, observed in s) for s in skeletons]
    return [
        trajectory_of(prompt_of("task 0"), s, [-1.0] * size, i)
        for i, (s, size) in enumerate(zip(skeletons, sizes, strict=True))
    ]


def test_observations_of_any_length_leave_the_gradient_of_the_sampled_tokens_alone(tmp_path: Path) -> None:
    def gradients(observed: int) -> list[float]:
        group = group_of([[((9 + i, 2), (7,) * observed), ((11, 12, 2), None)] for i in range(2)])
        gradient, _ = token_gradients(group, SMALL, tmp_path / str(observed))
        return torch.cat([gradient[:, :2], gradient[:, 2 + observed :]], dim=1).flatten().tolist()

    nothing, one, many = gradients(0), gradients(1), gradients(1000)
    assert nothing == one == many
    assert all(g != 0.0 for g in nothing)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_the_gradient_of_a_token_is_the_advantage_of_its_own_line(name: str, tmp_path: Path) -> None:
    skeletons: list[Skeleton] = [
        [((60, 5, 2), (7, 8)), ((10, 2), ())],
        [((10, 4, 2), (8,)), ((61, 2), (7,)), ((12, 13, 14, 2), (9, 9))],
        [((62, 2), None)],
    ]
    group = group_of(skeletons)
    gradient, _ = token_gradients(group, replace(SMALL, estimator=name), tmp_path)
    outcomes = tuple(t.outcome for t in group)
    rewards = tuple(compute_line_rewards(t, RewardTable()) for t in group)
    assert {r for row in rewards for r in row} == {0.0, -0.1}
    states = tuple(compute_line_states(t) for t in group)
    advantages = load_estimator(name)(GroupRewards.from_rows(outcomes, rewards, states, rewards, RewardTable().bound))
    tokens = sum(t.sampled_tokens for t in group)
    for row, advantages_L, t in zip(gradient, advantages, group, strict=True):
        expected = [-a / tokens for a in spread(advantages_L, t)]
        assert row[: len(expected)].tolist() == pytest.approx(expected, rel=1e-5)
        assert (row[len(expected) :] == 0).all()
        assert all(g == 0 for g, mine in zip(row.tolist(), t.loss_mask, strict=False) if not mine)


def test_changing_one_lines_reward_changes_the_gradient_of_that_line_only(tmp_path: Path) -> None:
    group = group_of([[((60, 5, 2), (7,)), ((9, 2), ())], [((10, 4, 2), (8,)), ((12, 2), ())]])

    def gradients(penalty: float, name: str) -> Tensor:
        config = replace(SMALL, estimator=name, rewards=RewardTable(exception=penalty))
        return token_gradients(group, config, tmp_path)[0]

    assert torch.equal(gradients(0.0, "outcome"), gradients(-0.4, "outcome"))
    changed = gradients(-0.4, "two_stream") - gradients(0.0, "two_stream")
    assert (changed[0, :3] > 0).all(), "the line that raised is pushed down"
    assert (changed[0, 3:] == 0).all(), "what the console printed, and its other line"
    assert (changed[1] == 0).all(), "the other rollout"


@pytest.mark.parametrize("fast", [False, True])
def test_training_stops_when_the_sampler_ignores_new_weights(fast: bool, tmp_path: Path) -> None:
    model = tiny_model()
    source = SampledSource(copy.deepcopy(model), deaf=True)
    trainer = make(model, source, replace(SMALL, fast_logprobs=fast), tmp_path)
    with pytest.raises(WeightSyncError, match=r"policy step 1: .* nats .* tolerance is 0\.001; .*stale") as caught:
        run(trainer)
    assert trainer.state.global_step == 1, "no optimizer step may use the rollouts of a stale policy"
    assert trainer.scored_batch.mismatch.max > 1e-3
    assert f"{trainer.scored_batch.mismatch.max:.3g}" in str(caught.value)
    assert source.loads == [0, 1]


def test_a_sampler_that_listens_stays_within_the_tolerance(tmp_path: Path) -> None:
    model = tiny_model()
    source = SampledSource(copy.deepcopy(model))
    trainer = make(model, source, replace(SMALL, steps=4), tmp_path)
    run(trainer)
    assert source.loads == [0, 1, 2, 3]
    assert 0 < trainer.scored_batch.mismatch.max < 1e-4
    assert trainer.scored_batch.mismatch.unclipped_share == 1.0


@pytest.mark.parametrize("fast", [False, True])
def test_a_policy_whose_log_probabilities_are_no_numbers_stops_the_training(fast: bool, tmp_path: Path) -> None:
    model = tiny_model()
    source = SampledSource(copy.deepcopy(model), deaf=True)  # deaf, or it could not sample either
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(WeightSyncError, match="policy step 0: a sampled log probability is nan nats"):
        run(make(model, source, replace(SMALL, fast_logprobs=fast), tmp_path))


def test_a_rollout_of_another_policy_step_or_task_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    batch = [trajectory_of(prompt_of("task 0"), [((9, 2), ())], [-1.0, -1.0], i, policy_step=4) for i in range(2)]
    config = replace(SMALL, prompts_per_step=1, group_size=2)
    with pytest.raises(WeightSyncError, match="is for policy step 4 while the trainer is at 0"):
        run(make(model, ReplayedSource([batch]), config, tmp_path, ["task 0"]))
    old = [trajectory_of(prompt_of("task 0"), [((9, 2), ())], [-1.0, -1.0], i) for i in range(2)]
    loose = replace(config, importance_sampling="token_truncate(tolerance=99.0)")
    with pytest.raises(WeightSyncError, match="is for policy step 0 while the trainer is at 1"):
        run(make(model, ReplayedSource([old, old]), loose, tmp_path, ["task 0"]))
    with pytest.raises(InvariantError, match="gave tasks"):
        run(make(model, ReplayedSource([batch[:1]]), config, tmp_path, ["task 0"]))


def test_whether_a_rollout_was_cut_is_its_recorded_stop_not_its_last_id(tmp_path: Path) -> None:
    stops = [Stop.EXITED, Stop.MAX_LINES, Stop.FINISHED, Stop.WALL_CLOCK]
    batch = [
        replace(trajectory_of(prompt_of("task 0"), [((9 + i, 2), ())], [0.0, 0.0], i), stop=stop)
        for i, stop in enumerate(stops)
    ]
    config = replace(
        SMALL, steps=1, prompts_per_step=1, group_size=4, importance_sampling="token_truncate(tolerance=99.0)"
    )
    logs = run(make(tiny_model(), ReplayedSource([batch]), config, tmp_path, ["task 0"])).logs
    assert logs[0]["completions/clipped_ratio"] == 0.5
    assert logs[0]["completions/mean_terminated_length"] == 2.0


@pytest.mark.parametrize("micro_batch", [0, 4])
def test_a_step_of_nothing_but_faults_changes_no_weight(micro_batch: int, tmp_path: Path) -> None:
    for fast in (False, True):
        model = tiny_model()
        before = copy.deepcopy(model)
        source = SampledSource(copy.deepcopy(model), faulty=frozenset(range(12)))
        run(
            make(
                model,
                source,
                replace(SMALL, steps=1, per_device_batch_size=micro_batch, fast_logprobs=fast),
                tmp_path / str(fast),
            )
        )
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


def test_a_micro_batch_in_which_nothing_is_to_be_learned_leaves_the_others_their_gradient(tmp_path: Path) -> None:
    found = []
    for fast in (False, True):
        model = tiny_model()
        source = SampledSource(copy.deepcopy(model), faulty=frozenset(range(2, 12)))
        config = replace(SMALL, steps=1, per_device_batch_size=2, fast_logprobs=fast)
        found += run(make(model, source, config, tmp_path / str(fast))).steps
    plain, fast_path = found
    assert any(gradient.any() for gradient in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(fast_path[name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("name", "value"), [
    ("off_policy_mask_threshold", 0.5), ("loss_type", "luspo"), ("loss_type", "vespo"),
    ("mask_truncated_completions", True), ("use_vllm", True), ("vllm_importance_sampling_correction", False),
    ("scale_rewards", "none"), ("temperature", 0.7), ("top_p", 0.9), ("top_k", 5), ("min_p", 0.1),
    ("repetition_penalty", 1.1), ("sync_ref_model", True), ("top_entropy_quantile", 0.2), ("entropy_coef", 0.01),
])  # fmt: skip
def test_trl_options_that_do_not_survive_are_refused_at_construction(name: str, value: object, tmp_path: Path) -> None:
    args = grpo_args(SMALL, tmp_path)
    setattr(args, name, value)
    with pytest.raises(ConfigError, match=name):
        ReplGRPOTrainer(
            model=tiny_model(), tokenizer=tiny_tokenizer(), task_ids=TASKS, source=ReplayedSource([]), args=args,
            credit=CreditConfig(load_estimator("outcome"), RewardTable()), components=TrainerComponents(tmp_path, 1.0),
        )  # fmt: skip


def test_too_few_tasks_for_a_step_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a step takes 3 different tasks"):
        make(tiny_model(), ReplayedSource([]), SMALL, tmp_path, TASKS[:2])


@pytest.mark.parametrize("importance", sorted(set(IMPORTANCES) - {"none"}))
def test_ratios_are_cut_or_masked_above_the_cap_that_was_chosen(importance: str, tmp_path: Path) -> None:
    start, prompt = tiny_model(), prompt_of("task 0")
    skeleton: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = [((9, 5, 2), None)]
    logprobs = [p - math.log(4) for p in logprobs_of(start, prompt, skeleton)]  # the sampler found all of it unlikely
    batch = [trajectory_of(prompt, skeleton, logprobs, number) for number in range(2)]
    used = []
    for cap in (3.0, 5.0):
        config = replace(
            SMALL, prompts_per_step=1, group_size=2, importance_sampling=f"{importance}(cap={cap}, tolerance=9.0)"
        )
        trainer = make(copy.deepcopy(start), ReplayedSource([batch]), config, tmp_path / str(cap))
        trainer.model.train()
        ratio = trainer._prepare_inputs([{"prompt": "task 0"}] * 2)["importance_sampling_ratio"]
        used.append(ratio.expand(2, 3).flatten().tolist())
    assert used[0] == pytest.approx([0.0 if importance.endswith(("mask", "band")) else 3.0] * 6, rel=1e-3)
    assert used[1] == pytest.approx([4.0] * 6, rel=1e-3)


def test_without_a_correction_every_ratio_counts_as_one_and_how_many_did_by_themselves_is_told(tmp_path: Path) -> None:
    start, prompt = tiny_model(), prompt_of("task 0")
    skeleton: Skeleton = [((9, 5, 2), None)]
    moved = [math.log(2), math.log(3), -math.log(4)]
    logprobs = [p + by for p, by in zip(logprobs_of(start, prompt, skeleton), moved, strict=True)]
    batch = [trajectory_of(prompt, skeleton, logprobs, number) for number in range(2)]
    config = replace(SMALL, prompts_per_step=1, group_size=2, importance_sampling="none(tolerance=9.0)")
    trainer = make(copy.deepcopy(start), ReplayedSource([batch]), config, tmp_path)
    trainer.model.train()
    assert trainer._prepare_inputs([{"prompt": "task 0"}] * 2)["importance_sampling_ratio"].tolist() == [[1.0] * 3] * 2
    assert trainer.scored_batch.mismatch.unclipped_share == 0.0


def test_a_band_leaves_out_what_is_far_on_either_side(tmp_path: Path) -> None:
    start, prompt = tiny_model(), prompt_of("task 0")
    skeleton: Skeleton = [((9, 5, 2), None)]
    moved = [math.log(2), 0.0, -math.log(4)]  # ratios of 1/2, 1 and 4
    logprobs = [p + by for p, by in zip(logprobs_of(start, prompt, skeleton), moved, strict=True)]
    batch = [trajectory_of(prompt, skeleton, logprobs, number) for number in range(2)]
    used: list[list[float]] = []
    for importance in ("token_band(low=0.6, tolerance=9.0)", "token_band(low=0.4, cap=5.0, tolerance=9.0)"):
        config = replace(SMALL, prompts_per_step=1, group_size=2, importance_sampling=importance)
        trainer = make(copy.deepcopy(start), ReplayedSource([batch]), config, tmp_path / str(len(used)))
        trainer.model.train()
        used.append(trainer._prepare_inputs([{"prompt": "task 0"}] * 2)["importance_sampling_ratio"][0].tolist())
    assert used[0] == pytest.approx([0.0, 1.0, 0.0], rel=1e-3)
    assert used[1] == pytest.approx([0.5, 1.0, 4.0], rel=1e-3)
