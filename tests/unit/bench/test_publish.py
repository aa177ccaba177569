"""docs/rollouts.md and results/rollouts.md show the published figures and no others."""

import json
import re

from benchmarks.rollouts.page import DETAILS, FIGURES, PAGE, block, details


def test_the_figures_of_the_page_are_those_of_the_published_run() -> None:
    report = json.loads(FIGURES.read_text())
    assert PAGE.text == block(report)
    assert DETAILS.text == details(report)


def test_every_number_with_a_unit_stands_in_the_generated_block() -> None:
    assert not re.search(r"\d+(\.\d+)?(x|%| ?ms| ?KiB)\b", PAGE.around + DETAILS.around)
