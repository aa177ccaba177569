"""Copy the figures of `repl-rl bench fleet --json FILE` into docs/, table included.

python -m benchmarks.fleet FILE
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.pages import ROOT, Block

PAGE = Block(ROOT / "docs" / "scaling.md", "fleet")
FIGURES = ROOT / "docs" / "scaling.json"


def block(cpus: int, plan: Mapping[str, float], rows: Sequence[Mapping[str, float]]) -> str:
    """The generated block of docs/scaling.md."""
    text = f"On {cpus} cores; rollouts of {plan['lines']} lines in groups of {plan['group']}, "
    text += f"{plan['rollout_s']:g} s long on the mean.\n\n"
    text += "| nodes | in flight | rollouts | efficiency | owner's ms of CPU a rollout | weights, MB | to all, s |\n"
    text += "|---" * 7 + "|\n"
    for row in rows:
        cells = (
            f"{row['nodes']:.0f}",
            f"{row['in_flight']:,.0f}",
            f"{row['rollouts']:,.0f}",
            f"{row['efficiency']:.2f}",
            f"{row['owner_cpu_ms_a_rollout']:.2f}",
            f"{row['weights_mb']:.0f}",
            f"{row['weights_s']:.2f}",
        )
        text += f"| {' | '.join(cells)} |\n"
    return text


def main(file: Path) -> None:
    """Publish the figures in `file`."""
    found = json.loads(file.read_text())
    FIGURES.write_text(file.read_text())
    PAGE.write(block(found["cpus"], found["plan"], found["fleets"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
