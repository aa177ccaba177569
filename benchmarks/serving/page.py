"""Copy the figures of `repl-rl bench serve --json FILE` into docs/, table included.

python -m benchmarks.serving.page FILE
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import linear_regression

from benchmarks.generated_blocks import ROOT, Block

PAGE = Block(ROOT / "docs" / "serve.md", "serving/page")
FIGURES = ROOT / "benchmarks" / "results" / "serve.json"
_TIMES = (
    ("a turn waits for its place", "place_s"),
    ("first text, from the request on", "first_s"),
    ("a line: written, run and told", "line_s"),
    ("a client goes away: engine and console are free, under this load", "left_under_load_s"),
    ("the same where nobody else asks", "left_alone_s"),
    ("the same, until the console's process has ended", "left_alone_console_s"),
)
_HELD = (
    ("processes", "processes", 0),
    ("descriptors of the server", "descriptors", 0),
    ("memory of the server, MiB", "own_mib", 1),
    ("memory of all below it, MiB", "below_mib", 1),
)
_SETTLED = 4
"""One part of so many is left out of the slope of memory."""


def block(found: Mapping[str, object]) -> str:
    """The generated block of docs/serve.md."""
    errors, crowd = found["errors"], found["crowd"]
    assert isinstance(errors, Mapping)
    assert isinstance(crowd, Mapping)
    text = f"{found['conversations']} conversations at once for {found['elapsed_s']:.0f} s on {found['cpus']} cores, "
    text += "clients included; the bundled policy, "
    text += f"engine {found['engine']}, sandbox {found['sandbox']}, `--concurrency {found['concurrency']}`: "
    text += f"{found['turns']:,} turns of {found['lines']:,} lines, {sum(errors.values())} errors.\n\n"
    return f"{text}{_times(found)}\n{_held(found)}\n{_crowded(crowd)}\n{_ended(found)}"


def _times(found: Mapping[str, object]) -> str:
    text = "| seconds | p50 | p99 | longest | of |\n|---|---|---|---|---|\n"
    for name, key in _TIMES:
        row = found[key]
        assert isinstance(row, Mapping)
        text += f"| {name} | {row['p50']:.3f} | {row['p99']:.3f} | {row['max']:.3f} | {row['count']:,} |\n"
    return text


def _held(found: Mapping[str, object]) -> str:
    before, after = found["before"], found["after"]
    assert isinstance(before, Mapping)
    assert isinstance(after, Mapping)
    text = "| the server holds, without a turn | before | after |\n|---|---|---|\n"
    for name, key, digits in _HELD:
        text += f"| {name} | {before[key]:.{digits}f} | {after[key]:.{digits}f} |\n"
    return text


def _crowded(crowd: Mapping[str, object]) -> str:
    refused, told = crowd["refused_s"], crowd["retry_after_s"]
    assert isinstance(refused, Mapping)
    assert isinstance(told, Mapping)
    text = f"{crowd['asked']} turns asked for at once: {crowd['played']} played, {crowd['refused']} answered by 429, "
    return text + f"the last of them after {refused['max']:.2f} s, with a Retry-After of {told['max']:.0f} s at most.\n"


def _ended(found: Mapping[str, object]) -> str:
    looks = found["looks"]
    assert isinstance(looks, Sequence)
    settled = looks[len(looks) // _SETTLED :]
    text = ""
    if len(settled) > 1:
        slope = linear_regression(range(len(settled)), [look["own_mib"] for look in settled]).slope
        grown = slope * (len(settled) - 1)
        text = f"While it was asked, after the first quarter, the server's memory grew by {grown:.1f} MiB. "
    return text + f"SIGTERM ended it with exit code {found['exit_code']}; {found['left']} processes were left.\n"


def main(file: Path) -> None:
    """Publish the figures in `file`."""
    FIGURES.write_text(file.read_text())
    PAGE.write(block(json.loads(FIGURES.read_text())))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
