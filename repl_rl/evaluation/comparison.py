"""Comparison of two evaluations on the same tasks, task by task."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from repl_rl.errors import ConfigError
from repl_rl.evaluation.intervals import Interval, mean_within, sign_test
from repl_rl.evaluation.study import Study


@dataclass(frozen=True, slots=True)
class Comparison:
    """Difference of the first evaluation from the second."""

    difference: Interval
    """Difference of the solve rates in pairs, as `mean_within`, so that tasks hard for both cancel."""
    better: int
    """Number of tasks that the first solves more often."""
    worse: int
    p_value: float
    """p-value of the exact sign test over these tasks."""
    families: Mapping[str, Interval]
    """Difference within each family."""

    def __str__(self) -> str:
        d = self.difference
        return (
            f"{100 * d.value:+.1f} points ({100 * d.low:+.1f} to {100 * d.high:+.1f}), "
            f"better on {self.better} tasks, worse on {self.worse}, p = {self.p_value:.2g}"
        )


def check_same_tasks(study: Study, task_ids: Iterable[str]) -> None:
    """Raise ConfigError for two evaluations on different tasks, before any rollout is played.

    Raises:
        ConfigError: the study does not have exactly these tasks.
    """
    only = sorted({r.task_id for r in study.results} ^ set(task_ids))
    if only:
        remedy = "evaluate both with the same --tasks, --count and --seed"
        raise ConfigError("tasks in one of the two evaluations only", (len(only), only[:3]), remedy)


def compare(first: Study, second: Study) -> Comparison:
    """Compare solve rates in pairs. A task that failed on our side in either evaluation is left out.

    Pairing removes the spread between tasks from the difference, so smaller differences show than with two intervals.

    Raises:
        ConfigError: they have different tasks, or share no graded one.
    """
    mine, other = ({r.task_id: r for r in study.results} for study in (first, second))
    check_same_tasks(second, mine)
    pairs = [(r, other[task_id]) for task_id, r in mine.items() if r.rollouts and other[task_id].rollouts]
    if not pairs:
        raise ConfigError("tasks graded in both evaluations", 0, "every pair has a rollout that failed on our side")
    # One difference per task; with one rollout each it is -1, 0 or 1.
    differences = {a.task_id: a.solve_rate - b.solve_rate for a, b in pairs}
    by_family: dict[str, list[float]] = {}
    for a, _ in pairs:
        by_family.setdefault(a.family, []).append(differences[a.task_id])
    better, worse = (sum(sign * d > 0 for d in differences.values()) for sign in (1, -1))
    return Comparison(
        difference=mean_within(list(differences.values()), -1.0),
        better=better,
        worse=worse,
        p_value=sign_test(better, worse),
        families={name: mean_within(values, -1.0) for name, values in sorted(by_family.items())},
    )
