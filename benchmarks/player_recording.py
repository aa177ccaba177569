"""A picture of the player in JupyterLab, worked as a person does, for docs/replay.md.

python -m benchmarks.player_recording runs/quickstart 50 docs/player.png

A rollout of that step, one that was learned from, stands at its third line, coloured by advantage, and two lines run in
its console.
"""

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from repl_rl.runs.store import Store
from tests.e2e.test_jupyterlab import inside, jupyter, run_notebook, shows, write_line, write_notebook
from tests.support.chromium import Tab, chromium

CELL = """from repl_rl import TrajectoryPlayer

TrajectoryPlayer("{file}")"""


def learned_from(file: Path) -> int:
    """The number in `file` of the first rollout of at least four lines whose lines have an advantage."""
    learned = (len(entry.credit_L) > 3 and any(credit.advantage for credit in entry.credit_L) for entry in Store(file))
    return next(number for number, found in enumerate(learned) if found)


def choose(tab: Tab, label: str, value: str) -> None:
    """Choose from a list of the player."""
    chosen = inside(f"select[aria-label='{label}']")
    tab.run(f"{chosen}.value = '{value}', {chosen}.dispatchEvent(new Event('change', {{bubbles: true}}))")


def main(run: Path, step: int, picture: Path) -> None:
    """Draw it into the file `picture`."""
    file = Path("runs", run.name, "trajectories", f"{step:06d}.jsonl.gz")
    with TemporaryDirectory() as place:
        folder = Path(place)
        (folder / file).parent.mkdir(parents=True)
        for name in (file.name, "tokens.json"):
            shutil.copy(run / "trajectories" / name, folder / file.parent)
        write_notebook(folder, CELL.format(file=file))
        with jupyter(folder, "jupyterlab") as address, chromium(offline=False) as tab:
            run_notebook(tab, address)
            choose(tab, "trajectory", str(learned_from(folder / file)))
            choose(tab, "token colours", "advantage")
            tab.mouse(inside("[data-act=first]"))
            for _ in range(3):
                tab.mouse(inside("[data-act=next]"))
            tab.wait(shows(".place", "line 3 of"))
            for line, said in (("2 ** 10", "1024"), ("6 * 7", "42")):
                write_line(tab, line, "type")
                tab.wait(shows(".console", said))
            tab.screenshot(picture, "document.querySelector('.jp-Notebook .jp-Cell')")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
