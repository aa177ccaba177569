"""One process of `test_groups`: python -m tests.support.trainer.group_process OUT"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator

from repl_rl.trainer.config import DynamicSamplingOptions
from repl_rl.trainer.plugins.dynamic_sampling import DynamicGroupSampler, TaskPool
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.trainer.tiny_policies import prompt_of, trajectory_of

IDS = [f"task {n}" for n in range(12)]


Outcome = Callable[[str, int], float | None]


def played(task_id: str, number: int, outcome: float | None, step: int = 0) -> Trajectory:
    t = trajectory_of(prompt_of(task_id), [((9, 2), (7,))], [-1.0] * 3, number, step, fault=outcome is None)
    return t if outcome is None else replace(t, outcome=outcome)


class Told:
    """Gives rollouts whose outcome is said by their task and their number in the call; None: it failed."""

    forbidden_ids = frozenset[int]()

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.asked: list[list[str]] = []

    def load_weights(self, folder: Path, policy_step: int) -> None:
        pass

    def collect(self, task_ids: Sequence[str], policy_step: int) -> list[Trajectory]:
        self.asked.append(list(task_ids))
        return [played(task, n, self.outcome(task, n), policy_step) for n, task in enumerate(task_ids)]


RANK = int(os.environ.get("RANK", "0"))
SLOTS = ["task 0", "task 0", "task 1", "task 1", "task 7", "task 7"]
"""Three groups of two on two processes of three rollouts: the second one straddles them."""


def outcome(task: str, number: int) -> float:
    """The first two tasks are dull. The two halves of a group that straddles differ by their process."""
    return 1.0 if task in IDS[:2] else float((RANK + number) % 2)


def main(out: Path) -> None:
    accelerator = Accelerator(cpu=True)
    groups = DynamicGroupSampler(Told(outcome), 2, accelerator, DynamicSamplingOptions(3), TaskPool(IDS))
    share = len(SLOTS) // accelerator.num_processes
    played = groups.collect(SLOTS[accelerator.process_index * share :][:share], 0)
    told = {"tasks": [t.task_id for t in played], "metrics": groups.metrics}
    (out / f"{RANK}.json").write_text(json.dumps(told))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
