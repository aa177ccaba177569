"""The evaluation before and after a training run: rates over one set of tasks, one rollout each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from repl_rl.record.metrics import describe, families
from repl_rl.rollout import RolloutThread
from repl_rl.tasks import Task


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Rates in [0, 1] over one set of tasks, one rollout each."""

    solve_rate: float
    """At temperature 1."""
    greedy: float
    line_error_rate: float
    """At temperature 1."""
    families: Mapping[str, float]
    """Solve rate at temperature 1 by task family."""

    def __str__(self) -> str:
        return (
            f"solved {self.solve_rate:.1%} at temperature 1, {self.greedy:.1%} greedy, "
            f"{self.line_error_rate:.1%} of lines in error"
        )


def evaluate(source: RolloutThread, tasks: Sequence[Task]) -> Evaluation:
    """Play every task once at temperature 1 and once greedily."""
    sampled = source.sample(tasks)
    figures = describe(sampled)
    return Evaluation(
        solve_rate=figures["solve_rate"],
        greedy=describe(source.sample(tasks, temperature=0.0))["solve_rate"],
        line_error_rate=figures["line_error_rate"],
        families=families(sampled, {task.id: task.family for task in tasks}),
    )
