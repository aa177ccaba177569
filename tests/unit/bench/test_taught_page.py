"""results/templates.md shows what a model does after demonstrations, with the share of them that were correct."""

import json
from pathlib import Path

from benchmarks.models import taught
from repl_rl.cli import main


def test_the_table_is_that_of_the_kept_figures() -> None:
    assert taught.PAGE.text == taught.block(json.loads(taught.FIGURES.read_text()))


def test_good_demonstrations_are_correct_and_most_of_the_mix_of_guesses_are_not(tmp_path: Path) -> None:
    shares = {}
    for mix in ("clean", "cold"):
        words = f"transcripts --from-tasks builtin:chain builtin:reverse --mix {mix} --count 24 --sandbox inprocess"
        assert main([*words.split(), "--out", str(tmp_path / mix)]) == 0
        shares[mix] = taught.correct(tmp_path / mix)
    assert shares["clean"] == [1] * 24
    assert 0 < sum(shares["cold"]) < 12
