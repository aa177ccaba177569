"""Copy a finished run's figures, or a benchmark's, into the generated blocks of the documents.

    python -m benchmarks.models.publish_run runs/quickstart           into benchmarks/results/quickstart/ and README.md
    python -m benchmarks.models.publish_run benchmarks/results/sandbox.json   into benchmarks/results/sandbox.md

Every measured number stands between the two markers below and comes from those files.
"""

import json
import shutil
import sys
from pathlib import Path

from benchmarks.generated_blocks import ROOT, Block
from repl_rl.runs.store import read_trajectories
from repl_rl.trajectory.trajectory import Observed, Trajectory

FOLDER = ROOT / "benchmarks" / "results" / "quickstart"
ROWS = [
    ("solved, temperature 1", "solve_rate"),
    ("solved, greedy", "greedy"),
    ("lines in error", "line_error_rate"),
]


def block(folder: Path) -> str:
    """The README's generated block, from `summary.json`, `metrics.jsonl` and `transcript.txt` of `folder`."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    gap = max(row["logprob_gap_max"] for row in rows)
    table = "".join(
        f"| {label} | {summary[f'{key}_first']:.1%} | {summary[f'{key}_last']:.1%} |\n" for label, key in ROWS
    )
    return (
        f"{summary['held_out_tasks']} held-out tasks, engine {summary['engine']}, sandbox {summary['sandbox']}, "
        f"{summary['steps']} steps in {summary['train_s']:.0f} s on {summary['cores']} cores:\n\n"
        f"| | before | after |\n|---|---|---|\n{table}\n"
        f"When the console's output is altered behind the policy's back, {summary['tamper_followed']:.1%} of its\n"
        f"literal answers follow what it was shown. Largest gap of one log probability between sampler and trainer,\n"
        f"over all steps: {gap:.1e} nats.\n\n"
        f"![learning curves](benchmarks/results/quickstart/curves.png)\n\n"
        f"A rollout of the last step, as the policy saw it (`▸` marks what it wrote itself):\n\n"
        f"```\n{(folder / 'transcript.txt').read_text()}```\n"
    )


def transcript(trajectory: Trajectory) -> str:
    """A trajectory as console text, with a mark before each sampled line."""
    lines = trajectory.prompt.text
    for segment in trajectory.segments:
        if isinstance(segment, Observed):
            lines += segment.text
        else:
            lines += "▸ " + "".join(line.text for line in segment.lines)
    return lines.rstrip("\n") + "\n"


def choose(trajectories: list[Trajectory]) -> Trajectory:
    """The solved rollout with the most lines; of several, the one with the smallest id."""
    solved = [t for t in trajectories if t.outcome == 1.0]
    return min(solved, key=lambda t: (-len(t.lines), t.id))


def sandbox_block(figures: dict[str, dict[str, float]]) -> str:
    """Return the generated block of sandbox.md, from the JSON of `repl-rl bench sandbox --docker`."""
    off = figures["ratios_history_off"]
    rows = "".join(
        f"| `{name}` | {ratio:.1f} | {f'{off[name]:.1f}' if name in off else ''} |\n"
        for name, ratio in figures["ratios"].items()
    )
    return (
        f"\nOn {figures['cpus']} cores, load average {figures['load_average']:.1f} at the end:\n\n"
        f"| | times better | stock without history |\n|---|---|---|\n{rows}\n"
    )


def publish_run(run: Path) -> None:
    """Publish the run in folder `run`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "curves.png", "config.toml"):
        shutil.copyfile(run / name, FOLDER / name)
    summary = json.loads((run / "summary.json").read_text())
    summary.pop("model_folder", None)  # a place on the machine that made the run
    (FOLDER / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    last = max((run / "trajectories").glob("*.jsonl.gz"))
    (FOLDER / "transcript.txt").write_text(transcript(choose(list(read_trajectories(last)))))
    Block(ROOT / "README.md", "models/publish_run").write(block(FOLDER))


if __name__ == "__main__":
    source = Path(sys.argv[1])
    if source.suffix == ".json":
        Block(source.with_suffix(".md"), "models/publish_run").write(sandbox_block(json.loads(source.read_text())))
    else:
        publish_run(source)
