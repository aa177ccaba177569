"""What there is to play, in which order, and the loop that has it played."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from repl_rl.lab.credit.conditions import Condition, Way
from repl_rl.lab.credit.rows import Row, Run, Start

TUNING = (1000, 1001)
"""Seeds that learning rates are chosen with."""


@dataclass(frozen=True, slots=True)
class Job:
    """A training run; without a condition, the evaluation of the policy that the runs of a way start from."""

    way: Way
    condition: Condition | None = None
    seed: int = 0
    learning_rate: float | None = None
    """None: that of the settings."""

    @property
    def tuning(self) -> bool:
        """It is played to choose a learning rate, and is in no table."""
        return self.seed >= TUNING[0]


class Players(Protocol):
    """Who plays jobs."""

    places: int
    """Jobs that can be under way at once, >= 1."""

    def give(self, job: Job) -> None:
        """Hand a job over; there is a place for it."""

    def take(self) -> Row:
        """Wait for the next row.

        Raises:
            ReplRLError: whoever played it failed.
        """


def jobs(
    conditions: Sequence[Condition], seeds: Sequence[int], done: Sequence[Row], rates: Mapping[str, float] | None = None
) -> list[Job]:
    """What is not done yet: the starts first, then seed after seed, so that an interrupted experiment is balanced.

    `rates` are learning rates that were chosen, by the name of the condition; None: all have that of the settings.
    """
    finished = {(row.condition, row.seed) for row in done if isinstance(row, Run)}
    chosen = rates or {}
    return [
        *starts(conditions, done),
        *(Job(c.way, c, n, chosen.get(c.name)) for n in seeds for c in conditions if (c.name, n) not in finished),
    ]


def tuning_jobs(conditions: Sequence[Condition], rates: Sequence[float], done: Sequence[Row]) -> list[Job]:
    """What is not played yet of the runs that learning rates are chosen with, and the starts."""
    finished = {(row.condition, row.seed, row.learning_rate) for row in done if isinstance(row, Run)}
    wanted = [Job(c.way, c, seed, rate) for seed in TUNING for rate in rates for c in conditions]
    names = [(job, (job.condition.name, job.seed, job.learning_rate)) for job in wanted if job.condition]
    return [*starts(conditions, done), *(job for job, name in names if name not in finished)]


def starts(conditions: Sequence[Condition], done: Sequence[Row]) -> list[Job]:
    """The evaluations that are not done yet of what runs start from."""
    started = {row.way for row in done if isinstance(row, Start)}
    ways: list[Way] = ["fenced", "lines"]
    return [Job(way) for way in ways if way not in started and way in {c.way for c in conditions}]


def play_all(waiting: Sequence[Job], players: Players, keep: Callable[[Row], None]) -> None:
    """Have every job played; `keep` is given each row as it comes.

    A run waits until the policy that it starts from has been made; those of another way overtake it.
    """
    left = list(waiting)
    starting = {job.way for job in left if job.condition is None}
    under_way = 0
    while left or under_way:
        ready = [job for job in left if job.condition is None or job.way not in starting]
        for job in ready[: players.places - under_way]:
            players.give(job)
            left.remove(job)
            under_way += 1
        row = players.take()
        under_way -= 1
        if isinstance(row, Start):
            starting.discard(row.way)
        keep(row)
