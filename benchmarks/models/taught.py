"""Write the table of a model that learned from demonstrations, per form of the space, into results/templates.md.

    python -m benchmarks.models.taught "LABEL=DATA,DATA=EVAL,EVAL" ...

DATA are folders of `repl-rl transcripts`; EVAL are those of `repl-rl eval --out`, of the model that learned from DATA.
prompt_space_taught.json keeps the figures of all labels. A label that is given again replaces its own.
"""

import json
import random
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from benchmarks.generated_blocks import RESULTS, Block, Report, share
from repl_rl.evaluation.confidence_intervals import compute_bootstrap_interval, wilson
from repl_rl.runs.store import read_trajectories
from repl_rl.sft.demonstrations import MIXES, PROTOCOLS
from repl_rl.tasks import Split, draw_problem
from repl_rl.trajectory.trajectory import Trajectory

PAGE = Block(RESULTS / "templates.md", "models/taught")
FIGURES = RESULTS / "prompt_space_taught.json"


def answers(folder: Path) -> Mapping[str, str]:
    """Return the answer of each question that was demonstrated, by drawing the demonstrations again."""
    settings = tomllib.loads((folder / "config.toml").read_text())
    families = [name.removeprefix("builtin:") for name in settings["from_tasks"]]
    rng, mix = random.Random(f"{settings['seed']}/transcripts"), MIXES[settings["mix"]]
    found: dict[str, str] = {}
    for number in range(settings["count"]):
        drawn = draw_problem(families[number % len(families)], rng, Split.TRAIN)
        found[drawn.question] = drawn.answer
        PROTOCOLS[settings["protocol"]].plan(drawn, mix, rng)
    return found


def correct(folder: Path) -> list[int]:
    """Return 1 for each demonstration with the right answer, and 0 for the others."""
    known = answers(folder)
    return [int(t.answer == known[t.prompt.text.partition("\n")[0]]) for t in stored(folder / "trajectories")]


def stored(folder: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a folder."""
    for file in sorted(folder.iterdir()):
        yield from read_trajectories(file)


def figures(data: Sequence[Path], evaluations: Sequence[Path]) -> Report:
    """Return the figures of one row."""
    shown = [one for folder in data for one in correct(folder)]
    sampled = [t for folder in evaluations for t in stored(folder / "rollouts")]
    greedy = [t.solved for folder in evaluations for t in stored(folder / "greedy")]
    by_task: dict[str, list[float]] = defaultdict(list)
    for t in sampled:
        by_task[t.task_id].append(float(t.solved))
    executed = [execution.status for t in sampled for execution in t.executions]
    return {
        "demonstrations": len(shown),
        "correct": fmean(shown),
        "tasks": len(by_task),
        "solved": asdict(compute_bootstrap_interval([fmean(one) for one in by_task.values()])),
        "greedy": asdict(wilson(sum(greedy), len(greedy))),
        "errors": sum(status.is_error for status in executed) / len(executed),
    }


def block(kept: Report) -> str:
    """Return the table."""
    heads = (
        "demonstrations, space | number | correct among them | solved, T = 1 | solved, greedy | lines in error, T = 1"
    )
    text = f"| {heads} |\n|---|---|---|---|---|---|\n"
    for label, one in kept.items():
        shares = f"{one['correct']:.1%} | {share(one['solved'])} | {share(one['greedy'])}"
        text += f"| {label} | {one['demonstrations']} | {shares} | {one['errors']:.1%} |\n"
    return text


def main(rows: Sequence[str]) -> None:
    """Publish rows of the form LABEL=DATA,DATA=EVAL,EVAL."""
    kept: dict[str, Report] = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for row in rows:
        label, data, evaluations = row.split("=")
        kept[label] = figures([Path(one) for one in data.split(",")], [Path(one) for one in evaluations.split(",")])
    FIGURES.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write(block(kept))


if __name__ == "__main__":
    main(sys.argv[1:])
