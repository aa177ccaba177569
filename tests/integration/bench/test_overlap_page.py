"""What rollouts ahead of the update bring: the page says what was measured."""

import json

import pytest

from benchmarks.update.overlap import FIGURES, PAGE, Effort, block, measure


def test_the_page_about_the_update_has_the_figures_of_the_overlap_or_says_that_there_are_none() -> None:
    told = block(json.loads(FIGURES.read_text())) if FIGURES.exists() else "Nothing is published yet.\n"
    assert PAGE.text == told


def test_the_ratio_is_that_of_legs_that_ran_one_after_the_other() -> None:
    shares = {"trainer_idle": 0.25, "sampler_idle": 0.5, "update_s": 1.0, "rollout_s": 0.5, "sync_s": 0.0}
    turns = [{"step_s": 3.0, **shares}, {"step_s": 2.0, **shares}]
    ahead = [{"step_s": 1.5, **shares}, {"step_s": 2.0, **shares}]
    setting = {name: getattr(Effort(), name) for name in Effort.__dataclass_fields__}
    text = block({**setting, "turns": turns, "ahead": ahead, "parameters": 25e6, "cpus": 2, "load_average": 0.5})
    assert "| a step, seconds | 2.50 | 1.75 |" in text
    assert "ahead against sequential: 1.50 (1.00 to 2.00)" in text


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_both_ways_are_measured_alternately() -> None:
    found = measure(Effort(engine="transformers", size="small", steps=3, rounds=2, prompts=2, group=2, lines=2))
    for way in ("turns", "ahead"):
        rows = found[way]
        assert isinstance(rows, list)
        assert all(row["step_s"] > 0 for row in rows)
