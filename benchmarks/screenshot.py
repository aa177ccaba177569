"""A picture of a run's report, as Chromium shows it: a rollout that recovered from an error.

python -m benchmarks.screenshot runs/quickstart benchmarks/results/quickstart/report.png
"""

import sys
from pathlib import Path

from repl_rl.runs.report import write_report
from repl_rl.runs.store import read_trajectories
from tests.support.chromium import chromium


def main(run: Path, picture: Path) -> None:
    """Draw the report of the run in folder `run` into the file `picture`."""
    solved = [
        t
        for t in read_trajectories(run / "trajectories")
        if t.outcome == 1.0 and any(e.status.is_error for e in t.executions)
    ]
    shown = max(solved, key=lambda t: (len(t.lines), t.id))
    with chromium() as tab:
        tab.open(write_report(run).resolve().as_uri() + f"#tab=rollouts&id={shown.id}", size=(1360, 820))
        tab.wait("document.querySelector('.session')")
        tab.click("[data-heat=advantage]")
        tab.screenshot(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
