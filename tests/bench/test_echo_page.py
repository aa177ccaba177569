"""docs/echo.md shows the published figures and no others, and the script that writes it takes any experiment."""

import json
import re
from pathlib import Path

from benchmarks import echo
from repl_rl.lab.echo import EchoConfig
from tests.bench.test_echo import play


def test_the_figures_of_the_page_are_those_of_the_published_experiments() -> None:
    assert echo.PAGE.text == echo.block(json.loads(echo.FIGURES.read_text()))


def test_no_number_was_typed_into_the_page_by_hand() -> None:
    text = re.sub(r"arXiv \d+\.\d+", "", echo.PAGE.around)
    assert not re.search(r"\d", text)


def test_sentences_name_what_is_certainly_higher_and_lower_and_nothing_else(tmp_path: Path) -> None:
    _, report = play(EchoConfig(tokens=1000, seeds=3, weights=(0.0, 0.1, 0.5), out=tmp_path))
    copied = json.loads(json.dumps(report))
    text = echo.block([copied])
    assert "Held-out tasks solved: of 2 weights above 0, 1 (0.1) higher and 1 (0.5) lower" in text
    assert "| 0.1 | +10.1 (" in text
    assert "| *before* |  | 20.0% |" in text


def test_one_seed_has_no_interval_and_says_nothing_for_certain(tmp_path: Path) -> None:
    _, report = play(EchoConfig(tokens=1000, seeds=1, out=tmp_path))
    text = echo.block([json.loads(json.dumps(report))])
    assert "of 0 weights above 0, none higher and none lower" in text
    assert "| 0.1 | 54.0% | 50.0% |" in text
