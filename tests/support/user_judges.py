"""What a user might write: judges of several tempers, named by import path in the tests."""

import os
import time

from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Trajectory


def pid(task: Task, answer: str) -> float:
    return os.getpid()


def level(task: Task, answer: str) -> float:
    return float(str(task.fields["level"]))


def prints(task: Task, answer: str) -> float:
    print("a judge may print")
    return 1.0


def sleeps(task: Task, answer: str) -> float:
    time.sleep(60)
    return 1.0


def eats_memory(task: Task, answer: str) -> float:
    return float(len(bytearray(1 << 31)) > 0)


def dies(task: Task, answer: str) -> float:
    os._exit(1)


def length(task: Task, answer: str) -> float:
    return float(len(answer))


class Even:
    """A judge that reads its reference answers before a run, too."""

    def check(self, task: Task) -> None:
        if int(task.answer) % 2:
            raise ValueError(f"{task.answer} is odd")

    def __call__(self, task: Task, answer: str) -> float:
        return float(answer == task.answer)


even = Even()


def lines(task: Task, answer: str | None, rollout: Trajectory) -> float:
    return len(rollout.lines) * float(str(task.fields.get("each", 1)))
