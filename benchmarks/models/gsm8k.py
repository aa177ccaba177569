"""Copy two evaluations on GSM8K, before and after `make pretrained`, into docs/pretrained.md.

python -m benchmarks.models.gsm8k runs    from runs/gsm8k-before and runs/gsm8k-after
"""

import json
import sys
from pathlib import Path

from benchmarks.generated_blocks import ROOT, Block
from benchmarks.models.pretrained import FOLDER, interval, percent
from repl_rl.evaluation import compare, read_study

PUBLIC = Block(ROOT / "docs" / "pretrained.md", "models/gsm8k")
KEPT = (FOLDER / "gsm8k-before.json", FOLDER / "gsm8k-after.json")


def block(before: Path, after: Path) -> str:
    """The generated block about the public problems, from two eval.json of the same ones."""
    told = [json.loads(path.read_text()) for path in (before, after)]
    difference = compare(read_study(after), read_study(before)).difference
    text = "| GSM8K, test set | problems | solved, temperature 1 | lines in error |\n|---|---|---|---|\n"
    for label, figures in zip(("before the cold start", "after training"), told, strict=True):
        shares = f"{interval(figures['solve_rate'])} | {percent(figures['line_error_rate'])}"
        text += f"| {label} | {figures['tasks']} | {shares} |\n"
    points = [100 * value for value in (difference.value, difference.low, difference.high)]
    return text + "\nDifference on the same problems: {:+.1f} points ({:+.1f} to {:+.1f}).\n".format(*points)


def publish(runs: Path) -> None:
    """Publish the evaluations `runs`/gsm8k-before and `runs`/gsm8k-after."""
    for path in KEPT:
        text = (runs / path.stem / "eval.json").read_text()
        source: str = json.loads(text)["source"]
        kind, _, file = source.partition(":")
        path.write_text(text.replace(json.dumps(source), json.dumps(f"{kind}:{Path(file).name}")))  # not whose machine
    PUBLIC.write(block(*KEPT))


if __name__ == "__main__":
    publish(Path(sys.argv[1]))
