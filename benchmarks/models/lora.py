"""Publish a short training of a code model with adapters: its table in docs/pretrained.md, the rest in results/.

    python -m benchmarks.models.lora RUN    from the folder of `repl-rl train`

benchmarks/results/pretrained/lora.json keeps the figures; paths of the machine are left out.
"""

import json
import shutil
import sys
from pathlib import Path

from benchmarks.generated_blocks import RESULTS, ROOT, Block, Report
from benchmarks.models.pretrained import FOLDER, minutes, percent, share
from benchmarks.models.training import changed
from repl_rl.cli.train import TrainConfig
from repl_rl.settings.argument_parser import load_toml, read_table
from repl_rl.settings.migrate_run_settings import modern, rename_recorded

PAGE = Block(RESULTS / "pretrained.md", "models/lora")
SUMMARY = Block(ROOT / "docs" / "pretrained.md", "models/lora")
FIGURES = FOLDER / "lora.json"
CURVES = FOLDER / "lora.png"
_LEFT_OUT = {"name", "model", "out", "overwrite"}
_PER_STEP = ("solve_rate", "line_error_rate", "logprob_gap_max", "rollout_s", "update_s")


def figures(run: Path) -> Report:
    """Return what the page shows of a run."""
    summary = json.loads((run / "summary.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    config = read_table(TrainConfig, modern(load_toml(run / "config.toml")), str(run / "config.toml"))
    told = {name.replace("-", "_"): value for name, value in changed(config, TrainConfig()) if name not in _LEFT_OUT}
    held_out = [f"{name}_{when}" for name in ("solve_rate", "greedy", "line_error_rate") for when in ("first", "last")]
    kept = ("held_out_tasks", "cores", "engine", "sandbox", "train_s", "steps", *held_out)
    return {
        **{name: summary[name] for name in kept},
        "rollouts": config.trainer.prompts_per_step * config.trainer.group_size,
        "rows": [{name: row[name] for name in _PER_STEP} for row in rows],
        "settings": told,
    }


def block(kept: Report) -> str:
    """Return the block of the results."""
    rows = kept["rows"]
    steps = ", ".join(f"{row['solve_rate']:.0%}" for row in rows)
    gap = max(row["logprob_gap_max"] for row in rows)
    text = (
        f"Solved rollouts per training step: {steps}.\n\n"
        f"Largest gap of one log probability between sampler and trainer, over all steps: {gap:.1e} nats.\n\n"
        "![learning curves](pretrained/lora.png)\n\n"
        "Settings that differ from the bundled policy's defaults:\n\n```toml\n"
    )
    return (
        text
        + "".join(f"{name} = {json.dumps(value)}\n" for name, value in rename_recorded(kept["settings"]).items())
        + "```\n"
    )


def summary(kept: Report) -> str:
    """Return the block of docs/pretrained.md."""
    count = kept["held_out_tasks"]
    text = (
        f"{count} held-out tasks; {kept['steps']} steps of {kept['rollouts']} rollouts in {minutes(kept['train_s'])} "
        f"on {kept['cores']} cores:\n\n| | before | after |\n|---|---|---|\n"
    )
    for label, key in (("solved, temperature 1", "solve_rate"), ("solved, greedy", "greedy")):
        text += f"| {label} | " + " | ".join(share(kept[f"{key}_{when}"], count) for when in ("first", "last")) + " |\n"
    errors = " | ".join(percent(kept[f"line_error_rate_{when}"]) for when in ("first", "last"))
    return text + f"| lines in error | {errors} |\n"


def publish(run: Path) -> None:
    """Publish the run in folder `run`."""
    FIGURES.write_text(json.dumps(figures(run), indent=1) + "\n")
    shutil.copyfile(run / "curves.png", CURVES)
    kept = json.loads(FIGURES.read_text())
    PAGE.write(block(kept))
    SUMMARY.write(summary(kept))


if __name__ == "__main__":
    publish(Path(sys.argv[1]))
