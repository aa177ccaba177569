"""What there is to play, in which order, and the loop that has it played."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from repl_rl.lab.credit.conditions import Condition, Way
from repl_rl.lab.credit.rows import Row, Run, Start


@dataclass(frozen=True, slots=True)
class Job:
    """A training run; without a condition, the evaluation of the policy that the runs of a way start from."""

    way: Way
    condition: Condition | None = None
    seed: int = 0


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


def jobs(conditions: Sequence[Condition], seeds: int, done: Sequence[Row]) -> list[Job]:
    """What is not done yet: the starts first, then seed after seed, so that an interrupted experiment is balanced."""
    started = {row.way for row in done if isinstance(row, Start)}
    finished = {(row.condition, row.seed) for row in done if isinstance(row, Run)}
    ways: list[Way] = ["fenced", "lines"]
    starts = [Job(way) for way in ways if way not in started and way in {c.way for c in conditions}]
    return [*starts, *(Job(c.way, c, n) for n in range(seeds) for c in conditions if (c.name, n) not in finished)]


def play_all(waiting: Sequence[Job], players: Players, keep: Callable[[Row], None]) -> None:
    """Have every job played; `keep` is given each row as it comes.

    A run of fenced blocks waits until the policy that it starts from has been made; others overtake it.
    """
    left = list(waiting)
    starting = {job.way for job in left if job.condition is None}
    under_way = 0
    while left or under_way:
        ready = [job for job in left if job.condition is None or job.way == "lines" or job.way not in starting]
        for job in ready[: players.places - under_way]:
            players.give(job)
            left.remove(job)
            under_way += 1
        row = players.take()
        under_way -= 1
        if isinstance(row, Start):
            starting.discard(row.way)
        keep(row)
