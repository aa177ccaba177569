"""Each two values of two settings of `train` are tried together: trained, killed, resumed; or refused in one line."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path

import pytest

from repl_rl import cli
from tests.support.trainer.setting_pairs import REFUSED, SETTINGS, Row, fits, pairs, prepare, table, words

ROWS = range(len(table()))
FIRST: Row = {name: next(iter(values)) for name, values in SETTINGS.items()}


def refused() -> list[Row]:
    """A row for each two values that are refused together, all else as it is by default; a window needs a lead."""
    pairs = [dict(zip(pair, values, strict=True)) for pair in REFUSED for values in product(*pair.values())]
    return [{**FIRST, **({"ahead": "1"} if "window" in pair.values() else {}), **pair} for pair in pairs]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the policy is, and the files that rows name."""
    made = tmp_path_factory.mktemp("refused")
    prepare(made)
    return made


@pytest.mark.parametrize("row", refused(), ids=lambda row: ", ".join(v for k, v in row.items() if v != FIRST[k]))
def test_what_does_not_go_together_is_refused_in_one_line_before_anything_is_there(
    row: Row, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(place.rglob("*"))
    assert cli.main([*words(row, place), "--out", str(place / "runs")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"repl-rl: error: .+\n", said.err)
    assert sorted(place.rglob("*")) == before


def test_each_two_values_are_together_in_a_row_or_are_refused() -> None:
    """Two values are refused, too, where each value of a third setting is refused with one of them."""
    together = {both for row in table() for both in combinations(row.items(), 2)}
    for both in pairs():
        assert (both in together) == fits(dict(both)), both


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[str]]:
    """The program that tries the rows that were asked for, one after the other."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asked = [
        test.callspec.params["row"]
        for test in tests
        if test.originalname == test_a_row_is_trained_killed_and_resumed_to_its_end.__name__
    ]
    seed = os.environ.get("REPL_RL_SEED", str(int.from_bytes(os.urandom(2))))
    print(f"seed {seed}")
    command = [sys.executable, "-m", "tests.support.trainer.setting_pairs", str(tmp_path_factory.mktemp("pairs")), seed]
    with subprocess.Popen(
        [*command, *map(str, asked)], stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as program:
        yield program
        program.kill()


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_trained_killed_and_resumed_to_its_end(row: int, verdicts: subprocess.Popen[str]) -> None:
    assert verdicts.stdout is not None
    verdict = json.loads(verdicts.stdout.readline())
    print(verdict, table()[row])
    assert verdict["row"] == row
    assert verdict["wrong"] == []
    assert verdict["kills"]
