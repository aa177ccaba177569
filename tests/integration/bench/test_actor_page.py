"""What an actor costs beside this process: the page says what was measured."""

import json

import pytest

from benchmarks.scaling.actor_overhead import FIGURES, KINDS, PAGE, Effort, block, measure


def test_the_page_about_scaling_has_the_figures_of_an_actor_or_says_that_there_are_none() -> None:
    told = block(json.loads(FIGURES.read_text())) if FIGURES.exists() else "Nothing is published yet.\n"
    assert PAGE.text == told


def test_an_engine_is_told_with_its_medians_and_the_quartiles_of_the_ratio() -> None:
    row = {"here": 1000.4, "away": 900.0, "ratio": 0.9, "lower": 0.88, "upper": 0.93}
    found = {**dict.fromkeys(KINDS, row), "tasks": 4, "group": 2, "concurrency": 8, "rounds": 3}
    text = block({**found, "cpus": 2, "load_average": 0.5})
    assert text.count("| 1,000 | 900 | 0.90 (0.88 to 0.93) |") == len(KINDS)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_an_actor_and_this_process_play_the_same_by_turns() -> None:
    found = measure(Effort(tasks=8, group=2, concurrency=8, rounds=2), engines=("scripted",))
    row = found["scripted"]
    assert isinstance(row, dict)
    assert 0 < row["lower"] <= row["ratio"] <= row["upper"]
    assert row["here"] > 0 < row["away"]
