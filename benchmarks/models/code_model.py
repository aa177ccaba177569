"""Write the table of docs/pretrained.md that compares lines and fenced blocks of one model on GSM8K.

    python -m benchmarks.models.code_model LABEL=FOLDER ...    from folders of `repl-rl eval --out`, one per row

Figures of all labels are kept in benchmarks/results/coder.json; a label that is given again replaces its own.
"""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.generated_blocks import ROOT, Block, Report, points, share
from repl_rl.evaluation.confidence_intervals import compute_bootstrap_interval, wilson
from repl_rl.runs.store import read_trajectories
from repl_rl.samplers.chat_format import BOXED
from repl_rl.trajectory.trajectory import Stop, Trajectory

PAGE = Block(ROOT / "docs" / "pretrained.md", "models/code_model")
FIGURES = ROOT / "benchmarks" / "results" / "coder.json"
PARTS = {"greedy": "greedy", "1": "rollouts"}
"""Temperatures, and the folders of their rollouts in an evaluation."""
BLOCKS = "fenced blocks"
COMPARED = "lines, `chat_few_shot`", "lines between fences"
"""Labels whose difference to `BLOCKS` in solved problems is published."""


def figures(played: Sequence[Trajectory]) -> Report:
    """Return shares of rollouts with an answer and a right one, of executed lines in error, and tokens per rollout."""
    executed = [execution.status for trajectory in played for execution in trajectory.executions]
    return {
        "problems": len(played),
        "answered": asdict(wilson(sum(map(has_answered, played)), len(played))),
        "solved": asdict(wilson(sum(t.solved for t in played), len(played))),
        "errors": sum(status.is_error for status in executed) / max(1, len(executed)),
        "executed": len(executed),
        "tokens": sum(t.sampled_tokens for t in played) / len(played),
        "right": {t.task_id: int(t.solved) for t in played},
    }


def has_answered(trajectory: Trajectory) -> bool:
    """Return True where a rollout submitted an answer, or wrote one in a box."""
    return trajectory.stop is Stop.ANSWERED or any(re.search(BOXED, line.text) for line in trajectory.lines)


def evaluation(folder: Path) -> Report:
    """Return the figures of an evaluation for each temperature."""
    return {
        name: figures([t for file in sorted((folder / part).iterdir()) for t in read_trajectories(file)])
        for name, part in PARTS.items()
    }


def block(kept: Report) -> str:
    """Return the table, and the differences between lines and fenced blocks."""
    text = (
        "| | T | problems | answered | solved | lines in error | tokens per rollout |\n|---|---|---|---|---|---|---|\n"
    )
    for label, by_temperature in kept.items():
        for name, one in by_temperature.items():
            errors = f"{one['errors']:.1%}" if one["executed"] else "-"
            shares = f"{share(one['answered'])} | {share(one['solved'])}"
            text += f"| {label} | {name} | {one['problems']} | {shares} | {errors} | {one['tokens']:.0f} |\n"
    return text + "".join(difference(kept, label) for label in COMPARED if {label, BLOCKS} <= kept.keys())


def difference(kept: Report, label: str) -> str:
    """Return the difference in solved problems between the rows of `label` and fenced blocks, for each temperature."""
    found = []
    for name in PARTS:
        ours, theirs = (kept[row][name]["right"] for row in (label, BLOCKS))
        both = sorted(ours.keys() & theirs.keys())
        value = asdict(compute_bootstrap_interval([float(ours[task] - theirs[task]) for task in both]))
        words = "greedily" if name == "greedy" else f"at T = {name}"
        found.append(f"{points(value)} {words} ({len(both)} problems)")
    return f"\nSolve rate of {label}, minus that of blocks on the same problems, in points: {', '.join(found)}.\n"


def main(given: Sequence[str]) -> None:
    """See the top of this file."""
    kept = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for each in given:
        label, _, folder = each.rpartition("=")
        kept[label] = evaluation(Path(folder))
    FIGURES.write_text(json.dumps(kept) + "\n")
    PAGE.write(block(kept))


if __name__ == "__main__":
    main(sys.argv[1:])
