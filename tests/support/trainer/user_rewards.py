"""Functions of a user, as settings name them: processes of judges import nothing else."""

from collections.abc import Sequence

from repl_rl.trajectory.trajectory import Trajectory


def even(trajectory: Trajectory) -> list[float]:
    """A reward for each line: an even number of tokens is liked."""
    return [float(len(line.token_ids) % 2 == 0) for line in trajectory.lines]


def short(task: object, answer: str | None) -> float:
    """A judge: short answers are liked."""
    return 1.0 if answer is not None and len(answer) < 3 else 0.0


def shortest(task: object, played: Sequence[Trajectory]) -> list[float]:
    """A ranking: the rollouts with the fewest tokens are liked."""
    least = min(t.sampled_tokens for t in played)
    return [float(t.sampled_tokens == least) for t in played]
