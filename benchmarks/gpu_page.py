"""Publish the results of `repl-rl doctor --gpu --json FILE`: gpu.json, results/gpu.md, and the verdicts in docs/gpu.md.

python -m benchmarks.gpu_page gpu.json       publish that file
python -m benchmarks.gpu_page                write the page anew from what is published
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.generated_blocks import RESULTS, ROOT, Block
from repl_rl.cli.doctor import format_figures
from repl_rl.doctor_gpu import CHECKS

PAGE = Block(RESULTS / "gpu.md", "gpu_page")
SUMMARY = Block(ROOT / "docs" / "gpu.md", "gpu_page")
FIGURES = RESULTS / "gpu.json"
_NOTHING = "Not yet run on a GPU: there is no `benchmarks/results/gpu.json`.\n"


def block(found: Mapping[str, object] | None) -> str:
    """Return the generated block of the results; None means that nothing is published."""
    if found is None:
        return _NOTHING
    rows = found["rows"]
    assert isinstance(rows, list)
    text = f"On `{found['device']}`, {_days(rows)}:\n\n"
    text += "| check | verdict | figures, or why | s |\n|---|---|---|---|\n"
    for row in rows:
        what = (row["why"] or format_figures(row["figures"])).replace("|", "/").replace("<", "`<`")
        text += f"| {row['name']} | {row['verdict']} | {what} | {row['seconds']:.0f} |\n"
    for name, why in _missing(rows):
        text += f"| {name} | not run | {why} | |\n"
    return text


def summary(found: Mapping[str, object] | None) -> str:
    """Return the generated block of docs/gpu.md; None means that nothing is published."""
    if found is None:
        return _NOTHING
    rows = found["rows"]
    assert isinstance(rows, list)
    gpu = next((row["figures"]["gpu"] for row in rows if "gpu" in row["figures"]), found["device"])
    by = {verdict: [row["name"] for row in rows if row["verdict"] == verdict] for verdict in ("passed", "failed")}
    by["not run"] = [row["name"] for row in rows if row["verdict"] == "not run"] + [name for name, _ in _missing(rows)]
    text = f"{len(by.pop('passed'))} checks passed on an {gpu}, {_days(rows)}.\n"
    return text + "".join(f"{verdict.capitalize()}: {'; '.join(names) or 'none'}.\n" for verdict, names in by.items())


def _days(rows: Sequence[Mapping[str, Any]]) -> str:
    return " and ".join(sorted({row["made"].partition("T")[0] for row in rows}))


def _missing(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the checks without a row, with the reason."""
    there = {row["name"] for row in rows}
    for check in CHECKS:
        if check.name not in there:
            yield check.name, check.unbuilt or "not tried there"


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
    shown = json.loads(FIGURES.read_text()) if FIGURES.exists() else None
    PAGE.write(block(shown))
    SUMMARY.write(summary(shown))


if __name__ == "__main__":
    main(sys.argv[1:])
