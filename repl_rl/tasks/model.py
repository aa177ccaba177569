"""What a task is, and on which side of the train / held-out split its question falls."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from repl_rl.errors import ConfigError
from repl_rl.tasks.workspace import Workspace

_HELD_OUT_PERCENT = 20
_SHOWN_CHARS = 80


class Split(StrEnum):
    """A part of all possible questions. `train` and `held_out` never share a question."""

    TRAIN = "train"
    HELD_OUT = "held_out"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A further question of the same rollout, asked after the one before it was answered."""

    question: str
    answer: str
    judge: str = "exact"
    where: str = field(default="", compare=False, repr=False)
    """The place of its answer, as of a task."""

    def __post_init__(self) -> None:
        _refuse_blank("follow-up", self, ("question", "judge"))
        _refuse_surrogates("follow-up", self, ("question", "answer"))


@dataclass(frozen=True, slots=True)
class Task:
    """A question with its reference answer, which may be empty where its judge needs none.

    The answer stays on the host: no sandbox ever sees it.
    """

    id: str
    question: str
    answer: str
    judge: str = "exact"
    """Which judge grades it: a name of `repl_rl.judges`, or `module:function`."""
    family: str = ""
    """What it is tabulated under; "" for none."""
    follow_ups: tuple[FollowUp, ...] = ()
    """What is asked next, in order; empty: the task is a single question."""
    workspace: Workspace | None = None
    """What is in its console before the first line; None: the console starts empty."""
    fields: Mapping[str, object] = field(default_factory=dict, hash=False)
    """What else its row holds, for samplers, judges and rewards; the policy is not told."""
    where: str = field(default="", compare=False, repr=False)
    """The place of its reference answer, such as `tasks.jsonl:3: field 'answer'`; "": it is from no file."""

    def __post_init__(self) -> None:
        _refuse_blank("task", self, ("id", "question", "judge"))
        _refuse_surrogates("task", self, ("id", "question", "answer", "family"))
        given: object = self.follow_ups
        if not isinstance(given, tuple):
            raise ConfigError("task.follow_ups", given, "give a tuple")

    @property
    def reference(self) -> str:
        """The name of its reference answer in an error."""
        return self.where or f"answer of task {self.id}"

    @property
    def told(self) -> str:
        """What the prompt says of its workspace, one line; "": nothing."""
        return self.workspace.in_words() if self.workspace is not None else ""

    @property
    def asked(self) -> str:
        """The question, and then what is told of the workspace."""
        return f"{self.question}\n{self.told}" if self.told else self.question

    def turns(self) -> tuple["Task", ...]:
        """Every question as a task of its own, the first one included, so that each can be graded like any other."""
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


def refuse_surrogates(place: str, text: str) -> None:
    """Refuse a text that cannot be written as UTF-8.

    Raises:
        ConfigError: it has one half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text[max(0, error.start - _SHOWN_CHARS // 2) : error.start + _SHOWN_CHARS // 2]
        remedy = f"character {error.start + 1} is half of a surrogate pair, which is no text; write the pair or drop it"
        raise ConfigError(place, shown, remedy) from error


def fingerprint(question: str) -> str:
    """A stable name of a question: 64 lowercase hexadecimal digits, the same on every machine and in every run."""
    return hashlib.sha256(question.encode()).hexdigest()


def split_of(question: str) -> Split:
    """`held_out` for one question in five, else `train`.

    It depends on the text alone, so a question held out of the evaluation's training set is held out of the
    cold start too, whatever generated it and with whatever seed.
    """
    return Split.HELD_OUT if int(fingerprint(question)[:8], 16) % 100 < _HELD_OUT_PERCENT else Split.TRAIN


def parse_split(split: Split | str) -> Split:
    """The split of that name.

    Raises:
        ConfigError: there is none.
    """
    try:
        return Split(split)
    except ValueError:
        raise ConfigError("split", split, f"choose among {', '.join(Split)}") from None
