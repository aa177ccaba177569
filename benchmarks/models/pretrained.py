"""Publish what `make pretrained` wrote: its table in docs/pretrained.md, everything in results/pretrained.md.

    python -m benchmarks.models.pretrained runs    from runs/pretrained*

Every number between the markers comes from `summary.json`, `metrics.jsonl`, `eval.json` and `config.toml` there.
"""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.generated_blocks import RESULTS, ROOT, Block
from benchmarks.models.publish_run import choose, transcript
from benchmarks.models.training import changed
from repl_rl.cli.train import TrainConfig
from repl_rl.evaluation import wilson
from repl_rl.runs.store import read_trajectories
from repl_rl.settings.argument_parser import load_toml
from repl_rl.settings.argument_parser import read_table as read_settings
from repl_rl.settings.migrate_run_settings import modern, rename_recorded
from repl_rl.trajectory.trajectory import Trajectory

RUN = Block(RESULTS / "pretrained.md", "models/pretrained")
SUMMARY = Block(ROOT / "docs" / "pretrained.md", "models/pretrained")
FOLDER = RESULTS / "pretrained"
KEPT = ("summary.json", "metrics.jsonl", "curves.png", "config.toml")

Figures = Mapping[str, object]


def block(folder: Path) -> str:
    """Return the generated block of the results, from the files of `publish_run` in `folder`."""
    summary: Figures = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    config = told(folder)
    gap = max(row["logprob_gap_max"] for row in rows)
    return (
        f"When another output replaces the console's, {percent(summary['tamper_followed'])} of the policy's literal "
        f"answers follow it. The largest gap of one log probability between sampler and trainer, over all steps, is "
        f"{gap:.1e} nats.\n\n"
        f"![learning curves](pretrained/curves.png)\n\n"
        f"Solve rate per family, temperature 1:\n\n{by_family(summary)}\n"
        f"A rollout before the cold start, and one of the last step (`▸` marks lines of the policy):\n\n"
        f"```\n{(folder / 'before.txt').read_text()}```\n\n```\n{(folder / 'after.txt').read_text()}```\n\n"
        f"Settings that differ from the bundled policy's defaults:\n\n```toml\n{settings(config)}```\n"
    )


def summary_block(folder: Path) -> str:
    """Return the generated block of docs/pretrained.md."""
    summary: Figures = json.loads((folder / "summary.json").read_text())
    before: Figures = json.loads((folder / "before.json").read_text())
    trainer = told(folder).trainer
    return (
        f"{summary['held_out_tasks']} held-out tasks of {len(families(summary))} families; {summary['steps']} steps of "
        f"{trainer.prompts_per_step * trainer.group_size} rollouts in {minutes(summary['train_s'])} on "
        f"{summary['cores']} cores, engine {summary['engine']}, sandbox {summary['sandbox']}:\n\n"
        f"{table(summary, before)}"
    )


def told(folder: Path) -> TrainConfig:
    """What the published run was told."""
    file = folder / "config.toml"
    return read_settings(TrainConfig, rename_recorded(modern(load_toml(file))), str(file))


def table(summary: Figures, before: Figures) -> str:
    """Return the figures before the cold start, after it, and after training."""
    count = int(str(summary["held_out_tasks"]))
    rows = [("solved, temperature 1", "solve_rate"), ("solved, greedy", "greedy")]
    games = f"before ({before['tasks']} tasks)"
    text = f"| | {games} | after the cold start | after training |\n|---|---|---|---|\n"
    for label, key in rows:
        cells = " | ".join(share(summary[f"{key}_{when}"], count) for when in ("first", "last"))
        text += f"| {label} | {interval(before[key])} | {cells} |\n"
    errors = [before["line_error_rate"], *(summary[f"line_error_rate_{when}"] for when in ("first", "last"))]
    return text + "| lines in error | " + " | ".join(map(percent, errors)) + " |\n"


def by_family(summary: Figures) -> str:
    """Solve rates at temperature 1 by family, before training and after."""
    first, last = families(summary), families(summary, "last")
    text = "| family | after the cold start | after training |\n|---|---|---|\n"
    return text + "".join(f"| {name} | {first[name]:.0%} | {last[name]:.0%} |\n" for name in sorted(first))


def families(summary: Figures, when: str = "first") -> Mapping[str, float]:
    """Solve rate of each family."""
    found = summary[f"families_{when}"]
    assert isinstance(found, dict)
    return found


def share(rate: object, count: int) -> str:
    """A rate over `count` rollouts with its interval."""
    return f"{percent(rate)} ({_range(round(float(str(rate)) * count), count)})"


def percent(rate: object) -> str:
    """A rate of a summary."""
    return f"{float(str(rate)):.1%}"


def interval(figure: object) -> str:
    """A figure of eval.json."""
    assert isinstance(figure, dict)
    return f"{figure['value']:.1%} ({figure['low']:.1%} to {figure['high']:.1%})"


def _range(solved: int, count: int) -> str:
    found = wilson(solved, count)
    return f"{found.low:.1%} to {found.high:.1%}"


def minutes(seconds: object) -> str:
    """Seconds as minutes."""
    return f"{float(str(seconds)) / 60:.0f} min"


def settings(config: TrainConfig) -> str:
    """What the run was told, one setting a line."""
    told = [(name, value) for name, value in changed(config, TrainConfig()) if name not in ("name", "model", "preset")]
    return "".join(f"{name.replace('-', '_')} = {json.dumps(value)}\n" for name, value in told)


def publish_run(runs: Path) -> None:
    """Publish `runs`/pretrained and the evaluation before it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        shutil.copyfile(runs / "pretrained" / name, FOLDER / name)
    shutil.copyfile(runs / "pretrained-before" / "eval.json", FOLDER / "before.json")
    first = min((runs / "pretrained-before" / "rollouts").glob("*.jsonl.gz"))
    last = max((runs / "pretrained" / "trajectories").glob("*.jsonl.gz"))
    (FOLDER / "before.txt").write_text(transcript(typical(list(read_trajectories(first)))))
    (FOLDER / "after.txt").write_text(transcript(choose(list(read_trajectories(last)))))
    RUN.write(block(FOLDER))
    SUMMARY.write(summary_block(FOLDER))


def typical(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Return the rollout with the median number of sampled tokens, of those that print no path of this Python."""
    own = (sys.prefix, sys.base_prefix, str(Path.home()))
    published = [t for t in trajectories if not any(path in transcript(t) for path in own)]
    ordered = sorted(published, key=lambda t: (t.sampled_tokens, t.id))
    return ordered[len(ordered) // 2]


if __name__ == "__main__":
    publish_run(Path(sys.argv[1]))
