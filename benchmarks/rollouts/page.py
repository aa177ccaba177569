"""Publish `repl-rl bench rollout --json FILE`: the comparison in docs/rollouts.md, the other tables in results/.

    python -m benchmarks.rollouts.page FILE

Every number of both pages is in a generated block and comes from that file.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.generated_blocks import RESULTS, ROOT, Block, Report

PAGE = Block(ROOT / "docs" / "rollouts.md", "rollouts/page")
DETAILS = Block(RESULTS / "rollouts.md", "rollouts/page")
FIGURES = RESULTS / "rollouts.json"
WAYS = {
    "uninterrupted": "plain generation, no observations",
    "bound": "observations known in advance, no console",
    "ours": "**repl_rl**",
    "request_a_line": "one request per line",
    "lockstep": "lockstep batches",
    "text_loop": '`LLM.generate` with `stop="\\n"`, text sent again',
    "trl": "TRL's tool loop on transformers",
}


def block(report: Report) -> str:
    """Return the generated block of docs/rollouts.md."""
    sizes = [name for name in ("small", "medium") if name in report]
    plan = report["plan"]
    text = (
        f"Sampled tokens per second, and in brackets the relative speed of repl_rl, with {plan['rollouts']} concurrent "
    )
    text += f"rollouts of {plan['lines']} lines on {report['cpus']} cores (medians):\n\n"
    text += (
        "| |"
        + "".join(f" {name}, {_millions(report[name])} |" for name in sizes)
        + "\n|---|"
        + "---|" * len(sizes)
        + "\n"
    )
    for key, label in WAYS.items():
        text += f"| {label} |" + "".join(_cells(report[name], key) for name in sizes) + "\n"
    return text


def details(report: Report) -> str:
    """Return the generated block of the results."""
    sizes = [name for name in ("small", "medium") if name in report]
    bundled, many = report["bundled"], report["many"]
    text = f"With vLLM's default block size on CPU, {report[sizes[0]]['stock']['block_size']} ids:\n\n"
    text += "| |" + "".join(f" {name} |" for name in sizes) + "\n|---|" + "---|" * len(sizes) + "\n"
    for key in ("request_a_line", "lockstep", "text_loop"):
        text += f"| {WAYS[key]} |" + "".join(_cells(report[name]["stock"], key) for name in sizes) + "\n"
    text += "\nMilliseconds per line of repl_rl:\n\n"
    text += _profiles({name: report[name]["profile"] for name in sizes} | {"bundled tasks": bundled["profile"]})
    text += f"\nWithout engine and processes, a line costs the host {many['few_host_ms']:.3f} ms of CPU time with "
    text += f"{many['few']:.0f} concurrent rollouts, and {many['many_host_ms']:.3f} ms with {many['many']:.0f} "
    text += f"({many['ratio']:.2f}x). A rollout takes {many['rollout_kib']:.0f} KiB with its in-memory console.\n"
    return text


def _millions(size: Report) -> str:
    return f"{float(str(size['parameters'])) / 1e6:.1f} M parameters"


def _cells(size: Report, key: str) -> str:
    rate, ratios = size[key], size["ratios"]
    if rate is None:
        return " - |"
    ratio = f" ({ratios[key]:.2f}x)" if key in ratios else ""
    return f" {rate:.0f}{ratio} |"


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
    report = json.loads(FIGURES.read_text())
    PAGE.write(block(report))
    DETAILS.write(details(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
