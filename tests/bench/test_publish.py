"""docs/rollouts.md shows the published figures and no others."""

import json
import re

from benchmarks.rollouts.page import FIGURES, PAGE, block


def test_the_figures_of_the_page_are_those_of_the_published_run() -> None:
    assert PAGE.text == block(json.loads(FIGURES.read_text()))


def test_every_number_with_a_unit_stands_in_the_generated_block() -> None:
    assert not re.search(r"\d+(\.\d+)?(x|%| ?ms| ?KiB)\b", PAGE.around)
