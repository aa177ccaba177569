"""Copy the figures of `repl-rl bench fleet --json FILE`, of one run or several, into docs/, table included.

python -m benchmarks.scaling.page FILE [FILE ...]
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.generated_blocks import ROOT, Block

PAGE = Block(ROOT / "docs" / "scaling.md", "scaling/page")
FIGURES = ROOT / "benchmarks" / "results" / "scaling.json"


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run of `bench fleet` writes."""

    cpus: int
    lines: int
    """Of each rollout."""
    group: int
    """Rollouts of a group."""
    fleets: Sequence[Mapping[str, object]]
    """A row each."""


COLUMNS: Mapping[str, str] = {
    "nodes": "{:.0f}",
    "in_flight": "{:,.0f}",
    "rollouts": "{:,.0f}",
    "rollout_s": "{:g}",
    "efficiency": "{:.2f}",
    "owner_cpu_ms_a_rollout": "{:.2f}",
    "weights_mb": "{:,.0f}",
    "weights_s": "{:.2f}",
}
"""Of a row, in the order of the page."""


def merged(runs: Sequence[Figures]) -> Figures:
    """The figures of runs of one machine as those of one.

    Raises:
        ValueError: there are none, they are of different machines or of other rollouts, or nodes were lost in one.
    """
    if not runs:
        raise ValueError("no figures; name one file that `repl-rl bench fleet --json FILE` wrote, or several")
    if spoiled := [row for run in runs for row in run.fleets if row.get("nodes_lost")]:
        raise ValueError(f"nodes were lost while these were measured; measure them again: {spoiled}")
    if len({(run.cpus, run.lines, run.group) for run in runs}) != 1:
        raise ValueError(f"runs of different machines or rollouts stand in no table together: {runs}")
    return replace(runs[0], fleets=[row for run in runs for row in run.fleets])


def block(found: Figures) -> str:
    """The generated block of docs/scaling.md."""
    text = f"On {found.cpus} cores; rollouts of {found.lines} lines in groups of {found.group}.\n\n"
    text += "| nodes | in flight | rollouts | of s, mean | efficiency | owner's ms of CPU a rollout "
    text += "| weights, MB | to all, s |\n" + "|---" * 8 + "|\n"
    for row in found.fleets:
        cells = [form.format(row[name]) for name, form in COLUMNS.items()]
        text += f"| {' | '.join(cells)} |\n"
    return text


def main(files: Sequence[Path]) -> None:
    """Publish the figures in `files`."""
    found = merged([Figures(**json.loads(file.read_text())) for file in files])
    FIGURES.write_text(json.dumps(asdict(found), indent=2) + "\n")
    PAGE.write(block(found))


if __name__ == "__main__":
    main([Path(file) for file in sys.argv[1:]])
