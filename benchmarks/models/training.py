"""Copy the figures of finished training runs into docs/training.md, with the commands that made them.

    python -m benchmarks.models.training runs/line-chain runs/line-lists runs/fenced

Every number between the two markers below comes from `summary.json`, every command from `config.toml` of those folders.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

from benchmarks.generated_blocks import ROOT, Block
from repl_rl.cli.train import TrainConfig
from repl_rl.evaluation.confidence_intervals import wilson
from repl_rl.settings.argument_parser import parse

PAGE = Block(ROOT / "docs" / "training.md", "models/training")
FIGURES = ROOT / "benchmarks" / "results" / "training.json"
_LEFT_OUT = ("overwrite", "out")
"""Where a run is kept, which changes nothing about it."""

Run = Mapping[str, Mapping[str, object]]
"""`config` (what is not the default), `summary`."""


def record(folder: Path) -> Run:
    """What the page tells of the run in `folder`."""
    config = parse(TrainConfig, "train", ["--config", str(folder / "config.toml")])
    summary = json.loads((folder / "summary.json").read_text())
    if summary["status"] != "finished":
        raise SystemExit(f"{folder}: the run is {summary['status']}")
    return {"config": dict(changed(config, TrainConfig())), "summary": summary}


def changed(config: object, default: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """The options of `config` that are not those of `default`, as flags name them."""
    for field in fields(config):  # type: ignore[arg-type]
        value, usual = getattr(config, field.name), getattr(default, field.name)
        name = prefix + field.name.replace("_", "-")
        kind = getattr(value, "kind", None)
        if isinstance(kind, str):  # an engine or a sandbox: its name, then its own options
            if kind != usual.kind:
                yield name, kind
            yield from changed(value, type(value)(), f"{kind}.")
        elif is_dataclass(value):
            yield from changed(value, usual, f"{name}.")
        elif value != usual and name not in _LEFT_OUT:
            yield name, value


def command(run: Run) -> str:
    """The command line of a run."""
    flags = "".join(f" --{name}" + ("" if value is True else f" {value}") for name, value in run["config"].items())
    return f"repl-rl train{flags}\n"


def block(runs: Sequence[Run]) -> str:
    """The generated block of docs/training.md."""
    text = "Solve rate on held-out tasks before and after training (95 % interval):\n\n"
    text += "| tasks | sampler | held out | steps | seconds | temperature 1 | greedy |\n|---|---|---|---|---|---|---|\n"
    for run in runs:
        config, summary = run["config"], run["summary"]
        tasks, sampler = config.get("tasks", TrainConfig.tasks), config.get("sampler", TrainConfig.sampler)
        cells = (
            f"| `{tasks}` | `{sampler}` | {summary['held_out_tasks']} | {summary['steps']} | {summary['train_s']:.0f} "
        )
        text += f"{cells}| {_change(summary, 'solve_rate')} | {_change(summary, 'greedy')} |\n"
    cores = sorted({int(str(run["summary"]["cores"])) for run in runs})
    text += f"\nEngine and sandbox: {_used(runs)}; {' or '.join(map(str, cores))} cores, shared with other work.\n\n"
    return text + "```sh\n" + "".join(map(command, runs)) + "```\n"


def _change(summary: Mapping[str, object], key: str) -> str:
    count = int(str(summary["held_out_tasks"]))
    first, last = (float(str(summary[f"{key}_{when}"])) for when in ("first", "last"))
    # Rollouts that failed on our side count nowhere, so a share of tasks need not be a whole number of them.
    return f"{first:.1%} to {wilson(round(last * count), count)}"


def _used(runs: Sequence[Run]) -> str:
    return ", ".join(sorted({f"{run['summary']['engine']} and {run['summary']['sandbox']}" for run in runs}))


def main(folders: Sequence[str]) -> None:
    """Publish the runs in `folders`, in that order."""
    FIGURES.write_text(json.dumps([record(Path(folder)) for folder in folders], indent=2) + "\n")
    PAGE.write(block(json.loads(FIGURES.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
