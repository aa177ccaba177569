"""Two evaluations on the same tasks, compared task by task."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from repl_rl.errors import ConfigError
from repl_rl.evaluation.intervals import Interval, mean_within, sign_test
from repl_rl.evaluation.study import Study


@dataclass(frozen=True, slots=True)
class Comparison:
    """By how much the first evaluation is better than the second."""

    difference: Interval
    """Of the solve rates, in pairs, as `mean_within`: what is hard for both weighs on neither side."""
    better: int
    """Tasks that the first solves more often."""
    worse: int
    p_value: float
    """Of the exact sign test over these tasks."""
    families: Mapping[str, Interval]
    """The difference within each family."""

    def __str__(self) -> str:
        d = self.difference
        return (
            f"{100 * d.value:+.1f} points ({100 * d.low:+.1f} to {100 * d.high:+.1f}), "
            f"better on {self.better} tasks, worse on {self.worse}, p = {self.p_value:.2g}"
        )


def check_same_tasks(study: Study, task_ids: Iterable[str]) -> None:
    """Refuse a comparison before anything is played for it.

    Raises:
        ConfigError: the study is not about exactly these tasks.
    """
    only = sorted({r.task_id for r in study.results} ^ set(task_ids))
    if only:
        remedy = "evaluate both with the same --tasks, --count and --seed"
        raise ConfigError("tasks in one of the two evaluations only", (len(only), only[:3]), remedy)


def compare(first: Study, second: Study) -> Comparison:
    """Compare solve rates in pairs. A task that failed on our side in either is left out.

    Pairing removes the spread between tasks from the difference, so it shows smaller ones than two separate intervals.

    Raises:
        ConfigError: they are not about the same tasks, or share no graded one.
    """
    mine, other = ({r.task_id: r for r in study.results} for study in (first, second))
    check_same_tasks(second, mine)
    pairs = [(r, other[task_id]) for task_id, r in mine.items() if r.rollouts and other[task_id].rollouts]
    if not pairs:
        raise ConfigError("tasks graded in both evaluations", 0, "every pair has a rollout that failed on our side")
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
