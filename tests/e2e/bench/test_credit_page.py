"""The pages of the credit experiment show the published results and no others; their writer accepts any experiment."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.cli import CreditBenchConfig
from benchmarks.credit import gain_table as buys
from benchmarks.credit import page as credit
from benchmarks.credit import regime_report as regimes
from benchmarks.credit.conditions import BASELINE
from benchmarks.credit.experiment import Experiment, report
from benchmarks.credit.page import block
from benchmarks.credit.rows import POINTS, Run, Start
from benchmarks.credit.settings import REGIMES, Settings, header
from benchmarks.generated_blocks import Block
from repl_rl.settings.argument_parser import parse
from repl_rl.utils.package_data import find_asset

BASE = find_asset("policies/quickstart")
TOLD = ("Q\n>>> 1\n",)
FIGURES = (
    *("solve_rate", "greedy", "line_error_rate", "lines_per_rollout", "rollout_tokens", "void_line_rate"),
    *("print_rate", "try_rate", "repeat_rate", "with_error", "repaired"),
)


def run(condition: str, seed: int, level: float) -> Run:
    solve = [level, level + 0.1, level + 0.2 + 0.01 * seed]
    flat = [0.1] * 3
    after = dict.fromkeys(FIGURES, level + 0.3 + 0.01 * seed)
    agreed = {point: {"cosine": 0.25, "signal": 0.5, "tokens": 40.0} for point in POINTS}
    # What seeds have in common cancels in a difference; this does not.
    solve[0] += 0.002 * ((seed * len(condition)) % 5)
    return Run(
        condition, seed, [40, 80, 120], solve, flat, flat, after, 1e-6, 1.0, 1.0, 30.0, 2e-3, agreed, ("Q\n>>> 1\n",)
    )


def written(levels: dict[str, float], seeds: int, regime: str = "", rates: tuple[float, ...] = ()) -> dict[str, object]:
    """A report of runs made by hand; `levels` are solve rates at the beginning."""
    settings = Settings(regime=regime, tokens=100, rates=rates)
    runs = [run(name, seed, level) for name, level in levels.items() for seed in range(seeds)]
    starts = [Start("lines", dict.fromkeys(FIGURES, 0.2), 1.0), Start("fenced", dict.fromkeys(FIGURES, 0.3), 9.0)]
    found = report(header(settings, BASE), runs, starts, Experiment(Path("out"), settings, list(levels), seeds))
    copied: dict[str, object] = json.loads(json.dumps(found))
    return copied


def test_the_figures_of_the_page_are_those_of_the_published_experiment() -> None:
    assert credit.PAGE.text == block(json.loads(credit.FIGURES.read_text()))


def test_the_plan_of_the_page_is_that_of_the_shipped_regimes_with_what_is_published() -> None:
    assert regimes.PAGE.text == regimes.block(regimes.PUBLISHED.reports)
    assert regimes.SUMMARY.text == regimes.summary(regimes.PUBLISHED.reports)


@pytest.mark.parametrize("typed", [credit.PAGE.around.replace(regimes.PAGE.text, ""), regimes.SUMMARY.around])
def test_no_number_was_typed_into_a_page_by_hand(typed: str) -> None:
    assert not re.search(r"\d", re.sub(r"```sh\n.*?```", "", typed, flags=re.DOTALL))


def test_the_overview_has_a_row_per_regime_with_its_findings_and_the_difference_that_its_seeds_detect() -> None:
    levels = {BASELINE: 0.4, "two_stream/penalty": 0.6, "errors/first": 0.2, "errors/spared": 0.4}
    floor = written({BASELINE: -0.15, "errors/first": -0.14}, seeds=6, regime="long")
    text = regimes.overview({"noise": written(levels, seeds=6, regime="noise"), "long": floor})
    (row,) = re.findall(r"^\| `noise` \| .*$", text, re.MULTILINE)
    found = r"\| 3 \| `two_stream/penalty` \+20\.\d \([^)]*\) \| `errors/first` -\d+\.\d \([^)]*\) \| \d\.\d \|"
    assert re.search(found, row)
    assert re.search(r"^\| `long` \| .* \| 1 \| not counted \|  \|  \|$", text, re.MULTILINE)
    assert text.count("| not run yet |") == len(regimes.names()) - 2


def test_every_command_of_the_page_is_one() -> None:
    commands = [line.split() for line in re.findall(r"^(?:repl-rl|python) .*$", regimes.SUMMARY.around, re.MULTILINE)]
    ours = [words[3:] for words in commands if words[:3] == ["repl-rl", "bench", "credit"]]
    every, cell = (parse(CreditBenchConfig, "bench credit", words, find_asset(REGIMES), "regime") for words in ours)
    assert every.json == Path("noise.json")
    assert (cell.regime, cell.conditions, cell.first_seed, cell.seeds) == ("noise", ("errors/first",), 3, 1)
    assert cell.out != every.out, "a cell that is there is not played again"
    assert [words[1:3] for words in commands if words[0] == "python"] == [["-m", credit.__name__]]


def test_a_regime_is_told_with_corrected_differences_agreement_and_what_its_seeds_detect() -> None:
    levels = {BASELINE: 0.4, "two_stream/penalty": 0.6, "errors/first": 0.2, "errors/spared": 0.4}
    found = written(levels, seeds=6, regime="noise", rates=(1e-3, 2e-3))
    text = regimes.block({"noise": found})
    assert text.startswith(regimes.plan())
    assert "Of 3 conditions 1 (`two_stream/penalty`) is above `outcome/none` after Holm's correction." in text
    assert "Of 3 conditions 1 (`errors/first`) is below `outcome/none` after Holm's correction." in text
    assert "| cosine, start | cosine, middle | cosine, end | signal, start |" in text
    assert "| `errors/first` | 0.25 | 0.25 | 0.25 | 0.50 |" in text
    assert "Tuned learning rates: `outcome/none` 0.002" in text
    assert "Measured spread over seeds" in text


def test_a_regime_with_blocks_is_published_whole_or_not_at_all(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- generated by benchmarks/credit/regime_report.py -->\n<!-- end of the generated block -->\n")
    shown = regimes.Published(tmp_path / "figures.json", {Block(page, "credit/regime_report"): regimes.block})
    found = written({BASELINE: 0.4, "fenced": 0.2}, seeds=3, regime="pretrained")
    with pytest.raises(KeyError):
        shown.add([{**found, "figures": {}}])
    assert not shown.figures.exists()
    shown.add([found])
    assert page.read_text().count("Blocks against lines, both with the outcome alone") == 1


def test_the_default_preset_follows_by_the_rule_of_the_page() -> None:
    up, down = ({BASELINE: 0.4, "two_stream/penalty": level} for level in (0.6, 0.2))
    other = {BASELINE: 0.4, "errors/first": 0.5, "two_stream/penalty": 0.4}
    rows = {name: written(levels, seeds=6, regime="noise") for name, levels in (("up", up), ("down", down))}
    assert regimes.preset({}) == "two_stream/penalty"
    assert regimes.preset({"errors": written(other, seeds=6)}) == "errors/first"
    assert regimes.preset({"today": written(other, seeds=6)}) == "two_stream/penalty", "this regime does not decide"
    assert regimes.preset({"noise": rows["up"], "today": rows["down"]}) == BASELINE, "found below in some regime"
    assert regimes.preset({"pretrained": rows["down"]}) == "two_stream/penalty", "it is looked at and decides nothing"
    replaced = regimes.summary({"errors": written(other, seeds=6)})
    assert "after 1 published regimes, `errors/first` replaces `two_stream/penalty`." in replaced


def test_the_sentence_of_the_readme_is_that_of_the_published_regimes() -> None:
    assert buys.SHORT.text == buys.block(regimes.PUBLISHED.reports)


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_what_was_found_is_counted_either_way_over_all_regimes_and_blocks_are_no_credit_of_lines() -> None:
    first = written({BASELINE: 0.4, "two_stream/penalty": 0.2, "fenced": 0.1}, seeds=6, regime="noise")
    second = written({BASELINE: 0.4, "return_to_go/none": 0.6, "errors/first": 0.4}, seeds=6, regime="long")
    reports = {"noise": first, "long": second}
    text = one_line(buys.together(reports))
    assert "Of 3 comparisons at equal sampled tokens, 1 learned faster and 1 slower, after Holm's" in text
    assert "The regimes are `long`, `noise`." in text
    assert "Of 2 with a penalty for lines in error, 1 had fewer of them on held-out tasks (20.0 points)" in text
    assert re.search(r"Their seeds detect \d\.\d( to \d\.\d)? points", text)
    assert "learned faster and 1 slower" in regimes.summary(reports)
    assert "| `noise` | 6 | 30% | 20% | -30.0 (" in buys.together(reports)
    text = one_line(buys.block(reports))
    assert "Of 3 comparisons in 2 regimes, 1 learned faster and 1 slower, after Holm's correction." in text
    assert re.search(r"The seeds detect differences of \d\.\d( to \d\.\d)? points\.", text)
    assert "their replication" not in text, "no regime was asked again"
    assert "| `noise` | 6 | 30% | 20% | -30.0 (" in text
    assert text.count("between fences") == 1, "where it was played"
    assert "not been measured yet" in buys.block({})
    assert buys.together({}) == ""


def test_a_regime_in_which_nearly_nothing_is_solved_is_said_to_tell_nothing_and_is_not_counted() -> None:
    floor = written({BASELINE: -0.15, "errors/first": -0.14}, seeds=6, regime="long")
    told = written({BASELINE: 0.4, "errors/first": 0.2}, seeds=6, regime="noise")
    assert "This regime shows nothing" in regimes.block({"long": floor})
    assert "shows nothing" not in regimes.block({"noise": told})
    reports = {"long": floor, "noise": told}
    assert "Of 1 comparison in 1 regime, " in one_line(buys.block(reports))
    text = one_line(buys.together(reports))
    assert "Of 1 comparison at" in text
    assert "The regimes are `noise`." in text
    assert text.endswith("Not counted: `long`, where nearly nothing was solved under any condition.")


def test_what_is_found_again_on_other_seeds_is_told_and_counted_apart() -> None:
    levels = {BASELINE: 0.4, "two_stream/penalty": 0.6, "errors/first": 0.5, "errors/spared": 0.4}
    first = written(levels, seeds=6, regime="errors")
    levels["errors/first"] = 0.3
    again = written({name: levels[name] for name in list(levels)[:3]}, seeds=6, regime="errors_again")
    reports = {"errors": first, "errors_again": again}
    told = (
        "- Of 2 conditions that `errors` found to differ from `outcome/none` on 6 seeds, 1 (`two_stream/penalty`) is "
    )
    told += "found again, in the same direction, on 6 seeds. 6 of these are among the first.\n"
    assert told in regimes.block(reports)
    assert "found again" not in regimes.block({"errors_again": again}), "nothing to hold it against"
    text = one_line(buys.together(reports))
    assert "Of 3 comparisons at equal sampled tokens, 2 learned faster" in text
    assert "The regimes are `errors`." in text
    assert re.search(r"\| `errors` \| `two_stream/penalty` \| \+20\.0 [^|]*\| \+20\.0 [^|]*\| 6 \| yes \|", text)
    assert re.search(r"\| `errors` \| `errors/first` \|[^|]*\| -10\.[^|]*\| 6 \| no \|", text)
    text = one_line(buys.block(reports))
    assert re.search(r"\| `errors` \| `two_stream/penalty` \| \+20\.0 [^|]*\| \+20\.0 [^|]*\| 6 \| yes \|", text)
    assert "Of 3 comparisons in 1 regime, 2 learned faster and none slower, after Holm's correction." in text
    assert "no gain that other seeds repeat" not in text, "it was found again"
    assert regimes.preset(reports) == "two_stream/penalty"
    levels["two_stream/penalty"] = 0.2
    below = written({name: levels[name] for name in list(levels)[:2]}, seeds=6, regime="errors_again")
    reports = {"errors": first, "errors_again": below}
    assert regimes.preset(reports) == "errors/first"
    assert "The default, `two_stream/penalty`, has no gain that other seeds repeat." in one_line(buys.block(reports))


def test_blocks_are_told_beside_lines_with_rollouts_of_both() -> None:
    found = written({BASELINE: 0.4, "fenced": 0.2}, seeds=3, regime="pretrained")
    text = regimes.block({"pretrained": found})
    assert "| held out, before training | 20.0% | 30.0% | |" in text
    assert re.search(r"\| solved over the budget \| 4\d\.\d% .*\| 2\d\.\d% .*\| -20\.\d ", text)
    assert "| with an error, before training, and of those, solved | 96 of 480, 19 | 144 of 480, 43 |" in text
    counts = {level: [round((level + 0.3 + 0.01 * seed) * 480) for seed in range(3)] for level in (0.4, 0.2)}
    cells = (f" {sum(counts[level])} of 1440, " for level in (0.4, 0.2))
    assert re.search(r"\| with an error in all runs, and of those, solved \|{}\d+ \|{}\d+ \|".format(*cells), text)
    assert "Line by line, greedy, after training with seed 0:\n\n````text\nQ\n>>> 1\n````\n" in text
    assert "Blocks, greedy, after training with seed 0:" in text
    assert "Blocks against lines" not in regimes.block({"noise": written({BASELINE: 0.4}, seeds=2, regime="noise")})


@pytest.mark.heavy
def test_a_plan_alone_says_that_nothing_is_published() -> None:
    assert regimes.summary({}).endswith("Nothing is published yet.\n")
    assert regimes.block({}) == regimes.plan()
    for name in regimes.names():
        assert f"| `{name}` |" in regimes.plan()


def test_sentences_name_what_is_certainly_above_and_below_the_baseline_and_nothing_else() -> None:
    levels = {BASELINE: 0.4, "process/penalty": 0.6, "process/gated": 0.2, "fenced": 0.1}
    text = block(written(levels, seeds=3))
    assert "of 2 conditions with line credit, 1 is (`process/penalty`) above" in text
    assert "1 is (`process/gated`) below" in text
    assert "start from another policy, which solves 30.0% where the bundled one solves 20.0%" in text


def test_one_seed_is_published_without_intervals_and_without_certainty() -> None:
    text = block(written({BASELINE: 0.4, "process/penalty": 0.6}, seeds=1))
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
