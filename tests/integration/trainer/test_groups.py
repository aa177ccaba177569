"""Groups of a step: others in the place of those that teach nothing, never a part of one."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate import Accelerator

from repl_rl.credit.stop_policy import StopPolicy
from repl_rl.errors import ConfigError
from repl_rl.tasks import Curriculum, Task
from repl_rl.trainer.config import DynamicSamplingOptions, TrainerConfig
from repl_rl.trainer.plugins.dynamic_sampling import DynamicGroupSampler, TaskPool, has_zero_variance
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trajectory.trajectory import NamedReward, Trajectory
from tests.support.trainer.group_process import IDS, Told
from tests.support.trainer.launch import launch
from tests.support.trainer.tiny_policies import SampledSource, tiny_model, tiny_tokenizer


def mixed(task: str, number: int) -> float:
    """Outcomes that differ within a group."""
    return float(number % 2)


def all_dull(task: str, number: int) -> float:
    return 1.0


def some_dull(task: str, number: int) -> float:
    return 0.0 if task in IDS[:2] else float(number % 2)


def groups_of(
    source: Told,
    plan: DynamicSamplingOptions,
    curriculum: Curriculum | None = None,
    stops: StopPolicy | None = None,
    seed: int = 0,
) -> DynamicGroupSampler:
    pool = TaskPool(IDS, seed)
    return DynamicGroupSampler(source, 2, Accelerator(cpu=True), plan, pool, curriculum, stops)


def tasks_of(rollouts: Sequence[Trajectory]) -> list[str]:
    return [t.task_id for t in rollouts]


def test_a_group_whose_outcomes_are_equal_gives_its_place_to_another_task() -> None:
    source = Told(some_dull)
    groups = groups_of(source, DynamicSamplingOptions(2))
    found = tasks_of(groups.collect(["task 0", "task 0", "task 5", "task 5", "task 1", "task 1"], 0))
    assert found[2:4] == ["task 5"] * 2
    assert found[0] == found[1] != found[4] == found[5]
    assert not {*found} & {"task 0", "task 1"}
    assert source.asked[1] == [*found[:2], *found[4:]]
    assert groups.metrics == {
        "groups_refilled": 2.0, "rollouts_cut": 4.0, "tokens_cut": 12.0, "solve_rate_played": 0.3,
    }  # fmt: skip


def test_what_teaches_nothing_still_is_learned_from_after_the_last_round() -> None:
    source = Told(all_dull)
    groups = groups_of(source, DynamicSamplingOptions(3))
    found = tasks_of(groups.collect(["task 0", "task 0"], 0))
    assert [asked[0] for asked in source.asked] == [*dict.fromkeys(asked[0] for asked in source.asked)], "each is new"
    assert len(source.asked) == 4
    assert found == source.asked[-1]
    assert groups.metrics["groups_refilled"] == 3.0


class Discounted(Told):
    """Right answers, all of them worth less than one."""

    def collect(self, task_ids: Sequence[str], policy_step: int) -> list[Trajectory]:
        parts = (NamedReward("judge", 1.0), NamedReward("discount", -0.25))
        return [replace(t, outcome=0.75, outcomes=parts, grade=1.0) for t in super().collect(task_ids, policy_step)]


def test_a_right_answer_counts_as_solved_whatever_it_is_worth() -> None:
    learned: list[tuple[str, float]] = []

    class Told(Curriculum):
        def record(self, outcomes: Iterable[tuple[str, float]]) -> None:
            learned.extend(outcomes)

    curriculum = Told([Task(i, f"{i}?", "1", family=f"odd/{n % 2}") for n, i in enumerate(IDS)])
    groups = groups_of(Discounted(all_dull), DynamicSamplingOptions(1), curriculum)
    groups.collect(["task 0", "task 0"], 0)
    assert groups.metrics["solve_rate_played"] == 1.0
    assert [solved for _, solved in learned] == [1.0, 1.0]


def test_when_no_other_task_is_left_the_step_goes_on_with_what_there_is() -> None:
    source = Told(all_dull)
    groups = groups_of(source, DynamicSamplingOptions(99))
    assert len(groups.collect(["task 0", "task 0"], 0)) == 2
    assert len(source.asked) == len(IDS)


@pytest.mark.parametrize(("outcomes", "nothing"), [
    ((0.0, 0.0, 0.0), True), ((0.3, 0.3 + 1e-12), True), ((0.0, 1.0), False), ((None, 1.0, None), True),
    ((None, None), True), ((None, 1.0, 0.5), False),
])  # fmt: skip
def test_equal_are_outcomes_that_no_rollout_that_counts_differs_in(
    outcomes: Sequence[float | None], nothing: bool
) -> None:
    assert has_zero_variance(outcomes) == nothing


def test_failed_rollouts_and_masked_stops_do_not_make_a_difference() -> None:
    def outcome(task: str, number: int) -> float | None:
        return None if task == "task 0" and number == 0 else float(number % 2)

    source = Told(outcome)
    assert tasks_of(groups_of(source, DynamicSamplingOptions(1)).collect(["task 0"] * 2, 0)) != ["task 0"] * 2
    source = Told(mixed)
    masked = groups_of(source, DynamicSamplingOptions(1), stops=StopPolicy(mask=("max_lines",)))
    masked.collect(["task 0"] * 2, 0)
    assert masked.metrics["groups_refilled"] == 1.0


def test_the_same_seed_draws_the_same_tasks() -> None:
    def found(seed: int) -> list[list[str]]:
        source = Told(some_dull)
        groups = groups_of(source, DynamicSamplingOptions(2), seed=seed)
        for step in range(5):
            groups.collect(["task 0", "task 0", "task 1", "task 1"], step)
        return source.asked

    assert found(3) == found(3) != found(4)


def test_a_curriculum_draws_the_others_and_hears_of_what_was_thrown_away() -> None:
    tasks = [Task(i, f"{i}?", "1", family="easy" if n < 6 else "hard") for n, i in enumerate(IDS)]
    curriculum = Curriculum(tasks)
    source = Told(lambda task, number: 1.0 if task in IDS[:6] else float(number % 2))
    groups = groups_of(source, DynamicSamplingOptions(4), curriculum=curriculum)
    for step in range(30):
        groups.collect(["task 0"] * 4, step)
    rates = curriculum.solve_rates
    assert rates["easy"] > 0.8, "thrown away, and known to be too easy"
    assert rates["hard"] == 0.5, "what is learned from is told by the trainer"


@pytest.mark.parametrize(("text", "message"), [
    ("dynamic_sampling(max_rounds=0)", r"max_rounds of trainer\.group_sampling dynamic_sampling is 0; give at least 1"),
    ("refil", r"trainer\.group_sampling is 'refil'; choose one of dynamic_sampling, fifo_window"),
    ("dynamic_sampling(speed=0.5)", r"option speed of .* dynamic_sampling is 0\.5; its options are max_rounds"),
])  # fmt: skip
def test_a_plan_that_there_is_not_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainerConfig(group_sampling=text)


def test_the_trainer_learns_from_the_others_alone_and_tells_what_it_threw_away(tmp_path: Path) -> None:
    class Dull(SampledSource):
        def collect(self, task_ids: Sequence[str], policy_step: int) -> list[Trajectory]:
            found = super().collect(task_ids, policy_step)
            return [replace(t, outcome=1.0) if t.task_id in IDS[:6] else t for t in found]

    rows: list[dict[str, float]] = []
    learned: list[set[str]] = []

    def on_step(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        learned.append({t.task_id for t in trajectories})
        rows.append(record.metrics)

    config = TrainerConfig(
        steps=3, prompts_per_step=4, group_size=2, warmup_steps=0, group_sampling="dynamic_sampling(max_rounds=9)"
    )
    model = tiny_model()
    run_training(model, tiny_tokenizer(), IDS, Dull(tiny_model()), config, tmp_path, TrainingOptions(on_step))
    assert all(not tasks & {*IDS[:6]} and len(tasks) == 4 for tasks in learned)
    assert sum(row["groups_refilled"] for row in rows) > 0
    assert all(row["rollouts_cut"] == 2 * row["groups_refilled"] for row in rows)
    assert all(row["zero_variance_groups"] == 0.0 for row in rows)


@pytest.mark.heavy
def test_two_processes_play_the_same_groups_anew_also_one_that_straddles_them(tmp_path: Path) -> None:
    launch(2, "tests.support.trainer.group_process", str(tmp_path))
    left, right = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert left["metrics"] == right["metrics"]
    assert left["metrics"]["groups_refilled"] == 2.0
    found = [*left["tasks"], *right["tasks"]]
    assert len(left["tasks"]) == len(right["tasks"]) == 3
    pairs = list(zip(found[::2], found[1::2], strict=True))
    assert all(a == b for a, b in pairs)
    assert len({a for a, _ in pairs}) == 3
    assert not {*found} & {"task 0", "task 1"}
