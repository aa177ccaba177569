"""Compare lines and fenced blocks of one model on GSM8K: differences in docs/pretrained.md, the table in results/.

    python -m benchmarks.models.code_model LABEL=FOLDER ...    from folders of `repl-rl eval --out`, one per row

Figures of all labels are kept in benchmarks/results/coder.json; a label that is given again replaces its own.
"""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.generated_blocks import RESULTS, ROOT, Block, Report, points, share
from repl_rl.evaluation.confidence_intervals import compute_bootstrap_interval, wilson
from repl_rl.runs.store import read_trajectories
from repl_rl.samplers.chat_format import BOXED
from repl_rl.trajectory.trajectory import Stop, Trajectory

PAGE = Block(RESULTS / "pretrained.md", "models/code_model")
SUMMARY = Block(ROOT / "docs" / "pretrained.md", "models/code_model")
FIGURES = RESULTS / "coder.json"
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
    """Return the table of the results."""
    text = (
        "| | T | problems | answered | solved | lines in error | tokens per rollout |\n|---|---|---|---|---|---|---|\n"
    )
    for label, by_temperature in kept.items():
        for name, one in by_temperature.items():
            errors = f"{one['errors']:.1%}" if one["executed"] else "-"
            shares = f"{share(one['answered'])} | {share(one['solved'])}"
            text += f"| {label} | {name} | {one['problems']} | {shares} | {errors} | {one['tokens']:.0f} |\n"
    return text


def summary(kept: Report) -> str:
    """Return the block of docs/pretrained.md: differences to fenced blocks per temperature."""
    text = "Solve rate minus that of fenced blocks on the same problems, in points:\n\n"
    text += "| | problems | greedy | T = 1 |\n|---|---|---|---|\n"
    return text + "".join(_differ(kept, label) for label in COMPARED if {label, BLOCKS} <= kept.keys())


def _differ(kept: Report, label: str) -> str:
    cells, problems = [], set[int]()
    for name in PARTS:
        ours, theirs = (kept[row][name]["right"] for row in (label, BLOCKS))
        both = sorted(ours.keys() & theirs.keys())
        value = asdict(compute_bootstrap_interval([float(ours[task] - theirs[task]) for task in both]))
        cells.append(points(value))
        problems.add(len(both))
    return f"| {label} | {' and '.join(map(str, sorted(problems)))} | {' | '.join(cells)} |\n"


def main(given: Sequence[str]) -> None:
    """See the top of this file."""
    kept = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for each in given:
        label, _, folder = each.rpartition("=")
        kept[label] = evaluation(Path(folder))
    FIGURES.write_text(json.dumps(kept) + "\n")
    PAGE.write(block(kept))
    SUMMARY.write(summary(kept))


if __name__ == "__main__":
    main(sys.argv[1:])
