"""What line credit buys, in one sentence, for the README: of all published regimes of docs/credit.md."""

import textwrap
from collections.abc import Mapping, Sequence

from benchmarks.findings import asked_again, findings, found_again
from benchmarks.pages import ROOT, Block, Report, points
from repl_rl.lab.credit.power import smallest_difference

SHORT = Block(ROOT / "README.md", "regimes")
FLOOR = 0.05
"""Where every condition solves less than this share over the budget, a regime cannot tell them apart."""


def at_floor(report: Report) -> bool:
    """Whether nearly nothing was solved in a regime, so that no difference could show. Seen after the runs."""
    conditions = report["figures"]["conditions"].values()
    return all(figures["mean"]["train_solve_rate"]["value"] < FLOOR for figures in conditions)


def block(reports: Mapping[str, Report]) -> str:
    """The sentence, with every number and name from the figures; one more tells of code between fences.

    That is no credit of lines, and is not counted with it.
    """
    again = asked_again(reports)
    floors = [name for name, report in reports.items() if at_floor(report)]
    counted = {name: report for name, report in reports.items() if name not in floors and name not in again}
    if not counted:
        return "What line credit buys is not measured yet.\n"
    tested = {
        f"`{name}` in `{regime}`": figures
        for regime, report in sorted(counted.items())
        for name, figures in report["figures"]["conditions"].items()
        if figures["holm"] is not None and name != "fenced"
    }
    found = {f"`{name}` in `{at}`": value for at, report in counted.items() for name, value in findings(report).items()}
    faster, slower = ([name for name in tested if sign * found.get(name, 0.0) > 0] for sign in (1, -1))
    errors = {name: f["difference"]["line_error_rate"] for name, f in tested.items() if "/none` in" not in name}
    fewer = [100 * -d["value"] for d in errors.values() if d["high"] is not None and d["high"] < 0]
    detected = [
        100 * smallest_difference(report["figures"]["spread"], report["seeds"])
        for report in counted.values()
        if report["figures"]["spread"] is not None and report["seeds"] > 1
    ]
    names = ", ".join(f"`{name}`" for name in sorted(counted))
    count = f"{len(tested)} comparison{'' if len(tested) == 1 else 's'}"
    text = (
        f"What line credit buys, [measured](docs/credit.md) beside the outcome alone at equal sampled tokens "
        f"({names}): of {count} {_named(faster)} learned faster and {_named(slower)} slower, after "
        f"Holm's correction in each regime{_between(detected, ', with seeds that detect {} points of solve rate')}; "
        f"and of {len(errors)} with a penalty for lines in error, {len(fewer) or 'none'} had fewer of them on held-out "
        f"tasks{_between(fewer, ' ({} points)')} by an interval that excludes 0, uncorrected."
    )
    if again:
        text += _once_more(again)
    if floors:
        named = ", ".join(f"`{name}`" for name in sorted(floors))
        text += f" Not counted is {named}, in which nearly nothing was solved under any condition."
    text += "".join(_of_blocks(name, report) for name, report in sorted(counted.items()))
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False) + "\n"


def _once_more(again: Mapping[str, tuple[Report, Report]]) -> str:
    """How many of the findings were found on seeds of their own, too, and what each came to there."""
    told = []
    for first, other in again.values():
        asked, found = found_again(first, other)
        figures = other["figures"]["conditions"]
        differences = ((name, points(figures[name]["difference"]["train_solve_rate"])) for name in asked)
        each = ", ".join(f"`{name}` {difference}" for name, difference in differences)
        count = f"{len(asked)} finding{'' if len(asked) == 1 else 's'}"
        of = f"{len(found)} of {count} of `{first['settings']['regime']}`"
        told.append(f" Asked again on {other['seeds']} other seeds, {of} held: {each}.")
    return "".join(told)


def _of_blocks(regime: str, report: Report) -> str:
    """What code between fences came to in place of lines, both with the outcome alone; "": it was not played there."""
    figures, starts = report["figures"]["conditions"], report["figures"]["start"]
    if "fenced" not in figures or not {"lines", "fenced"} <= starts.keys():
        return ""
    over, after = (points(figures["fenced"]["difference"][key]) for key in ("train_solve_rate", "solve_rate"))
    lines, blocks = (f"{starts[way]['solve_rate']:.0%}" for way in ("lines", "fenced"))
    return (
        f" Code between fences in place of single lines, in `{regime}`, on {report['seeds']} seeds, after equally many "
        f"demonstrations (which brought blocks to {blocks}, lines to {lines}): {over} points over the budget, and "
        f"{after} on held-out tasks after it."
    )


def _named(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})" if names else "none"


def _between(values: Sequence[float], text: str) -> str:
    if not values:
        return ""
    least, most = (f"{value:.1f}" for value in (min(values), max(values)))
    return text.format(least if least == most else f"{least} to {most}")
