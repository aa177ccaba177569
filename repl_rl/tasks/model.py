"""Tasks, their follow-up questions, and the train / held-out split."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from repl_rl.errors import ConfigError
from repl_rl.tasks.texts import refuse_surrogates
from repl_rl.tasks.workspace import Workspace

_HELD_OUT_PERCENT = 20


class Split(StrEnum):
    """A part of all possible questions. `train` and `held_out` never share a question."""

    TRAIN = "train"
    HELD_OUT = "held_out"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A further question in the same rollout, asked after the previous one is answered."""

    question: str
    answer: str
    judge: str = "exact"
    where: str = field(default="", compare=False, repr=False)
    """Location of its answer, as in `Task.where`."""

    def __post_init__(self) -> None:
        _refuse_blank("follow-up", self, ("question", "judge"))
        _refuse_surrogates("follow-up", self, ("question", "answer"))


@dataclass(frozen=True, slots=True)
class Task:
    """A question with its reference answer, which may be empty if its judge needs none.

    The answer stays on the host: no sandbox ever sees it.
    """

    id: str
    question: str
    answer: str
    judge: str = "exact"
    """Judge that grades the task: a name in `repl_rl.judges`, or `module:function`."""
    family: str = ""
    """Name under which results are grouped; "" for none."""
    follow_ups: tuple[FollowUp, ...] = ()
    """Questions that are asked next, in order. If empty, the task is a single question."""
    workspace: Workspace | None = None
    """Content of the console before the first line. None means an empty console."""
    fields: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Other fields of the task's row, for samplers, judges and rewards. The policy does not see them."""
    where: str = field(default="", compare=False, repr=False)
    """Location of the reference answer, such as `tasks.jsonl:3: field 'answer'`; "" if it is not from a file."""

    def __post_init__(self) -> None:
        _refuse_blank("task", self, ("id", "question", "judge"))
        _refuse_surrogates("task", self, ("id", "question", "answer", "family"))
        given: object = self.follow_ups
        if not isinstance(given, tuple):
            raise ConfigError("task.follow_ups", given, "give a tuple")

    @property
    def reference(self) -> str:
        """Name of the reference answer in an error message."""
        return self.where or f"answer of task {self.id}"

    @property
    def told(self) -> str:
        """Description of the workspace in the prompt, one line; "" for none."""
        return self.workspace.in_words() if self.workspace is not None else ""

    @property
    def asked(self) -> str:
        """The question, followed by the description of the workspace."""
        return f"{self.question}\n{self.told}" if self.told else self.question

    def turns(self) -> tuple["Task", ...]:
        """Return each question as a separate task, including the first, so that each can be graded like any other."""
        # Later questions get the task's id with their number.
        later = (
            replace(
                self,
                id=f"{self.id}.{n}",
                question=f.question,
                answer=f.answer,
                judge=f.judge,
                where=f.where,
                follow_ups=(),
            )
            for n, f in enumerate(self.follow_ups, start=1)
        )
        return (replace(self, follow_ups=()), *later)


def _refuse_blank(what: str, value: object, names: tuple[str, ...]) -> None:
    for name in names:
        if not getattr(value, name).strip():
            raise ConfigError(f"{what}.{name}", getattr(value, name), "it may not be empty")


def _refuse_surrogates(what: str, value: object, names: tuple[str, ...]) -> None:
    for name in names:
        refuse_surrogates(f"{what}.{name}", getattr(value, name))


def fingerprint(question: str) -> str:
    """Return a stable name of a question: 64 lowercase hexadecimal digits, equal on every machine and in every run."""
    return hashlib.sha256(question.encode()).hexdigest()


def split_of(question: str) -> Split:
    """Return `held_out` for one question in five, otherwise `train`.

    The split depends on the text alone. A question that evaluation holds out is therefore also held out of the cold
    start, for any generator and any seed.
    """
    return Split.HELD_OUT if int(fingerprint(question)[:8], 16) % 100 < _HELD_OUT_PERCENT else Split.TRAIN


def parse_split(split: Split | str) -> Split:
    """Return the split with that name.

    Raises:
        ConfigError: no split has that name.
    """
    try:
        return Split(split)
    except ValueError:
        raise ConfigError("split", split, f"choose among {', '.join(Split)}") from None
