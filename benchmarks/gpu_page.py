"""Publish the results of `repl-rl doctor --gpu --json FILE` in gpu.json and the table of docs/gpu.md.

python -m benchmarks.gpu_page gpu.json       publish that file
python -m benchmarks.gpu_page                write the page anew from what is published
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.generated_blocks import ROOT, Block
from repl_rl.cli.doctor import format_figures
from repl_rl.doctor_gpu import CHECKS

PAGE = Block(ROOT / "docs" / "gpu.md", "gpu_page")
FIGURES = ROOT / "benchmarks" / "results" / "gpu.json"


def block(found: Mapping[str, object] | None) -> str:
    """The generated block of docs/gpu.md; `found` None: nothing is published."""
    if found is None:
        return "Not yet run on a GPU: there is no `benchmarks/results/gpu.json`.\n"
    rows = found["rows"]
    assert isinstance(rows, list)
    days = sorted({row["made"].partition("T")[0] for row in rows})
    text = f"On `{found['device']}`, {' and '.join(days)}:\n\n"
    text += "| check | verdict | figures, or why | s |\n|---|---|---|---|\n"
    for row in rows:
        what = (row["why"] or format_figures(row["figures"])).replace("|", "/").replace("<", "`<`")
        text += f"| {row['name']} | {row['verdict']} | {what} | {row['seconds']:.0f} |\n"
    there = {row["name"] for row in rows}
    for check in CHECKS:
        if check.name not in there:
            text += f"| {check.name} | not run | {check.unbuilt or 'not tried there'} | |\n"
    return text


def published(found: Mapping[str, Any]) -> dict[str, object]:
    """Without what processes said, which has paths of the machine."""
    rows = [{key: value for key, value in row.items() if key != "log"} for row in found["rows"]]
    return {**found, "rows": rows}


def main(arguments: Sequence[str]) -> None:
    """See the top of this file.

    Raises:
        SystemExit: the file is of a CPU, which says nothing of a GPU.
    """
    if arguments:
        found = json.loads(Path(arguments[0]).read_text())
        if not found["device"].startswith("cuda"):
            raise SystemExit(f"{arguments[0]} was made on {found['device']}; make it on a GPU")
        FIGURES.write_text(json.dumps(published(found), indent=2) + "\n")
    PAGE.write(block(json.loads(FIGURES.read_text()) if FIGURES.exists() else None))


if __name__ == "__main__":
    main(sys.argv[1:])
