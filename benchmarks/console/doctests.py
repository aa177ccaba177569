"""Copy what `repl-rl transcripts --from-doctests` counted into docs/coldstart.md.

    python -m benchmarks.console.doctests transcripts/transcripts.json

Every count of that page stands between the two markers below and comes from that file.
"""

import json
import platform
import sys
from pathlib import Path

from benchmarks.generated_blocks import ROOT, Block, Report
from repl_rl.utils import installed_versions as installed

PAGE = Block(ROOT / "docs" / "coldstart.md", "console/doctests")
FIGURES = ROOT / "benchmarks" / "results" / "doctests.json"
_REASONS = 3
"""The most frequent ones that are named."""


def block(report: Report) -> str:
    """The generated block of docs/coldstart.md."""
    text = f"{report['kept']:,} trajectories were kept, with {', '.join(report['versions'])}:\n\n"
    text += "| package | doctests | kept whole | kept in part | dropped | most frequent reasons to drop |\n"
    text += "|---|---|---|---|---|---|\n"
    for name, counts in report["packages"].items():
        part, dropped = sum(counts["kept_in_part"].values()), sum(counts["dropped"].values())
        reasons = list(counts["dropped"].items())[:_REASONS]
        cells = (name, f"{counts['kept'] + dropped:,}", f"{counts['kept_whole']:,}", f"{part:,}", f"{dropped:,}")
        text += f"| {' | '.join(cells)} | {', '.join(f'{reason} {count}' for reason, count in reasons)} |\n"
    return text


def versions(packages: Report) -> list[str]:
    """Of Python and of the packages, as far as they are distributions."""
    # The standard library and parts of packages are none.
    found = installed.collect_versions(packages)
    return [f"Python {platform.python_version()}", *(f"{name} {version}" for name, version in found.items())]


def main(file: Path) -> None:
    """Publish the counts in `file`."""
    report = json.loads(file.read_text())
    FIGURES.write_text(json.dumps(report | {"versions": versions(report["packages"])}, indent=2) + "\n")
    PAGE.write(block(json.loads(FIGURES.read_text())))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
