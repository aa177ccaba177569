"""Jobs of the experiment, their order, and the loop that gives them to workers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.credit.conditions import Condition, Way
from benchmarks.credit.rows import Row, Run, Start

TUNING = (1000, 1001)
"""Seeds of the runs that choose learning rates."""


@dataclass(frozen=True, slots=True)
class Job:
    """Training run; without a condition, the evaluation of the policy that the runs of a way start from."""

    way: Way
    condition: Condition | None = None
    seed: int = 0
    learning_rate: float | None = None
    """Learning rate; None takes that of the settings."""

    @property
    def tuning(self) -> bool:
        """True if the run only helps to choose a learning rate, so that no table has it."""
        return self.seed >= TUNING[0]


class Players(Protocol):
    """Pool of workers that play jobs."""

    places: int
    """Jobs that can run at once, >= 1."""

    def give(self, job: Job) -> None:
        """Submit a job; a worker must be free."""

    def take(self) -> Row:
        """Wait for the next row.

        Raises:
            ReplRLError: the worker failed.
        """


def jobs(
    conditions: Sequence[Condition], seeds: Sequence[int], done: Sequence[Row], rates: Mapping[str, float] | None = None
) -> list[Job]:
    """Return the unfinished jobs: first the starts, then by seed, so that an interrupted experiment is balanced.

    `rates` are chosen learning rates, by the name of the condition. None takes that of the settings for all.
    """
    finished = {(row.condition, row.seed) for row in done if isinstance(row, Run)}
    chosen = rates or {}
    return [
        *starts(conditions, done),
        *(Job(c.way, c, n, chosen.get(c.name)) for n in seeds for c in conditions if (c.name, n) not in finished),
    ]


def tuning_jobs(conditions: Sequence[Condition], rates: Sequence[float], done: Sequence[Row]) -> list[Job]:
    """Return the unfinished runs that choose learning rates, and the unfinished starts."""
    finished = {(row.condition, row.seed, row.learning_rate) for row in done if isinstance(row, Run)}
    # Seeds first, then rates, so that an interrupted tuning compares complete sets.
    wanted = [Job(c.way, c, seed, rate) for seed in TUNING for rate in rates for c in conditions]
    names = [(job, (job.condition.name, job.seed, job.learning_rate)) for job in wanted if job.condition]
    return [*starts(conditions, done), *(job for job, name in names if name not in finished)]


def starts(conditions: Sequence[Condition], done: Sequence[Row]) -> list[Job]:
    """Return the unfinished evaluations of the policies that runs start from."""
    started = {row.way for row in done if isinstance(row, Start)}
    ways: list[Way] = ["fenced", "lines"]
    return [Job(way) for way in ways if way not in started and way in {c.way for c in conditions}]


def play_all(waiting: Sequence[Job], players: Players, keep: Callable[[Row], None]) -> None:
    """Play every job; call `keep` with each row as it arrives.

    A run waits until its starting policy exists. Runs of another way may overtake it.
    """
    left = list(waiting)
    starting = {job.way for job in left if job.condition is None}
    under_way = 0
    while left or under_way:
        # A run needs its way's starting policy, which the start job makes.
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
