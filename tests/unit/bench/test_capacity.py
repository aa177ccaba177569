"""The fleet on paper: its arithmetic, and that the page shows what the published figures give."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaling.capacity import PAGE, Costs, Fleet, block, ceilings, lines_per_s, longest_line_s, published

PLAIN = Fleet(machines=2, gpus=2, cores=10, tokens_per_s=100.0, tokens=10.0, lines=4.0, consoles=80)
"""40 lines a second, 10 of each GPU, 10 rollouts."""
COSTS = Costs(host=0.02, console=0.01, birth=0.04, owner=0.05, memory=2.0**20)


def test_what_gpus_write_takes_cores_and_the_scarcest_comes_first() -> None:
    assert lines_per_s(PLAIN) == 40
    found = ceilings(PLAIN, COSTS)
    assert [one.what.split()[1] for one in found] == ["owner,", "event", "of"]
    assert [one.needed for one in found] == pytest.approx([0.5, 0.2, 0.8])
    assert [one.there for one in found] == [1.0, 1.0, 10]
    assert longest_line_s(PLAIN, COSTS) == pytest.approx(20 / 40 - 0.04)


@given(st.integers(1, 1000), st.integers(1, 16), st.floats(1, 1e5))
def test_cores_are_exhausted_by_lines_that_compute_as_long_as_is_told(machines: int, gpus: int, speed: float) -> None:
    fleet = replace(PLAIN, machines=machines, gpus=gpus, tokens_per_s=speed)
    slow = replace(COSTS, console=COSTS.console + longest_line_s(fleet, COSTS))
    (cores,) = [one for one in ceilings(fleet, slow) if one.what.startswith("cores")]
    assert cores.share == pytest.approx(1.0)


def test_the_page_shows_the_fleet_on_paper_that_the_published_figures_give() -> None:
    assert block(Fleet(), published()) == PAGE.text
