"""What a task is, and on which side of the train / held-out split its question falls."""

import hashlib
from dataclasses import dataclass
from enum import StrEnum

_HELD_OUT_PERCENT = 20


class Split(StrEnum):
    """A part of all possible questions. `train` and `held_out` never share a question."""

    TRAIN = "train"
    HELD_OUT = "held_out"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Task:
    """A question with its reference answer. The answer stays on the host: no sandbox ever sees it."""

    id: str
    question: str
    answer: str
    judge: str = "exact"
    """Which judge grades it: a name of `repl_rl.judges`, or `module:function`."""
    family: str = ""
    """What it is tabulated under; "" for none."""


def fingerprint(question: str) -> str:
    """A stable name of a question: 64 lowercase hexadecimal digits, the same on every machine and in every run."""
    return hashlib.sha256(question.encode()).hexdigest()


def split_of(question: str) -> Split:
    """`held_out` for one question in five, else `train`.

    It depends on the text alone, so a question held out of the evaluation's training set is held out of the
    cold start too, whatever generated it and with whatever seed.
    """
    return Split.HELD_OUT if int(fingerprint(question)[:8], 16) % 100 < _HELD_OUT_PERCENT else Split.TRAIN
