"""`repl-rl eval`: held-out solve rates of a policy."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from repl_rl.cli.arguments import parse
from repl_rl.cli.setup import Setup
from repl_rl.errors import ConfigError
from repl_rl.evaluation import evaluate
from repl_rl.samplers import RolloutThread
from repl_rl.tasks import Split, load_tasks


@dataclass(frozen=True)
class EvalConfig(Setup):
    """Evaluate a policy on held-out tasks, at temperature 1 and greedily."""

    count: int = 240
    """Held-out tasks, >= 1."""
    json: Path | None = None
    """File for the figures; none: they are only printed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count < 1:
            raise ConfigError("count", self.count, "give at least 1")


def main(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit code."""
    config = parse(EvalConfig, "eval", argv)
    tasks = load_tasks(config.tasks, split=Split.HELD_OUT, count=config.count, seed=config.seed)
    with RolloutThread(config.open, {task.id: task for task in tasks}) as source:
        result = evaluate(source, tasks)
    table = Table("family", "solved, temperature 1", title=f"{config.model} on {len(tasks)} held-out tasks")
    for name, rate in result.families.items():
        table.add_row(name, f"{rate:.1%}")
    console = Console(highlight=False)
    console.print(table)
    console.print(str(result))
    if config.json is not None:
        figures = {
            "solve_rate": result.solve_rate,
            "greedy": result.greedy,
            "line_error_rate": result.line_error_rate,
            "families": dict(result.families),
            "tasks": len(tasks),
        }
        config.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0
