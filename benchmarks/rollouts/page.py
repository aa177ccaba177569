"""Copy the figures of `repl-rl bench rollout --json FILE` into docs/, tables included.

    python -m benchmarks.rollouts.page FILE

Every number of docs/rollouts.md stands between the two markers below and comes from that file.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.generated_blocks import ROOT, Block, Report

PAGE = Block(ROOT / "docs" / "rollouts.md", "rollouts/page")
FIGURES = ROOT / "benchmarks" / "results" / "rollouts.json"
WAYS = {
    "uninterrupted": "plain generation, no observations",
    "bound": "observations known beforehand, no console",
    "ours": "**ours**",
    "request_a_line": "a new request a line",
    "lockstep": "batches in lockstep",
    "text_loop": '`LLM.generate` with `stop="\\n"`, text sent again',
    "trl": "TRL's tool loop on transformers",
}


def block(report: Report) -> str:
    """The generated block of docs/rollouts.md."""
    sizes = [name for name in ("small", "medium") if name in report]
    plan, bundled, many = report["plan"], report["bundled"], report["many"]
    text = f"{plan['rollouts']} rollouts x {plan['lines']} lines at once on {report['cpus']} cores, "
    text += "sampled tokens a second (medians), and how many times as fast ours is:\n\n"
    text += "| |" + "".join(f" {name}, {_millions(report[name])} | ours is |" for name in sizes) + "\n"
    text += "|---|" + "---|---|" * len(sizes) + "\n"
    for key, label in WAYS.items():
        text += f"| {label} |" + "".join(_cells(report[name], key) for name in sizes) + "\n"
    text += "\nThe ways that compute a line's prefix again depend on the engine's block size, up to which a prefix is "
    text += "cached. The table above has ours for all of them; with that of vLLM as it comes on CPU, "
    text += f"{report[sizes[0]]['stock']['block_size']} ids, they are:\n\n"
    text += "| |" + "".join(f" {name} | ours is |" for name in sizes) + "\n"
    text += "|---|" + "---|---|" * len(sizes) + "\n"
    for key in ("request_a_line", "lockstep", "text_loop"):
        text += f"| {WAYS[key]} |" + "".join(_cells(report[name]["stock"], key) for name in sizes) + "\n"
    text += "\nMilliseconds of a line of ours, as the profile splits them:\n\n"
    text += _profiles({name: report[name]["profile"] for name in sizes} | {"bundled tasks": bundled["profile"]})
    text += f"\nWithout engine and processes a line costs the host {many['few_host_ms']:.3f} ms of CPU time with "
    text += f"{many['few']:.0f} rollouts at once and {many['many_host_ms']:.3f} ms with {many['many']:.0f} "
    text += f"({many['ratio']:.2f}x); a rollout takes {many['rollout_kib']:.0f} KiB, its in-memory console included.\n"
    return text


def _millions(size: Report) -> str:
    return f"{float(str(size['parameters'])) / 1e6:.1f} M parameters"


def _cells(size: Report, key: str) -> str:
    rate, ratios = size[key], size["ratios"]
    if rate is None:
        return " - | |"
    ratio = f"{ratios[key]:.2f}x" if key in ratios else ""
    return f" {rate:.0f} | {ratio} |"


def _profiles(profiles: Mapping[str, Mapping[str, float]]) -> str:
    keys = ("engine_ms", "kernel_ms", "queue_ms", "splice_ms", "host_ms", "vllm_host_ms", "own_host_ms")
    names = (key.removesuffix("_ms").replace("_", " ") for key in keys)
    text = "| |" + "".join(f" {name} |" for name in names) + " share in the engine |\n"
    text += "|---|" + "---|" * (len(keys) + 1) + "\n"
    for name, figures in profiles.items():
        cells = "".join(f" {figures[key]:.2f} |" if key in figures else " |" for key in keys)
        text += f"| {name} |{cells} {figures['engine_share']:.1%} |\n"
    return text


def main(file: Path) -> None:
    """Publish the figures in `file`."""
    FIGURES.write_text(file.read_text())
    PAGE.write(block(json.loads(FIGURES.read_text())))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
