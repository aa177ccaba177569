"""docs/credit.md shows the published figures and no others, and the script that writes it takes any experiment."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import credit
from benchmarks.credit import block
from repl_rl.lab.credit.conditions import BASELINE
from repl_rl.lab.credit.experiment import Experiment, report
from repl_rl.lab.credit.rows import Run, Start
from repl_rl.lab.credit.settings import Settings, header

FIGURES = (
    *("solve_rate", "greedy", "line_error_rate", "lines_per_rollout", "rollout_tokens", "void_line_rate"),
    *("print_rate", "try_rate", "repeat_rate"),
)


def run(condition: str, seed: int, level: float) -> Run:
    solve = [level, level + 0.1, level + 0.2 + 0.01 * seed]
    flat = [0.1] * 3
    after = dict.fromkeys(FIGURES, level + 0.3 + 0.01 * seed)
    return Run(condition, seed, [40, 80, 120], solve, flat, flat, after, 1e-6, 1.0, 1.0, 30.0)


def written(levels: dict[str, float], seeds: int) -> dict[str, object]:
    """A report of runs made by hand; `levels` are solve rates at the beginning."""
    settings = Settings(tokens=100)
    runs = [run(name, seed, level) for name, level in levels.items() for seed in range(seeds)]
    starts = [Start("lines", dict.fromkeys(FIGURES, 0.2), 1.0), Start("fenced", dict.fromkeys(FIGURES, 0.3), 9.0)]
    found = report(header(settings), runs, starts, Experiment(Path("out"), settings, (), seeds))
    copied: dict[str, object] = json.loads(json.dumps(found))
    return copied


def test_the_figures_of_the_page_are_those_of_the_published_experiment() -> None:
    assert credit.PAGE.text == block(json.loads(credit.FIGURES.read_text()))


def test_no_number_was_typed_into_the_page_by_hand() -> None:
    assert not re.search(r"\d", credit.PAGE.around)


def test_every_command_of_the_page_is_one() -> None:
    from repl_rl.cli.bench import CreditBenchConfig
    from repl_rl.settings.arguments import parse

    first, second = re.findall(r"^(?:repl-rl|python) .*$", credit.PAGE.around, re.MULTILINE)
    words = first.split()
    assert words[:3] == ["repl-rl", "bench", "credit"]
    assert parse(CreditBenchConfig, "bench credit", words[3:]).json == Path("figures.json")
    assert second.split()[1:3] == ["-m", credit.__name__]


def test_sentences_name_what_is_certainly_above_and_below_the_baseline_and_nothing_else() -> None:
    levels = {BASELINE: 0.4, "process/none": 0.6, "process/gated": 0.2, "fenced": 0.1}
    text = block(written(levels, seeds=3))
    assert "of 2 conditions with line credit, 1 is (`process/none`) above" in text
    assert "1 is (`process/gated`) below" in text
    assert "start from another policy, which solves 30.0% where the bundled one solves 20.0%" in text


def test_one_seed_is_published_without_intervals_and_without_certainty() -> None:
    text = block(written({BASELINE: 0.4, "process/none": 0.6}, seeds=1))
    assert "0 are above" in text
    assert "+20.0 |" in text
    assert "not reached" in text


def test_cells_that_are_the_same_by_definition_say_so() -> None:
    text = block(written({BASELINE: 0.4, "two_stream/gated": 0.6}, seeds=2))
    assert text.count(f"same as `{BASELINE}`") == 2 * 3


def test_the_plot_is_drawn_of_whatever_there_is(tmp_path: Path) -> None:
    credit.draw(written({BASELINE: 0.4, "fenced": 0.6}, seeds=2), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.parametrize("seeds", [1, 2])
def test_differences_of_the_baseline_to_itself_are_zero(seeds: int) -> None:
    found = written({BASELINE: 0.4}, seeds)
    assert "+0.0" in block(found)
