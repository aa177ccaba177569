"""Summary of a training run: its first contents, and the table that is printed at the end."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from repl_rl.cli.onward import after, tell
from repl_rl.machine.cores import cores
from repl_rl.machine.files import Json
from repl_rl.machine.launched import processes
from repl_rl.rollout import Facts
from repl_rl.runs.folder import RunFolder
from repl_rl.runs.told import settings_of
from repl_rl.trainer.evaluations import BEST
from repl_rl.world import World


def show(console: Console, name: str, folder: RunFolder, summary: Mapping[str, Json]) -> None:
    """Print the solve rates before and after training, the paths of the results, and the next commands."""
    table = Table("held-out tasks", "before", "after", title=f"{name}: what training changed")
    for key, label in (("solve_rate", "solved, temperature 1"), ("greedy", "solved, greedy"),
                       ("line_error_rate", "lines in error")):  # fmt: skip
        table.add_row(label, *(f"{_number(summary, f'{key}_{when}'):.1%}" for when in ("first", "last")))
    console.print(table)
    followed = summary["tamper_followed"]
    if isinstance(followed, float):
        console.print(f"answers that follow an altered console output: {followed:.1%}")
    console.print(f"run folder {folder.path}: report.html, metrics.jsonl, summary.json, trajectories/")
    console.print(f"trained policy {folder.checkpoints / 'final'}")
    if "best_step" in summary:
        best = f"step {summary['best_step']}, {_number(summary, 'solve_rate_best'):.1%} at temperature 1"
        console.print(f"best policy {folder.checkpoints / BEST} ({best})")
    tell(console, after(folder.path, settings_of(folder.path), mine=True))


def _number(summary: Mapping[str, Json], key: str) -> float:
    value = summary[key]
    assert isinstance(value, int | float)
    return float(value)


def opened(world: World, facts: Facts, steps: int, held_out: int) -> dict[str, Json]:
    """Return the summary of a run before its first step. `held_out` is the number of its evaluation tasks."""
    return {
        "status": "running",
        "model": world.policy.reference,
        "model_folder": str(world.model_folder),
        "model_fallback": world.policy.fallback,
        "engine": facts.engine,
        "engine_fallback": facts.engine_fallback,
        "update_fallbacks": [],
        "sampler_fallback": facts.sampler_fallback,
        "sandbox": facts.sandbox,
        "steps": steps,
        "held_out_tasks": held_out,
        "cores": cores(),
        "processes": processes(),
    }
