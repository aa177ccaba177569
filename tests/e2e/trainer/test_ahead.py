"""Rollouts ahead of the update: the same batches, a bound on how old a line is, and a broken sync told from age."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from trl.trainer.utils import RepeatSampler

from repl_rl.engine import Vllm
from repl_rl.errors import ConfigError, WeightSyncError
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.store import read_trajectories
from repl_rl.tasks import Curriculum, Task
from repl_rl.trainer.collect_groups import TaskSampler
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.config_checks import validate_run
from repl_rl.trainer.importance_sampling import Staleness, compute_token_staleness
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.trainer.ahead_runs import CONFIG, IDS, TASKS, EarlySource, Stopped, play, written_by
from tests.support.trainer.tiny_policies import (
    SampledSource,
    tiny_model,
    tiny_tokenizer,
)


def ignore(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
    pass


def trained(
    source: EarlySource, config: TrainerConfig, out: Path, curriculum: Curriculum | None = None
) -> list[dict[str, float]]:
    """The figures of each step of a training of the tiny policy on `source`."""
    told: list[dict[str, float]] = []
    run_training(
        tiny_model(),
        tiny_tokenizer(),
        IDS,
        source,
        config,
        out,
        TrainingOptions(lambda r, t: told.append(r.metrics), curriculum),
    )
    return told


def tasks_of(source: EarlySource) -> list[list[str]]:
    return [[t.task_id for t in step] for step in source.steps]


def test_steps_begin_as_far_ahead_as_they_may_and_have_the_tasks_that_they_have_anyway(tmp_path: Path) -> None:
    ahead, turns = EarlySource(tiny_model()), EarlySource(tiny_model())
    figures = trained(ahead, CONFIG, tmp_path / "ahead")
    trained(turns, replace(CONFIG, max_staleness_steps=0), tmp_path / "turns")
    assert tasks_of(ahead) == tasks_of(turns), "three steps are an epoch, so this crosses several"
    assert [ahead.began[step].weights for step in range(8)] == [max(step - 2, 0) for step in range(8)]
    assert not ahead.under_way, "nothing begins that nobody learns from"
    assert [m["staleness_max"] for m in figures] == [min(step, 2) for step in range(8)]
    assert all(0 < m["logprob_gap_max"] < 1e-3 for m in figures), "of lines that the policy of now wrote"
    assert all(0 < m["fresh_share"] < 1 for m in figures[1:])
    assert any(m["importance_kept"] < 1 for m in figures), "older lines are corrected"
    assert not ahead.probes
    assert len(set(turns.folders)) == 1
    assert all(one != other for one, other in pairwise(ahead.folders)), "what an engine has is not written over"


@pytest.mark.parametrize("fast", [True, False])
def test_nothing_ahead_has_no_new_figures_and_a_lead_has_five(fast: bool, tmp_path: Path) -> None:
    config = replace(CONFIG, steps=2, fast_logprobs=fast)
    ahead, turns = (
        trained(EarlySource(tiny_model()), replace(config, max_staleness_steps=k), tmp_path / str(k))[1] for k in (1, 0)
    )
    assert set(ahead) - set(turns) == {"staleness_mean", "staleness_max", "fresh_share", "trainer_idle", "sampler_idle"}
    assert set(turns) <= set(ahead)


def test_several_updates_of_a_step_count_as_one_step(tmp_path: Path) -> None:
    source = EarlySource(tiny_model())
    config = replace(CONFIG, steps=4, max_staleness_steps=1, num_iterations=2, num_mini_batches=3)
    figures = trained(source, config, tmp_path)
    assert {step: begun.weights for step, begun in source.began.items()} == {0: 0, 6: 0, 12: 6, 18: 12}
    assert [m["staleness_max"] for m in figures] == [0, 1, 1, 1]


def test_a_curriculum_draws_a_steps_tasks_when_the_step_begins(tmp_path: Path) -> None:
    class Noted(Curriculum):
        def draw(self, count: int) -> tuple[Task, ...]:
            told.append("draw")
            return super().draw(count)

        def record(self, outcomes: Iterable[tuple[str, float]]) -> None:
            told.append("record")
            super().record(outcomes)

    told: list[str] = []
    trained(EarlySource(tiny_model()), replace(CONFIG, steps=4), tmp_path, Noted(TASKS, 7))
    assert told == ["draw", "draw", "draw", "record", "draw", "record", "record", "record"]


@pytest.mark.parametrize("quick", [False, True])
def test_an_engine_that_does_not_take_weights_is_noticed_however_old_its_lines_are(quick: bool, tmp_path: Path) -> None:
    source = EarlySource(tiny_model(), quick=quick, deaf=True)
    with pytest.raises(WeightSyncError, match=r"policy step [12]: a sampled log probability is .* the tolerance is"):
        trained(source, CONFIG, tmp_path)
    assert bool(source.probes) is quick


def test_where_no_line_is_new_the_weights_are_probed_and_honest_age_is_no_error(tmp_path: Path) -> None:
    source = EarlySource(tiny_model(), quick=True)
    figures = trained(source, CONFIG, tmp_path)
    assert source.probes == list(range(1, 8)), "the first step's lines are new"
    assert all(m["logprob_gap_max"] < 1e-3 for m in figures)
    assert [m["staleness_mean"] for m in figures] == [0, 1, 2, 2, 2, 2, 2, 2]


def test_a_probe_that_older_weights_wrote_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="the engine has weights of policy step 0 while the trainer is at 1"):
        trained(EarlySource(tiny_model(), quick=True, late=True), CONFIG, tmp_path)


def test_ages_are_those_of_lines_and_a_line_of_a_policy_to_come_is_refused() -> None:
    source = EarlySource(tiny_model())
    (t,) = source.collect(["task 0"], 0)
    lines = iter([5, 3, 4])
    row = replace(t, policy_step=5, segments=written_by(t, lines))
    ages = compute_token_staleness([row], len(row.completion_ids), 5, 2)
    sizes = [len(line.token_ids) for line in row.lines]
    assert ages[ages >= 0].tolist() == [0] * sizes[0] + [2] * sizes[1] + [1] * sizes[2]
    assert Staleness.from_ages(ages, 2).max == 1.0
    for step, most in ((5, 1), (4, 9)):
        with pytest.raises(WeightSyncError, match=r"lines of the policy steps \[3, 4, 5\]"):
            compute_token_staleness([row], len(row.completion_ids), step, most)


@settings(max_examples=30)
@given(
    tasks=st.integers(1, 9),
    a_step=st.integers(1, 3),
    size=st.integers(1, 3),
    repeats=st.integers(1, 3),
    at=st.integers(0, 9),
)
def test_what_comes_next_is_what_trls_order_gives_then(
    tasks: int, a_step: int, size: int, repeats: int, at: int
) -> None:
    assume(tasks >= a_step)
    order, plain = (
        TaskSampler.from_sampler(RepeatSampler(range(tasks), size, a_step, repeats, True, 3)) for _ in range(2)
    )
    steps = tasks // a_step
    given_ = [index for _ in range(at + 3) for index in plain]
    whole = [given_[n * a_step * size * repeats :][: a_step * size] for n in range(at + 3)]
    for _ in range(at // steps + 1):
        epoch = iter(order)
        first = next(epoch)
    assert list(islice(order.iterate_upcoming(at), 3)) == whole[at : at + 3]
    assert [first, *epoch] == given_[at // steps * len(order) :][: len(order)], "looking draws nothing"


class Straggling(EarlySource):
    """The first group of step 2 ends after four others that were begun after it."""

    passed = 0

    def wait_for_first_group(self, groups: Sequence[tuple[int, Sequence[int]]]) -> int:
        number = super().wait_for_first_group(groups)
        step, places = groups[number]
        if (step, places[0]) != (2, 0) or self.passed == 4 or len(groups) == 1:
            return number
        self.passed += 1
        return number + 1


@pytest.mark.parametrize(
    ("stop_after", "curriculum"),
    [
        (4, True),
        *(
            pytest.param(*case, marks=pytest.mark.heavy)
            for case in ((1, True), (7, True), (1, False), (4, False), (7, False))
        ),
    ],
)
def test_a_run_that_is_gone_on_with_keeps_what_had_ended_and_begins_the_rest_again(
    stop_after: int, curriculum: bool, tmp_path: Path
) -> None:
    play(tmp_path / "whole", whole := EarlySource(tiny_model(), lines=1), curriculum=curriculum)
    before, after = (EarlySource(tiny_model(), lines=1) for _ in range(2))
    with pytest.raises(Stopped):
        play(tmp_path / "run", before, stop_after, curriculum)
    play(tmp_path / "run", after, curriculum=curriculum)
    at = stop_after - 1  # the step that is told of while it ends is made again
    kept = {step: len(begun.finished) for step, begun in after.began.items() if begun.finished}
    assert kept == ({at: 6} if at else {}), "what took weights once had written its line"
    assert after.began[at + 1].weights == at
    names = [
        [t.task_id for t in read_trajectories(place / "trajectories")]
        for place in (tmp_path / "run", tmp_path / "whole")
    ]
    assert names[0] == names[1] == [task for step in tasks_of(whole) for task in step]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    ids = [t.id for t in read_trajectories(tmp_path / "run" / "trajectories")]
    assert len(ids) == len(set(ids)) == 48


WINDOW = replace(CONFIG, group_sampling="fifo_window(in_flight_share=0.9)")
"""Of five groups."""


def test_a_group_that_others_pass_is_learned_from_when_it_has_ended_as_old_as_the_window_lets_it_be(
    tmp_path: Path,
) -> None:
    source = Straggling(tiny_model())
    told: list[Sequence[Trajectory]] = []
    figures: list[dict[str, float]] = []

    def on_step(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        told.append(trajectories)
        figures.append(record.metrics)

    run_training(tiny_model(), tiny_tokenizer(), IDS, source, WINDOW, tmp_path, TrainingOptions(on_step))
    began = [[int(t.id.split("-")[0]) for t in step[::3]] for step in told]
    assert began == [[0, 0], [1, 1], [2, 3], [3, 4], [2, 4], [5, 5], [6, 6], [7, 7]]
    assert [{t.policy_step for t in step} for step in told] == [{step} for step in range(8)]
    assert [m["staleness_max"] for m in figures] == [0, 1, 2, 2, 4, 2, 2, 2]
    assert all(t.lines[0].policy_step == 0 for t in told[4][:3])
    assert not source.under_way


def test_where_no_group_takes_longer_a_window_changes_nothing(tmp_path: Path) -> None:
    windowed, strict = (
        trained(EarlySource(tiny_model(), quick=True), config, tmp_path / str(n))
        for n, config in enumerate((WINDOW, CONFIG))
    )
    clock = {"trainer_idle", "sampler_idle"}
    assert [{n: v for n, v in m.items() if n not in clock and not n.endswith("_s")} for m in windowed] == [
        {n: v for n, v in m.items() if n not in clock and not n.endswith("_s")} for m in strict
    ]


@pytest.mark.parametrize("stop_after", [4, *(pytest.param(n, marks=pytest.mark.heavy) for n in (2, 3, 5, 6))])
def test_a_run_with_a_window_that_is_gone_on_with_learns_from_each_group_once(stop_after: int, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        play(tmp_path, Straggling(tiny_model()), stop_after, config=WINDOW)
    play(tmp_path, Straggling(tiny_model()), config=WINDOW)
    stored = list(read_trajectories(tmp_path / "trajectories"))
    assert len({t.id for t in stored}) == len(stored) == 48
    assert [t.policy_step for t in stored] == [step for step in range(8) for _ in range(6)]


def test_a_window_where_nothing_is_ahead_or_that_a_source_knows_nothing_of_is_refused(tmp_path: Path) -> None:
    message = r"trainer\.group_sampling without trainer\.max_staleness_steps is 'window'.* set trainer\.max_staleness"
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, group_sampling="window", max_staleness_steps=0)
    with pytest.raises(ConfigError, match=r"in_flight_share of trainer\.group_sampling .* is 1\.5; .* at most 1"):
        replace(CONFIG, group_sampling="fifo_window(in_flight_share=1.5)")

    class Blind(EarlySource):
        wait_for_first_group = None  # type: ignore[assignment]

    with pytest.raises(
        ConfigError, match=r"group_sampling is 'fifo_window'; this source of rollouts has no `wait_for_first_group`"
    ):
        run_training(tiny_model(), tiny_tokenizer(), IDS, Blind(tiny_model()), WINDOW, tmp_path)


def test_where_sampler_and_trainer_take_turns_a_lead_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"staleness_steps is 2; vLLM cannot sleep while it samples.*leave it at 0"):
        validate_run(RolloutConfig(engine=Vllm(sleep=True)), CONFIG, 100)


def test_to_keep_keys_over_a_sync_is_refused_where_no_rollout_is_under_way_in_one() -> None:
    with pytest.raises(ConfigError, match=r"kv_on_sync is 'keep'; without .*max_staleness_steps no .* give that too"):
        validate_run(RolloutConfig(kv_on_sync="keep"), replace(CONFIG, max_staleness_steps=0), 100)


def test_a_source_that_cannot_play_ahead_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_staleness_steps .* no `start_rollouts`; leave it at 0"):
        run_training(tiny_model(), tiny_tokenizer(), IDS, SampledSource(tiny_model()), CONFIG, tmp_path)


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("importance", ["none", "none(tolerance=0.5)"])
def test_older_lines_need_a_correction(importance: str, ahead: int) -> None:
    assert replace(CONFIG, importance_sampling=importance, max_staleness_steps=0).importance_sampling == importance
    message = rf"importance_sampling with .*max_staleness_steps is '{re.escape(importance)}'; .* choose token_truncate"
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, importance_sampling=importance, max_staleness_steps=ahead)


@pytest.mark.parametrize("importance", ["token_truncate", "token_mask", "token_band"])
def test_each_correction_of_tokens_goes_with_a_lead(importance: str) -> None:
    assert replace(CONFIG, importance_sampling=importance).max_staleness_steps == 2


def test_groups_that_are_played_again_do_not_go_with_a_lead() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.group_sampling with trainer\.max_staleness_steps"):
        replace(CONFIG, group_sampling="dynamic_sampling")


def test_a_band_leaves_out_tokens_whose_policy_has_moved_on(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=3, importance_sampling="token_band(low=0.9, cap=1.1)")
    figures = trained(EarlySource(tiny_model(), quick=True), config, tmp_path)
    assert figures[0]["importance_kept"] == 1.0
    assert 0 < figures[2]["importance_kept"] < 1
