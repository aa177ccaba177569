"""What a workspace costs: the page says what was measured, and the measurement plays what it says."""

import json

import pytest

from benchmarks.console.workspaces import FIGURES, LARGE, PAGE, Effort, block, measure


def test_the_page_about_workspaces_has_the_figures_that_were_measured() -> None:
    assert PAGE.text == block(json.loads(FIGURES.read_text()))


def test_the_workspace_that_is_measured_is_a_megabyte_a_file_and_a_package() -> None:
    assert 1_000_000 < len(LARGE.content) < 1_200_000
    assert LARGE.files
    assert LARGE.preload == ("numpy",)


@pytest.mark.heavy
def test_a_console_with_a_workspace_is_born_far_faster_than_its_set_up_is_typed() -> None:
    found = measure(Effort(consoles=16, repeats=2, typed=4))
    assert found["workspace_ms"] < found["typed_ms"]
    assert found["workspace_mib"] < len(LARGE.content) / 1e6 + 30
