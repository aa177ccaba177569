"""Summarize line credit over all published regimes: a list with two tables for the README, and for docs/credit.md."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.credit.conditions import CONDITIONS
from benchmarks.credit.findings import DEFAULT, asked_again, findings, found_again
from benchmarks.credit.power import smallest_difference
from benchmarks.generated_blocks import ROOT, Block, Report, points

SHORT = Block(ROOT / "README.md", "credit/regime_report")
FLOOR = 0.05
"""Where every condition solves less than this share over the budget, a regime cannot tell them apart."""


def at_floor(report: Report) -> bool:
    """Whether nearly nothing was solved in a regime, so that no difference could show. Seen after the runs."""
    conditions = report["figures"]["conditions"].values()
    return all(figures["mean"]["train_solve_rate"]["value"] < FLOOR for figures in conditions)


@dataclass(frozen=True, slots=True)
class Counted:
    """The regimes that count: in which something could be found, and whose seeds are the first."""

    regimes: Mapping[str, Report]
    floors: Sequence[str]
    """Those in which nothing could."""
    again: Mapping[str, tuple[Report, Report]]
    """Those that ask again."""
    tested: Mapping[str, Report]
    """Conditions with credit of lines, named with their regime; code between fences is none."""
    faster: Sequence[str]
    slower: Sequence[str]
    """Those that were found so, after Holm's correction in each regime."""
    detected: Sequence[float]
    """The smallest difference that the seeds of each regime detect by the spread as measured, in points."""


def counted(reports: Mapping[str, Report]) -> Counted:
    """What there is to tell of, sorted."""
    again = asked_again(reports)
    floors = sorted(name for name, report in reports.items() if at_floor(report))
    kept = {name: report for name, report in sorted(reports.items()) if name not in floors and name not in again}
    tested = {
        f"`{name}` in `{regime}`": figures
        for regime, report in kept.items()
        for name, figures in report["figures"]["conditions"].items()
        if figures["holm"] is not None and name != "fenced"
    }
    found = {f"`{name}` in `{at}`": value for at, report in kept.items() for name, value in findings(report).items()}
    faster, slower = ([name for name in tested if sign * found.get(name, 0.0) > 0] for sign in (1, -1))
    detected = [
        100 * smallest_difference(report["figures"]["spread"], report["seeds"])
        for report in kept.values()
        if report["figures"]["spread"] is not None and report["seeds"] > 1
    ]
    return Counted(kept, floors, again, tested, faster, slower, detected)


def block(reports: Mapping[str, Report]) -> str:
    """Return the README's summary: a list and two tables, with every number and name from the figures.

    Code between fences has a separate table, because it does not credit lines.
    """
    told = counted(reports)
    if not told.regimes:
        return "Credit per line has not been measured yet.\n"
    items = [
        "Credit per line was compared with the outcome alone, at equal sampled tokens ([results](docs/credit.md)).",
        f"Of {_comparisons(told)} in {len(told.regimes)} regime{'' if len(told.regimes) == 1 else 's'}, "
        f"{len(told.faster) or 'none'} learned faster and {len(told.slower) or 'none'} slower, after Holm's correction."
        f"{_between(told.detected, ' The seeds detect differences of {} points.')}",
        *_describe_default(told),
    ]
    lines = "".join(f"{textwrap.fill(f'- {item}', 118, subsequent_indent='  ')}\n" for item in items)
    return "\n".join(part for part in (lines, _replications(told.again), _block_table(told.regimes)) if part)


def _describe_default(told: Counted) -> Iterator[str]:
    """Yield a sentence about the default preset, if other seeds did not repeat its gain."""
    for first, other in told.again.values():
        asked, found = found_again(first, other)
        if DEFAULT in asked and DEFAULT not in found:
            yield f"The default, `{DEFAULT}`, has no gain that other seeds repeat."


def together(reports: Mapping[str, Report]) -> str:
    """Return the findings of all regimes as a list for docs/credit.md, or "" if no regime counts yet."""
    told = counted(reports)
    if not told.regimes:
        return ""
    errors = {name: f["difference"]["line_error_rate"] for name, f in told.tested.items() if "/none` in" not in name}
    fewer = [100 * -d["value"] for d in errors.values() if d["high"] is not None and d["high"] < 0]
    names = ", ".join(f"`{name}`" for name in told.regimes)
    items = [
        f"Of {_comparisons(told)} at equal sampled tokens, {len(told.faster) or 'none'} learned faster and "
        f"{len(told.slower) or 'none'} slower, after Holm's correction per regime.",
        f"The regimes are {names}.{_between(told.detected, ' Their seeds detect {} points of solve rate.')}",
        f"Of {len(errors)} with a penalty for lines in error, {len(fewer) or 'none'} had fewer of them on held-out "
        f"tasks{_between(fewer, ' ({} points)')}. Their intervals exclude 0, uncorrected.",
    ]
    if told.floors:
        named = ", ".join(f"`{name}`" for name in told.floors)
        items.append(f"Not counted: {named}, where nearly nothing was solved under any condition.")
    parts = ["".join(f"- {item}\n" for item in items), _replications(told.again), _block_table(told.regimes)]
    return "\n".join(part for part in parts if part)


def _comparisons(told: Counted) -> str:
    return f"{len(told.tested)} comparison{'' if len(told.tested) == 1 else 's'}"


def _replications(again: Mapping[str, tuple[Report, Report]]) -> str:
    """Return a table of findings that other seeds repeat, or "" without any."""
    rows = []
    for first, other in again.values():
        asked, found = found_again(first, other)
        for name in asked:
            came_to = (
                points(report["figures"]["conditions"][name]["difference"]["train_solve_rate"])
                for report in (first, other)
            )
            cells = (
                f"`{first['settings']['regime']}` | {_show_condition(name)} | {' | '.join(came_to)} | {other['seeds']}"
            )
            rows.append(f"| {cells} | {'yes' if name in found else 'no'} |\n")
    if not rows:
        return ""
    head = "| regime | finding | first seeds, points | other seeds, points | other seeds, number | found again |\n"
    return (
        f"Findings and their replication, in points of solve rate over the budget:\n\n{head}{'|---' * 6}|\n"
        + "".join(rows)
    )


def _block_table(regimes: Mapping[str, Report]) -> str:
    """Return a table that compares code between fences with lines, or "" without such a regime."""
    rows = "".join(
        f"| `{regime}` | {seeds} | {blocks} | {lines} | {over} | {after} |\n"
        for regime, seeds, blocks, lines, over, after in _block_figures(regimes)
    )
    if not rows:
        return ""
    return (
        "Code between fences minus single lines, after equally many demonstrations, in points:\n\n"
        "| regime | seeds | blocks before training | lines before training | over the budget | held out |\n"
        f"{'|---' * 6}|\n{rows}"
    )


def _block_figures(regimes: Mapping[str, Report]) -> Iterator[tuple[str, ...]]:
    """Yield regime, seeds, solve rates of blocks and lines before training, and the two differences."""
    for regime, report in regimes.items():
        figures, starts = report["figures"]["conditions"], report["figures"]["start"]
        if "fenced" not in figures or not {"lines", "fenced"} <= starts.keys():
            continue
        over, after = (points(figures["fenced"]["difference"][key]) for key in ("train_solve_rate", "solve_rate"))
        blocks, lines = (f"{starts[way]['solve_rate']:.0%}" for way in ("fenced", "lines"))
        yield regime, str(report["seeds"]), blocks, lines, over, after


def _between(values: Sequence[float], text: str) -> str:
    if not values:
        return ""
    least, most = (f"{value:.1f}" for value in (min(values), max(values)))
    return text.format(least if least == most else f"{least} to {most}")


def _show_condition(name: str) -> str:
    """Return the name of a condition, and whether this version can train it."""
    removed = any(condition.removed for condition in CONDITIONS if condition.name == name)
    return f"`{name}` (removed)" if removed else f"`{name}`"
