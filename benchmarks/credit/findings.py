"""What a regime found, and whether another with seeds of its own found it again."""

from collections.abc import Mapping

from benchmarks.credit.conditions import BASELINE
from benchmarks.credit.power import ALPHA
from benchmarks.generated_blocks import Report

DEFAULT = "two_stream/penalty"
"""The condition that the default preset is."""
_AGAIN = "_again"


def findings(report: Report) -> dict[str, float]:
    """The differences of the primary figure that are found after Holm's correction, by condition."""
    found = report["figures"]["conditions"].items()
    certain = {name: figures for name, figures in found if figures["holm"] is not None and figures["holm"] < ALPHA}
    return {name: figures["difference"]["train_solve_rate"]["value"] for name, figures in certain.items()}


def asked_again(reports: Mapping[str, Report]) -> dict[str, tuple[Report, Report]]:
    """Regimes that ask again what another found, each with the report of that one before its own."""
    firsts = {name: name.removesuffix(_AGAIN) for name in reports if name.endswith(_AGAIN)}
    return {name: (reports[first], reports[name]) for name, first in firsts.items() if first in reports}


def found_again(first: Report, again: Report) -> tuple[list[str], list[str]]:
    """Conditions that the first found to differ and the other holds too, and those of them that it found to differ in
    the same direction."""
    before, after = findings(first), findings(again)
    asked = [name for name in before if name in again["figures"]["conditions"]]
    return asked, [name for name in asked if before[name] * after.get(name, 0.0) > 0]


def conditions(count: int) -> str:
    """So many of them."""
    return "1 condition" if count == 1 else f"{count} conditions"


def told_again(first: Report, again: Report) -> str:
    """That in a sentence, with every number and name from the figures."""
    asked, found = found_again(first, again)
    before, after = ({row["seed"] for row in report["rows"] if row["kind"] == "run"} for report in (first, again))
    listed = f" ({', '.join(f'`{name}`' for name in found)})" if found else ""
    return (
        f"Of {conditions(len(asked))} that `{first['settings']['regime']}` found to differ from `{BASELINE}` on "
        f"{len(before)} seeds, {len(found)}{listed} {'is' if len(found) == 1 else 'are'} found again, in the same "
        f"direction, on {len(after)} seeds. {len(before & after) or 'None'} of these are among the first."
    )
