"""Judges of the ports in `ports.py`, in a module of their own: a limited process imports it, and nothing heavy."""

from repl_rl import Task, Trajectory


# B. Reward functions of TRL's example of an SQL agent.
def queried(task: Task, answer: str | None, rollout: Trajectory) -> float:
    return 0.5 if any("SELECT" in line.text for line in rollout.lines) else -2.0


def structured(task: Task, answer: str | None, rollout: Trajectory) -> float:
    return 0.25 if any(line.execution and not line.execution.status.is_error for line in rollout.lines[:-1]) else -0.25


def correct(task: Task, answer: str | None, rollout: Trajectory) -> float:
    return 1.0 if answer == task.fields["gold"] else -1.0


# E. A judge for XTuner's GSM8K that reads the row's other fields.
def by_source(task: Task, answer: str | None, rollout: Trajectory) -> float:
    scale = {"openai/gsm8k": 1.0, "hard": 3.0}[str(task.fields["data_source"])]
    return scale * (answer == task.answer) - 0.5 * (rollout.stop == "max_tokens")
