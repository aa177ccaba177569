"""The experiment from its settings to its report; what was played before is not played again."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.lab.credit.conditions import SAME_AS, conditions
from repl_rl.lab.credit.jobs import Players, jobs, play_all
from repl_rl.lab.credit.processes import started
from repl_rl.lab.credit.rows import Row, RowFile, Run, Start, record
from repl_rl.lab.credit.settings import TARGET, WINDOW, Settings, header
from repl_rl.lab.credit.statistics import aggregate, tokens_to
from repl_rl.machine.cores import cores

Open = Callable[[int, Settings, Path], AbstractContextManager[Players]]


@dataclass(frozen=True, slots=True)
class Experiment:
    """What is played, and where its rows are kept."""

    out: Path
    """Folder of the rows and of the policy that the fenced runs start from."""
    settings: Settings = field(default_factory=Settings)
    conditions: Sequence[str] = ()
    """Names; empty: all."""
    seeds: int = 4
    """Runs of each condition, >= 1."""
    workers: int = 2
    """Processes of one core each, >= 1."""

    def __post_init__(self) -> None:
        for name in ("seeds", "workers"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "give at least 1")


def run_experiment(
    experiment: Experiment, tell: Callable[[str], None] = print, players: Open = started
) -> dict[str, object]:
    """Play what is missing and return what `bench credit --json` writes: rows, and figures that follow from them.

    Raises:
        ConfigError: an unknown condition, or `out` holds runs of another experiment.
        ReplRLError: a worker failed; what was finished is kept.
    """
    chosen = conditions(experiment.conditions)
    about = header(experiment.settings)
    file = RowFile(experiment.out / "rows.jsonl", about)
    missing = jobs(chosen, experiment.seeds, file.rows)
    if missing:
        told = Told(len(missing), tell)

        def keep(row: Row) -> None:
            file.add(row)
            told.row(row)

        with players(min(experiment.workers, len(missing)), experiment.settings, experiment.out) as open_players:
            play_all(missing, open_players, keep)
    names = {condition.name for condition in chosen}
    runs = [row for row in file.rows if isinstance(row, Run) and row.condition in names and row.seed < experiment.seeds]
    return report(about, runs, [row for row in file.rows if isinstance(row, Start)], experiment)


def report(
    about: dict[str, object], runs: Sequence[Run], starts: Sequence[Start], experiment: Experiment
) -> dict[str, object]:
    """Everything that tables and the plot are made of."""
    rows: list[Row] = [*starts, *runs]
    return {
        **about,
        "target": TARGET,
        "window": WINDOW,
        "same_as": dict(SAME_AS),
        "seeds": experiment.seeds,
        "workers": experiment.workers,
        "cores": cores(),
        "busy_s": round(sum(row.wall_s for row in rows), 1),
        "figures": aggregate(runs, starts, experiment.settings.tokens),
        "rows": [record(row) for row in rows],
    }


class Told:
    """Says what each row showed, and when the last one is to be expected."""

    def __init__(self, count: int, tell: Callable[[str], None]) -> None:
        self._count = count
        self._tell = tell
        self._done = 0
        self._began = time.monotonic()

    def row(self, row: Row) -> None:
        """Tell of one more row."""
        self._done += 1
        left_min = (time.monotonic() - self._began) / self._done * (self._count - self._done) / 60
        self._tell(f"{self._done:>3}/{self._count}  {_summary(row)}  {left_min:4.1f} min left")


def _summary(row: Row) -> str:
    if isinstance(row, Start):
        return f"start, {row.way}: solved {row.figures['solve_rate']:.1%}, {row.figures['greedy']:.1%} greedy"
    reached = tokens_to(row.tokens, row.solve)
    when = "not reached" if reached is None else f"after {reached} tokens"
    solved = f"solved {row.after['solve_rate']:.1%}, {row.after['greedy']:.1%} greedy"
    return f"{row.condition} seed {row.seed}: {solved}, {TARGET:.0%} {when}, {row.wall_s:.0f} s"
