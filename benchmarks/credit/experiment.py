"""Experiment from its settings to its report; rows of earlier runs are reused."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.credit.conditions import SAME_AS, conditions, refuse_removed
from benchmarks.credit.experiment_plan import SPREAD, Power, chosen_rates, earlier_spread, power
from benchmarks.credit.jobs import TUNING, Job, Players, jobs, play_all, tuning_jobs
from benchmarks.credit.processes import started
from benchmarks.credit.rows import Row, RowFile, Run, Start, record
from benchmarks.credit.settings import TARGET, WINDOW, Settings, base_of, header
from benchmarks.credit.statistics import aggregate, tokens_to
from repl_rl.errors import ConfigError
from repl_rl.utils.hardware import count_cores

Open = Callable[[int, Settings, Path], AbstractContextManager[Players]]


@dataclass(frozen=True, slots=True)
class Experiment:
    """Conditions and seeds to play, and the folder of the rows."""

    out: Path
    """Folder of the rows and of the policy that the fenced runs start from."""
    settings: Settings = field(default_factory=Settings)
    conditions: Sequence[str] = ()
    """Names of conditions; empty means all."""
    seeds: int = 4
    """Runs per condition, >= 1."""
    workers: int = 2
    """Worker processes of one core each, >= 1."""
    first_seed: int = 0
    """First seed, >= 0, so that one cell can be repeated."""
    spread: float = SPREAD
    """Standard deviation over seeds of a difference of the primary metric, > 0.

    It determines the smallest difference that this experiment detects.
    """
    earlier: Path | None = None
    """Report of an earlier experiment, whose spread is used instead."""

    def __post_init__(self) -> None:
        for name, floor in (("seeds", 1), ("workers", 1), ("first_seed", 0)):
            if getattr(self, name) < floor:
                raise ConfigError(name, getattr(self, name), f"give at least {floor}")
        if not self.spread > 0:
            raise ConfigError("spread", self.spread, "it must be above 0")
        if self.played.stop > TUNING[0]:
            raise ConfigError("seeds", self.played.stop - 1, f"from {TUNING[0]} on they choose learning rates")

    @property
    def played(self) -> range:
        """Seeds of the runs."""
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def power(self) -> Power:
        """Power of the experiment: the smallest difference that it detects.

        Raises:
            ConfigError: `earlier` is not such a report.
        """
        chosen = conditions(self.conditions)
        if self.earlier is not None:
            return power(chosen, self.seeds, earlier_spread(self.earlier), f"that of {self.earlier.name}")
        source = "that of the earlier experiment" if self.spread == SPREAD else "as was asked for"
        return power(chosen, self.seeds, self.spread, source)


def run_experiment(
    experiment: Experiment, tell: Callable[[str], None] = print, players: Open = started
) -> dict[str, object]:
    """Play the missing runs and return the content of `bench credit --json`: rows, and the statistics of them.

    Raises:
        ConfigError: a condition is unknown, or `out` holds runs of another experiment.
        ReplRLError: a worker failed; finished runs are kept.
    """
    chosen, settings = conditions(experiment.conditions), experiment.settings
    about = header(settings, base_of(settings))
    file = RowFile(experiment.out / "rows.jsonl", about)
    tell(str(experiment.power))

    def play(missing: Sequence[Job]) -> None:
        if not missing:
            return
        refuse_removed(chosen)
        told = Told(len(missing), tell)

        def keep(row: Row) -> None:
            file.add(row)
            told.row(row)

        # Each row is stored as it arrives, so that an interrupted experiment continues from there.
        with players(min(experiment.workers, len(missing)), settings, experiment.out) as open_players:
            play_all(missing, open_players, keep)

    # Choose learning rates first, on separate seeds.
    rates: dict[str, float] = {}
    tuned: list[Run] = []
    if settings.rates:
        play(tuning_jobs(chosen, settings.rates, file.rows))
        tuned = [row for row in file.rows if isinstance(row, Run) and row.seed in TUNING]
        rates = chosen_rates(tuned, settings.rates, settings.tokens)
        tell("learning rates: " + ", ".join(f"{name} {rate:g}" for name, rate in rates.items()))
    play(jobs(chosen, experiment.played, file.rows, rates))
    # The file may hold more conditions and seeds than this experiment asks for.
    names = {condition.name for condition in chosen}
    runs = [r for r in file.rows if isinstance(r, Run) and r.condition in names and r.seed in experiment.played]
    starts = [row for row in file.rows if isinstance(row, Start)]
    return report(about, runs, starts, experiment, sum(run.wall_s for run in tuned))


def report(
    about: dict[str, object],
    runs: Sequence[Run],
    starts: Sequence[Start],
    experiment: Experiment,
    tuning_s: float = 0.0,
) -> dict[str, object]:
    """Return the data of all tables and the plot; `tuning_s` is the wall clock of choosing learning rates."""
    rows: list[Row] = [*starts, *runs]
    return {
        **about,
        "target": TARGET,
        "window": WINDOW,
        "same_as": dict(SAME_AS),
        "seeds": experiment.seeds,
        "workers": experiment.workers,
        "cores": count_cores(),
        "busy_s": round(sum(row.wall_s for row in rows), 1),
        "tuning_s": round(tuning_s, 1),
        "power": asdict(experiment.power),
        "figures": aggregate(runs, starts, experiment.settings.tokens),
        "rows": [record(row) for row in rows],
    }


class Told:
    """Progress log: the result of each row, and the remaining time."""

    def __init__(self, count: int, tell: Callable[[str], None]) -> None:
        self._count = count
        self._tell = tell
        self._done = 0
        self._began = time.monotonic()

    def row(self, row: Row) -> None:
        """Log one more row."""
        self._done += 1
        left_min = (time.monotonic() - self._began) / self._done * (self._count - self._done) / 60
        self._tell(f"{self._done:>3}/{self._count}  {_summary(row)}  {left_min:4.1f} min left")


def _summary(row: Row) -> str:
    if isinstance(row, Start):
        return f"start, {row.way}: solved {row.figures['solve_rate']:.1%}, {row.figures['greedy']:.1%} greedy"
    reached = tokens_to(row.tokens, row.solve)
    when = "not reached" if reached is None else f"after {reached} tokens"
    if row.seed in TUNING:
        tried = f"{row.condition} tried at {row.learning_rate:g}, seed {row.seed}"
        return f"{tried}: {TARGET:.0%} {when}, {row.wall_s:.0f} s"
    solved = f"solved {row.after['solve_rate']:.1%}, {row.after['greedy']:.1%} greedy"
    return f"{row.condition} seed {row.seed}: {solved}, {TARGET:.0%} {when}, {row.wall_s:.0f} s"
