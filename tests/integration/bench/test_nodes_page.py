"""What a console behind an actor costs: the page says what was measured, and what follows from it."""

import json

import pytest

from benchmarks.scaling.console_nodes import FIGURES, PAGE, Effort, block, measure


def test_the_page_about_scaling_has_the_figures_that_were_measured() -> None:
    found = json.loads(FIGURES.read_text())
    assert PAGE.text == block(found)
    assert f"computes for more than {found['away_cpu_ms'] - found['here_cpu_ms']:.1f} ms" in PAGE.text


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_line_behind_an_actor_takes_longer_and_is_measured_as_such() -> None:
    found = measure(Effort(lines=20, consoles=4, each=10, rounds=3))
    assert 0 < found["here_ms"] < found["away_ms"]
    assert 0 < found["here_cpu_ms"] < found["away_cpu_ms"]
