"""Results of an evaluation per task, and the metrics computed from them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypedDict

from repl_rl.errors import ConfigError
from repl_rl.evaluation.intervals import Interval, mean_within, pass_at_k, wilson
from repl_rl.machine.files import write_whole
from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout import Fleet
from repl_rl.tasks import Task

_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Counts of one task's solved rollouts. Rollouts that failed on our side count only in `faults`."""

    task_id: str
    family: str
    rollouts: int
    """Graded rollouts at temperature 1 (>= 0)."""
    solved: int
    """Graded rollouts with an outcome of at least 1."""
    greedy: bool | None
    """True if greedy decoding solves it; None means that no greedy rollout was graded."""
    lines: int
    """Executed lines in the rollouts at temperature 1."""
    error_lines: int
    faults: int

    @property
    def solve_rate(self) -> float:
        """Share of its graded rollouts that are right; undefined without any."""
        return self.solved / self.rollouts


def result(task: Task, sampled: Sequence[Trajectory], greedy: Sequence[Trajectory]) -> TaskResult:
    """Return the result of one task from its sampled and greedy rollouts."""
    # A rollout that failed on our side says nothing about the policy.
    sound = [t for t in sampled if t.failure is None]
    first = next((t for t in greedy if t.failure is None), None)
    return TaskResult(
        task_id=task.id,
        family=task.family,
        rollouts=len(sound),
        solved=sum(_solved(t) for t in sound),
        greedy=_solved(first) if first is not None else None,
        lines=sum(1 for t in sound for _ in t.executions),
        error_lines=sum(e.status.is_error for t in sound for e in t.executions),
        faults=len(sampled) + len(greedy) - len(sound) - sum(t.failure is None for t in greedy),
    )


def _solved(trajectory: Trajectory) -> bool:
    return trajectory.solved


@dataclass(frozen=True)
class Study:
    """Results of one evaluation, at least one of them graded."""

    results: tuple[TaskResult, ...]

    def __post_init__(self) -> None:
        if not self.graded:
            raise ConfigError("graded tasks", 0, "every rollout failed on our side; see `repl-rl doctor`")

    @cached_property
    def graded(self) -> tuple[TaskResult, ...]:
        """Results with at least one graded rollout."""
        return tuple(r for r in self.results if r.rollouts)

    @property
    def faults(self) -> int:
        """Number of rollouts that failed on our side; no metric includes them."""
        return sum(r.faults for r in self.results)

    @cached_property
    def solve_rate(self) -> Interval:
        """pass@1: mean solve rate of a task.

        Its interval is Wilson's with one rollout per task, else that of `mean_within`.
        """
        return mean_within([r.solve_rate for r in self.graded])

    def pass_at(self, k: int) -> Interval | None:
        """Return mean pass@k (k >= 1) over the tasks with at least `k` graded rollouts.

        It is None if no task has that many.
        """
        if k == 1:
            return self.solve_rate
        enough = [pass_at_k(r.solved, r.rollouts, k) for r in self.graded if r.rollouts >= k]
        return mean_within(enough) if enough else None

    @cached_property
    def greedy(self) -> Interval | None:
        """Share of tasks that greedy decoding solves; None means that it was not tried."""
        tried = [r.greedy for r in self.results if r.greedy is not None]
        return wilson(sum(tried), len(tried)) if tried else None

    @property
    def line_error_rate(self) -> float:
        """Share of executed lines in error at temperature 1."""
        return sum(r.error_lines for r in self.results) / max(1, sum(r.lines for r in self.results))

    @property
    def figures(self) -> dict[str, float]:
        """Metrics for a curve: `greedy` only if it was tried, `solve_rate/FAMILY` only with several families."""
        greedy = {"greedy": self.greedy.value} if self.greedy else {}
        # With one family its rate would repeat the total.
        families = {f"solve_rate/{name}": part.solve_rate.value for name, part in self.families.items()}
        return {
            "solve_rate": self.solve_rate.value,
            **greedy,
            "line_error_rate": self.line_error_rate,
            "faults": float(self.faults),
            **(families if len(families) > 1 else {}),
        }

    def __str__(self) -> str:
        greedy = f", {self.greedy.value:.1%} greedy" if self.greedy else ""
        return (
            f"solved {self.solve_rate.value:.1%} at temperature 1{greedy}, {self.line_error_rate:.1%} of lines in error"
        )

    @cached_property
    def families(self) -> Mapping[str, "Study"]:
        """Study of each family with a graded task, by name."""
        names = sorted({r.family for r in self.graded})
        return {name: Study(tuple(r for r in self.results if r.family == name)) for name in names}


def evaluate(source: Fleet, tasks: Sequence[Task]) -> Study:
    """Play every task once at temperature 1 and once greedily.

    Raises:
        ConfigError: every rollout failed on our side.
    """
    sampled, greedy = source.sample(tasks), source.sample(tasks, temperature=0.0)
    return Study(tuple(result(task, [one], [other]) for task, one, other in zip(tasks, sampled, greedy, strict=True)))


class Figure(TypedDict):
    value: float
    low: float
    high: float


def figure(interval: Interval | None) -> Figure | None:
    """Return an estimate in its JSON form."""
    return Figure(value=interval.value, low=interval.low, high=interval.high) if interval else None


def write_study(path: Path, study: Study, k: int, about: Mapping[str, str | int]) -> None:
    """Write metrics and results as JSON, atomically. `about` describes the evaluated policy and tasks."""
    record: dict[str, object] = {
        "schema_version": _SCHEMA_VERSION,
        **about,
        "tasks": len(study.results),
        "sandbox_faults": study.faults,
        "solve_rate": figure(study.solve_rate),
        f"pass@{k}": figure(study.pass_at(k)),
        "greedy": figure(study.greedy),
        "line_error_rate": study.line_error_rate,
        "families": {name: figure(part.solve_rate) for name, part in study.families.items()},
        "results": [{name: getattr(r, name) for name in TaskResult.__slots__} for r in study.results],
    }
    write_whole(path, json.dumps(record, indent=1) + "\n")


def read_study(path: Path) -> Study:
    """Read the results in a file that `write_study` wrote.

    Raises:
        ConfigError: it cannot be read, or is not such a file.
    """
    try:
        record = json.loads(path.read_text())
        if record["schema_version"] != _SCHEMA_VERSION:
            raise ValueError(f"schema_version is {record['schema_version']!r}")
        return Study(tuple(TaskResult(**fields) for fields in record["results"]))
    except OSError as error:
        raise ConfigError("evaluation file", str(path), f"it cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        # An older schema, or fields of another release, end here as well.
        remedy = f"give a file that `repl-rl eval --json` of this release wrote: {error!r}"
        raise ConfigError("evaluation file", str(path), remedy) from error


def is_study(path: Path) -> bool:
    """Return True for a file that `write_study` of this or another release wrote."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and {"schema_version", "results"} <= record.keys()
