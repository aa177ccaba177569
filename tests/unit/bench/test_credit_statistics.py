"""Figures of the credit experiment from rows made by hand, whose answers are known."""

from math import gamma, pi, sqrt

import pytest

from benchmarks.credit import statistics
from benchmarks.credit.conditions import CONDITIONS, effects
from benchmarks.credit.rows import Run, Start
from benchmarks.credit.statistics import (
    aggregate,
    at_tokens,
    budget_mean,
    differences,
    mean,
    reached,
    running_mean,
    together,
    tokens_to,
)

AFTER = {"solve_rate": 0.9, "greedy": 1.0, "line_error_rate": 0.1}


def run(condition: str, seed: int, solve: list[float], tokens: list[int] | None = None, after: float = 0.9) -> Run:
    steps = tokens or [100 * (n + 1) for n in range(len(solve))]
    flat = [0.0] * len(solve)
    return Run(condition, seed, steps, solve, flat, flat, {**AFTER, "solve_rate": after}, 0.0, 1.0, 1.0, 2.0)


def test_the_interval_of_a_mean_is_students() -> None:
    # 1, 2, 3, 4: deviation sqrt(5 / 3), so half the interval is 3.182 * sqrt(5 / 3) / 2.
    found = mean([1.0, 2.0, 3.0, 4.0])
    half = 3.182 * sqrt(5 / 3) / 2
    assert (found.value, found.seeds) == (2.5, 4)
    assert found.low == pytest.approx(2.5 - half)
    assert found.high == pytest.approx(2.5 + half)


def test_the_quantiles_leave_two_and_a_half_percent_above_them() -> None:
    for freedom, quantile in enumerate(statistics._T, start=1):
        scale = gamma((freedom + 1) / 2) / (sqrt(freedom * pi) * gamma(freedom / 2))
        step = quantile / 2000
        heights = [(1 + (n * step) ** 2 / freedom) ** (-(freedom + 1) / 2) for n in range(2001)]
        inner = step / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))
        assert 0.5 - scale * inner == pytest.approx(0.025, abs=3e-5), freedom


def test_one_seed_has_no_interval() -> None:
    found = mean([0.5])
    assert (found.low, found.high) == (None, None)


def test_the_target_is_reached_by_a_full_window_and_never_by_one_lucky_step() -> None:
    rates = [1.0, 0.5, 0.5, 0.8, 0.9, 0.9, 0.9]
    tokens = [10, 20, 30, 40, 50, 60, 70]
    assert running_mean(rates, 2) == pytest.approx([1.0, 0.75, 0.5, 0.65, 0.85, 0.9, 0.9])
    assert tokens_to(tokens, rates, 0.8, 2) == 50
    assert tokens_to(tokens, rates, 0.95, 2) is None
    assert tokens_to([10], [1.0], 0.8, 2) is None


def test_the_mean_over_the_budget_weighs_steps_by_tokens_and_cuts_the_last_one() -> None:
    # 100 tokens at 0.2, 300 at 0.4, and 100 of the last step's 400 at 1.0: (20 + 120 + 100) / 500.
    assert budget_mean([100, 400, 800], [0.2, 0.4, 1.0], 500) == pytest.approx(0.48)
    assert budget_mean([100, 400], [0.2, 0.4], 1000) == pytest.approx(0.35)


def test_curves_are_compared_at_equal_tokens() -> None:
    assert at_tokens([100, 250, 300], [0.1, 0.2, 0.3], [50, 100, 249, 250, 1000]) == [0.1, 0.1, 0.1, 0.2, 0.3]


def test_a_run_that_never_reaches_the_target_counts_with_the_whole_budget_and_is_told() -> None:
    runs = [run("a", 0, [0.9] * 6), run("a", 1, [0.1] * 6)]
    found = reached(runs, budget=600)
    assert (found["runs"], found["of"]) == (1, 2)
    assert isinstance(found["tokens"], dict)
    assert found["tokens"]["value"] == (500 + 600) / 2


def test_differences_are_paired_by_seed_over_the_seeds_that_both_have() -> None:
    base = {n: run("outcome/none", n, [0.5], after=after) for n, after in enumerate((0.1, 0.5, 0.9))}
    mine = {n: run("x", n, [0.6], after=after) for n, after in ((0, 0.2), (1, 0.6), (2, 1.0), (3, 0.0))}
    found = differences(mine, base, 100)["solve_rate"]
    # Each seed gains 0.1 although the seeds are far apart.
    assert (found.value, found.low, found.high, found.seeds) == (*[pytest.approx(0.1)] * 3, 3)
    assert differences({9: mine[0]}, base, 100) == {}


def test_cells_together_are_compared_seed_by_seed_where_all_of_them_were_played() -> None:
    def level(name: str, *after: float) -> dict[int, Run]:
        return {seed: run(name, seed, [0.5], after=value) for seed, value in enumerate(after)}

    by_name = {"a": level("a", 0.3, 0.7, 0.9), "b": level("b", 0.5, 0.9), "c": level("c", 0.1, 0.5)}
    found = together(by_name, ["a", "b"], ["c"], 100)["solve_rate"]
    assert (found.value, found.low, found.high, found.seeds) == (*[pytest.approx(0.3)] * 3, 2)
    assert together(by_name, ["a", "b"], ["nobody"], 100) == {}


def test_effects_compare_cells_that_are_played_and_each_shaping_with_none_of_its_own_estimator() -> None:
    names = {condition.name for condition in CONDITIONS}
    for cells, others in effects().values():
        assert {*cells, *others} <= names
    cells, others = effects()["gated in place of none"]
    assert [cell.split("/")[0] for cell in cells] == ["process", "two_stream", "return_to_go", "state_anchor"]
    assert others == ("outcome/none", "outcome/none", "return_to_go/none", "state_anchor/none")


def test_an_aggregate_has_every_condition_and_the_starts() -> None:
    runs = [run("process/none", 0, [0.4, 0.8]), run("outcome/none", 0, [0.2, 0.6])]
    found = aggregate(runs, [Start("lines", {"solve_rate": 0.2}, 1.0)], budget=200)
    assert found["start"] == {"lines": {"solve_rate": 0.2}}
    assert isinstance(found["conditions"], dict)
    assert set(found["conditions"]) == {"process/none", "outcome/none"}
    other = found["conditions"]["process/none"]
    assert other["mean"]["train_solve_rate"]["value"] == pytest.approx(0.6)
    assert other["difference"]["train_solve_rate"]["value"] == pytest.approx(0.2)
    assert found["conditions"]["outcome/none"]["difference"]["solve_rate"]["value"] == 0
