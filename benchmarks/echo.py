"""Copy what `repl-rl bench echo --json FILE` found into docs/echo.md: a table for each experiment, and what it says.

    python -m benchmarks.echo FILE ...

Every number of docs/echo.md stands between the two markers below and comes from those files, one an experiment.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.pages import ROOT, Block, Report
from repl_rl.lab.echo import BASELINE

PAGE = Block(ROOT / "docs" / "echo.md", "echo")
FIGURES = ROOT / "docs" / "echo.json"
SHOWN = {
    "train_solve_rate": ("training rollouts solved, mean over the budget", True),
    "solve_rate": ("held-out tasks solved", True),
    "greedy": ("solved greedily", True),
    "line_error_rate": ("lines in error", True),
    "console_nats": ("console, nats a token", False),
}
"""Measure -> its name in the tables, and whether it is a share."""


def block(reports: Sequence[Report]) -> str:
    """The generated block of docs/echo.md."""
    return "\n".join(part for report in reports for part in _experiment(report)) or "No experiment is published yet.\n"


def _experiment(report: Report) -> Iterator[str]:
    yield _about(report)
    yield "After training, mean of seeds (95 % interval):\n\n" + _table(report, "mean")
    yield f"Differences to weight {BASELINE}, paired by seed (shares in points):\n\n" + _table(report, "difference")
    yield "".join(f"- {sentence}\n" for sentence in sentences(report))


def _about(report: Report) -> str:
    settings, runs = report["settings"], [row for row in report["rows"] if row["kind"] == "run"]
    trainer, steps = settings["trainer"], [len(run["tokens"]) for run in runs]
    seeds = sorted({figures["mean"]["solve_rate"]["seeds"] for figures in report["weights"].values()})
    return (
        f"**{settings['tasks']}**, policy {settings['model']} (`{report['policy']}`): {len(runs)} runs, "
        f"{' to '.join(map(str, seeds))} seeds "
        f"a weight, {settings['tokens']} sampled tokens a run: {min(steps)} to {max(steps)} steps of "
        f"{trainer['prompts_per_step']} tasks x {trainer['group_size']} rollouts at a learning rate of "
        f"{trainer['learning_rate']:g}, estimator `{trainer['estimator']}`. {settings['eval_tasks']} held-out tasks. "
        f"{report['busy_s'] / 60:.0f} minutes on {report['cores']} cores, "
        + ", ".join(f"{name} {number}" for name, number in report["versions"].items())
        + ".\n"
    )


def _table(report: Report, key: str) -> str:
    text = "| weight |" + "".join(f" {label} |" for label, _ in SHOWN.values()) + "\n|---|" + "---|" * len(SHOWN) + "\n"
    if key == "mean":
        start = report["start"]
        cells = ("" if name not in start else _plain(start[name], share) for name, (_, share) in SHOWN.items())
        text += "| *before* |" + "".join(f" {cell} |" for cell in cells) + "\n"
    for weight, figures in report["weights"].items():
        if key == "difference" and (weight == BASELINE or not figures["difference"]):
            continue
        cells = (_cell(figures[key][name], share, key == "difference") for name, (_, share) in SHOWN.items())
        text += f"| {weight} |" + "".join(f" {cell} |" for cell in cells) + "\n"
    return text


def _plain(value: float, share: bool) -> str:
    return f"{value:.1%}" if share else f"{value:.3f}"


def _cell(estimate: Report, share: bool, difference: bool) -> str:
    """A mean of seeds with its interval; one seed has none."""
    if difference:
        scale, form = (100, "{:+.1f}") if share else (1, "{:+.3f}")
    else:
        scale, form = (1, "{:.1%}") if share else (1, "{:.3f}")
    value = form.format(scale * estimate["value"])
    if estimate["low"] is None:
        return value
    return f"{value} ({form.format(scale * estimate['low'])} to {form.format(scale * estimate['high'])})"


def sentences(report: Report) -> Iterator[str]:
    """What the figures say, with every number and name from them."""
    others = {weight: f["difference"] for weight, f in report["weights"].items() if weight != BASELINE}
    for name in ("train_solve_rate", "solve_rate", "line_error_rate", "console_nats"):
        label, _ = SHOWN[name]
        known = {weight: d[name] for weight, d in others.items() if d and d[name]["low"] is not None}
        higher = [weight for weight, d in known.items() if d["low"] > 0]
        lower = [weight for weight, d in known.items() if d["high"] < 0]
        yield (
            f"{label[0].upper()}{label[1:]}: of {len(known)} weights above {BASELINE}, {_named(higher)} higher and "
            f"{_named(lower)} lower by an interval that excludes 0."
        )
    gap = max(row["gap"] for row in report["rows"] if row["kind"] == "run")
    yield f"Largest gap of one log probability between sampler and trainer, over all runs: {gap:.1e} nats."


def _named(weights: Sequence[str]) -> str:
    return f"{len(weights)} ({', '.join(weights)})" if weights else "none"


def publish(files: Sequence[Path]) -> None:
    """Publish the experiments in `files`."""
    reports = [json.loads(file.read_text()) for file in files]
    for report in reports:
        settings = report["settings"]
        for name in ("model", "out"):  # a folder's name tells enough; where it lies is the machine's matter
            if name in settings and Path(settings[name]).is_absolute():
                settings[name] = Path(settings[name]).name
    FIGURES.write_text(json.dumps(reports) + "\n")
    PAGE.write(block(reports))


if __name__ == "__main__":
    publish([Path(argument) for argument in sys.argv[1:]])
