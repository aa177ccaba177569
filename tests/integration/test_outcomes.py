"""Parts of an outcome: judges with weights, values that a sampler sets or adds, judges of whole groups."""

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.credit.credited_trajectory import CreditedTrajectory
from repl_rl.errors import ConfigError, InvariantError, UserCodeError
from repl_rl.judges import GroupJudge, apply_group_judges, check_judges, grade_answer, grade_async, load_group_judges
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSampler
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.rollout_hooks import GroupJudging
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.store.trajectory_json import dump_record, parse_record
from repl_rl.tasks import Task, set_judges
from repl_rl.tasks.task import WeightedJudge, parse_weighted_judges
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.config_checks import validate_run
from repl_rl.trajectory.trajectory import (
    LineStatus,
    NamedReward,
    Stop,
    Trajectory,
    add_outcome_part,
    compute_mean_parts,
)
from repl_rl.trajectory.trajectory_metrics import (
    OTHER,
    NamedMetrics,
    classify_error,
    compute_error_rates,
    compute_outcome_parts,
    compute_trajectory_metrics,
)
from tests.support.scripted_rollouts import TASK, world

RIGHT, WRONG = ["submit_final_answer(42)\n"], ["1 / 0\n", "submit_final_answer(41)\n"]


def played(lines: Sequence[str], sampler: RolloutSampler | None = None, task: Task = TASK) -> Trajectory:
    (t,) = asyncio.run(world(lines, sampler).collect([task]))
    return t


class Claiming(ReplSampler):
    """The line console, and then a claim about the outcome."""

    def __init__(self, say: Callable[[Episode], None], submits: bool = True) -> None:
        super().__init__()
        self.generate_reply = say
        self.submits = submits

    async def rollout(self, episode: Episode) -> None:
        if self.submits:
            await super().rollout(episode)
        else:
            await episode.sample()
        self.generate_reply(episode)


def test_an_outcome_that_is_set_stands_in_place_of_the_judges_and_the_answer_is_graded_all_the_same() -> None:
    t = played(RIGHT, Claiming(lambda e: e.set_outcome(-2.0, name="mine")))
    assert (t.outcome, t.outcomes, t.grade, t.solved) == (-2.0, (NamedReward("mine", -2.0),), 1.0, True)
    t = played(WRONG, Claiming(lambda e: e.set_outcome(7.5)))
    assert (t.outcome, t.grade, t.solved) == (7.5, 0.0, False)


def test_of_several_that_set_it_the_last_one_stands() -> None:
    def twice(episode: Episode) -> None:
        episode.set_outcome(3.0, name="first")
        episode.set_outcome(0.25, name="second")

    assert played(RIGHT, Claiming(twice)).outcomes == (NamedReward("second", 0.25),)


def test_what_is_added_comes_on_top_of_the_judges_value_by_name() -> None:
    def adds(episode: Episode) -> None:
        episode.set_outcome(0.5, name="short", add=True)
        episode.set_outcome(-0.25, name="rude", add=True)

    t = played(RIGHT, Claiming(adds))
    assert [(part.name, part.value) for part in t.outcomes] == [("exact", 1.0), ("short", 0.5), ("rude", -0.25)]
    assert (t.outcome, t.solved) == (1.25, True)


def test_without_an_answer_what_is_set_says_whether_it_is_solved() -> None:
    t = played(["x = 1\n"], Claiming(lambda e: e.set_outcome(1.0), submits=False))
    assert (t.outcome, t.grade, t.solved) == (1.0, None, True)
    assert not played(["x = 1\n"], Claiming(lambda e: e.set_outcome(0.99), submits=False)).solved


def test_an_outcome_of_one_judge_alone_is_recorded_as_before() -> None:
    t = played(RIGHT)
    assert (t.outcome, t.outcomes, t.grade, t.solved) == (1.0, (), None, True)


@pytest.mark.parametrize(("value", "name"), [(math.nan, "x"), (math.inf, "x"), (1.0, " ")])
def test_an_outcome_is_finite_and_has_a_name(value: float, name: str) -> None:
    with pytest.raises(UserCodeError, match=r"episode\.set_outcome\("):
        played(RIGHT, Claiming(lambda e: e.set_outcome(value, name=name)))


def test_a_rollout_that_fails_keeps_no_outcome_whatever_was_claimed() -> None:
    def fails(episode: Episode) -> None:
        episode.set_outcome(5.0)
        raise ValueError("mine")

    sampler = Claiming(lambda e: fails(e) if e.task.id == "b" else None)
    tasks = [replace(TASK, id=name) for name in "abc"]
    found = asyncio.run(world(RIGHT, sampler).collect(tasks))
    assert [t.outcome for t in found] == [1.0, None, 1.0]


def test_an_outcome_that_is_not_the_sum_of_its_parts_cannot_be_written_down() -> None:
    t = played(RIGHT)
    with pytest.raises(InvariantError, match="it is the sum of its parts"):
        replace(t, outcome=2.0, outcomes=(NamedReward("a", 1.0),))
    with pytest.raises(InvariantError, match="a grade is a finite number, next to an outcome in parts"):
        replace(t, grade=1.0)
    assert t.without_outcome().outcome is None


def test_parts_and_grade_are_stored_and_read_again() -> None:
    t = played(RIGHT, Claiming(lambda e: e.set_outcome(0.81, name="discounted")))
    assert parse_record(dump_record(CreditedTrajectory(t)), "here").trajectory == t
    assert b'"outcomes"' not in dump_record(CreditedTrajectory(played(RIGHT)))


# Judges with weights.


LENGTH, LINES = "tests.support.user_judges:length", "tests.support.user_judges:lines"


def test_judges_are_written_as_a_sum_of_weights_times_names() -> None:
    assert parse_weighted_judges("exact") == (WeightedJudge("exact"),)
    assert parse_weighted_judges("numeric + 0.2*my:format + -1e-3*my:other") == (
        WeightedJudge("numeric"), WeightedJudge("my:format", 0.2), WeightedJudge("my:other", -0.001),
    )  # fmt: skip


@pytest.mark.parametrize("text", ["exact +", "0.5 exact", "x*exact", "nan*exact", "exact + exact", "2*"])
def test_what_is_written_otherwise_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="judge is"):
        check_judges([replace(TASK, judge=text)])


@given(st.floats(-1e6, 1e6).filter(bool))
def test_a_weight_is_read_back_as_it_was_written(weight: float) -> None:
    (task,) = set_judges({"task": weight}, [replace(TASK, judge="exact")])
    assert parse_weighted_judges(task.judge) == (WeightedJudge("exact", weight),)


def test_the_judges_of_a_run_stand_in_place_of_a_tasks_own_which_task_stands_for() -> None:
    tasks = [TASK, replace(TASK, judge="numeric + 2*regex")]
    assert [t.judge for t in set_judges({"task": 0.5, "my:f": 1.0}, tasks)] == [
        "0.5*exact + my:f", "0.5*numeric + regex + my:f",
    ]  # fmt: skip
    assert set_judges({}, tasks) == tuple(tasks)


def test_several_judges_add_up_and_the_first_says_whether_it_is_solved() -> None:
    task = replace(TASK, judge=f"0.5*exact + 0.25*{LENGTH}")
    right, wrong = played(RIGHT, task=task), played(WRONG, task=task)
    assert [(part.name, part.value) for part in right.outcomes] == [("exact", 0.5), (LENGTH, 0.5)]
    assert (right.outcome, right.solved) == (1.0, True)
    assert (wrong.outcome, wrong.solved) == (0.5, False)
    assert grade_answer(task, "42") == 1.0


def test_a_judge_with_a_third_parameter_sees_the_rollout_and_the_tasks_other_fields_even_without_an_answer() -> None:
    task = replace(TASK, judge=f"exact + {LINES}", fields={"each": 0.25})
    t = played(["x = 1\n", "exit()\n"], task=task)
    assert (t.answer, t.outcome, t.grade) == (None, 0.5, 0.0)
    assert asyncio.run(grade_async(task, "42", None, t)) == 1.5
    with pytest.raises(ConfigError, match="it needs the rollout, which is missing"):
        grade_answer(task, "42")


# Judges of groups.


def shortest(task: Task, group: Sequence[Trajectory]) -> list[float]:
    """1 for the one with the fewest lines, less for each that is shorter."""
    return [1.0 - sum(len(other.lines) < len(t.lines) for other in group) for t in group]


def rank(lines_of_each: Sequence[int]) -> list[Trajectory]:
    found = [played(["x = 1\n"] * (n - 1) + RIGHT) for n in lines_of_each]
    judge = GroupJudge("shortest", shortest, 0.5)
    return asyncio.run(apply_group_judges([judge], [TASK] * len(found), found))


def test_a_group_judge_sees_all_rollouts_of_a_task_and_adds_to_their_outcomes() -> None:
    ranked = rank([2, 1, 3])
    assert [t.outcome for t in ranked] == [1.0, 1.5, 0.5]
    assert all(t.solved for t in ranked), "a ranking says nothing about right and wrong"
    assert compute_outcome_parts(ranked) == {"judge": 1.0, "shortest": 0.0}


def test_groups_are_judged_apart_and_a_rollout_that_failed_is_shown_to_nobody() -> None:
    shown: list[tuple[str, int]] = []

    def judge(task: Task, group: Sequence[Trajectory]) -> list[float]:
        shown.append((task.id, len(group)))
        return [1.0] * len(group)

    class Sometimes(ReplSampler):
        async def rollout(self, episode: Episode) -> None:
            if episode.task.id == "b" and not shown and "failed" not in seen:
                seen.add("failed")
                raise ValueError("once")
            await super().rollout(episode)

    seen: set[str] = set()
    a, b = replace(TASK, id="a"), replace(TASK, id="b")
    rollouts: Rollouts = replace(world(RIGHT, Sometimes()), hooks=(GroupJudging([GroupJudge("j", judge)]),))
    found = asyncio.run(rollouts.collect([a, b, a, b, b]))
    assert sorted(shown) == [("a", 2), ("b", 2)]
    assert [t.outcome for t in found if t.failure is None] == [2.0] * 4
    assert [t.outcome for t in found if t.stop is Stop.FAULT] == [None]


def test_group_judges_are_named_as_judges_are() -> None:
    (judge,) = load_group_judges({f"{__name__}:shortest": 0.5})
    assert (judge.name, judge.weight) == (f"{__name__}:shortest", 0.5)
    assert load_group_judges({}) == ()
    with pytest.raises(ConfigError, match="group judge is 'nowhere:f'"):
        load_group_judges({"nowhere:f": 1.0})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda task, group: [1.0], r"returned \(1.0,\) for 2 rollouts; return a finite number for each"),
        (lambda task, group: [math.nan] * 2, "returned .nan, nan. for 2 rollouts"),
        (lambda task, group: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_a_group_judge_that_breaks_its_contract_is_named(
    function: Callable[[Task, Sequence[Trajectory]], Sequence[float]], message: str
) -> None:
    with pytest.raises(UserCodeError, match=f"group judge mine: on task t1 it {message}"):
        GroupJudge("mine", function)(TASK, [played(RIGHT)] * 2)


def test_a_group_judge_that_hangs_is_named() -> None:
    release = threading.Event()

    def hangs(task: Task, group: Sequence[Trajectory]) -> list[float]:
        release.wait()
        return []

    try:
        with pytest.raises(UserCodeError, match=r"took longer than 0.05 s"):
            GroupJudge("mine", hangs, time_limit_s=0.05)(TASK, [played(RIGHT)])
    finally:
        release.set()


def test_processes_that_would_share_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    asked = RolloutConfig(group_judges={f"{__name__}:shortest": 1.0})
    with pytest.raises(ConfigError, match="each of 8 processes must play whole groups"):
        validate_run(asked, TrainerConfig(prompts_per_step=12, group_size=8), 5000)


# Figures by name.


def test_solved_is_what_the_judge_says_and_reward_is_what_it_is_worth() -> None:
    t = played(RIGHT, Claiming(lambda e: e.set_outcome(0.81, name="discounted")))
    figures = compute_trajectory_metrics([t, played(WRONG)])
    assert figures["solve_rate"] == 0.5
    assert figures["reward_mean"] == pytest.approx(0.405)


def test_lines_in_error_are_counted_by_class_and_add_up_to_the_error_rate() -> None:
    t = played(["1 / 0\n", "[][1]\n", "1 +* 2\n", "class Mine(Exception): pass\n", "\n", "raise Mine\n", *RIGHT])
    found = compute_error_rates([t])
    assert set(found) == {"ZeroDivisionError", "IndexError", "SyntaxError", OTHER}
    assert sum(found.values()) == pytest.approx(compute_trajectory_metrics([t])["line_error_rate"])
    assert classify_error(LineStatus.TIMEOUT, "ZeroDivisionError: lies\n>>> ") == "timeout"
    assert classify_error(LineStatus.EXCEPTION, "MadeUpByAProgram: 1\n>>> ") == OTHER


@given(st.lists(st.dictionaries(st.text(max_size=6), st.floats(-9, 9), max_size=9), max_size=9))
def test_a_run_follows_few_names_of_a_kind_and_loses_nothing(steps: list[dict[str, float]]) -> None:
    series = NamedMetrics(limit=4)
    known: set[str] = set()
    for values in steps:
        resumed = NamedMetrics(limit=4)
        resumed.load_state_dict(series.state_dict())
        figures = series.compute("reward", values)
        assert resumed.compute("reward", values) == figures, "a resumed run follows the same names"
        assert math.fsum(figures.values()) == pytest.approx(math.fsum(values.values()), abs=1e-9)
        assert known <= set(figures), "a name that came once is reported in every later step"
        known |= set(figures)
    assert len(known) <= 5


def test_means_by_name_are_over_all_rollouts() -> None:
    some: tuple[list[NamedReward], ...] = [NamedReward("a", 1.0), NamedReward("a", 2.0)], [NamedReward("b", -1.0)], []
    assert compute_mean_parts(some) == {"a": 1.0, "b": pytest.approx(-1 / 3)}
    assert compute_mean_parts([]) == {}
    assert add_outcome_part(played(RIGHT).without_outcome(), NamedReward("b", 2.0)).outcome == 2.0
