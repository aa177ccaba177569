"""What seeds can show: Student's tails by another road, powers by chance itself, and Holm's correction by hand."""

import random
from math import gamma, pi, sqrt
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.credit.power import beyond, critical, holm, p_value, pooled, smallest_difference


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.706), (3, 3.182), (5, 2.571), (7, 2.365), (15, 2.131)])
def test_the_tail_is_students(freedom: int, t: float) -> None:
    scale = gamma((freedom + 1) / 2) / (sqrt(freedom * pi) * gamma(freedom / 2))
    step = t / 2000
    heights = [(1 + (n * step) ** 2 / freedom) ** (-(freedom + 1) / 2) for n in range(2001)]
    inner = step / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))
    assert beyond(t, freedom) == pytest.approx(0.5 - scale * inner, abs=1e-6)
    assert beyond(-t, freedom) == pytest.approx(1 - beyond(t, freedom), abs=1e-6)
    assert critical(freedom) == pytest.approx(t, abs=2e-3)


# Paired t, two-sided 5 %, power 80 %: effects of published tables, in deviations of a difference.
@pytest.mark.parametrize(("seeds", "effect"), [(4, 2.13), (6, 1.43), (8, 1.16), (10, 1.00), (15, 0.78)])
def test_the_smallest_difference_is_that_of_published_tables(seeds: int, effect: float) -> None:
    assert smallest_difference(1.0, seeds) == pytest.approx(effect, abs=0.006)
    assert smallest_difference(0.02, seeds) == pytest.approx(0.02 * effect, abs=1e-3)
    assert smallest_difference(1.0, seeds, alpha=0.01) > smallest_difference(1.0, seeds)


def test_a_difference_of_that_size_is_found_four_times_out_of_five_and_none_one_time_in_twenty() -> None:
    drawn = random.Random(0)

    def share(shift: float) -> float:
        samples = ([drawn.gauss(shift, 1) for _ in range(6)] for _ in range(2000))
        bar = critical(5)
        return fmean(abs(fmean(xs)) / (stdev(xs) / sqrt(6)) > bar for xs in samples)

    assert share(smallest_difference(1.0, 6)) == pytest.approx(0.8, abs=0.03)
    assert share(0.0) == pytest.approx(0.05, abs=0.02)


def test_p_is_that_of_the_paired_t_test() -> None:
    # Mean 2.5, deviation sqrt(5 / 3): t = 3.873 with 3 degrees of freedom, whose tail is closed:
    # 1/2 - (atan(t / sqrt 3) + (t / sqrt 3) / (1 + t^2 / 3)) / pi.
    assert p_value([1.0, 2.0, 3.0, 4.0]) == pytest.approx(0.030466, abs=1e-5)
    assert p_value([0.1, -0.1]) == pytest.approx(1.0)
    assert p_value([0.0, 0.0]) == 1.0


def test_holm_multiplies_the_smallest_by_all_and_none_falls_below_one_before_it() -> None:
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.9})
    assert found == pytest.approx({"a": 0.04, "c": 0.09, "b": 0.09, "d": 0.9})
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), max_size=6))
def test_a_corrected_p_is_never_below_the_plain_one_nor_above_what_bonferroni_says(found: dict[str, float]) -> None:
    adjusted = holm(found)
    assert adjusted.keys() == found.keys()
    for name, p in found.items():
        assert p <= adjusted[name] <= min(1.0, p * len(found)) + 1e-12


def test_spreads_are_pooled_by_their_degrees_of_freedom() -> None:
    assert pooled([(3.0, 2), (1.0, 5)]) == pytest.approx(sqrt((9 + 4) / 5))
