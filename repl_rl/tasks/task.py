"""Tasks with their follow-up questions, the train / held-out split, and weighted judges.

`Task.judge` holds several judges as one expression, such as `numeric + 0.2*my_judges:format`. Settings, and rows of
files, give them as a table of names and weights.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache

from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ConfigError
from repl_rl.tasks.task_workspace import Workspace
from repl_rl.tasks.validate_text import validate_utf8

_HELD_OUT_PERCENT = 20
"""Share of the questions in `Split.HELD_OUT`, percent."""
OWN = "task"
"""Placeholder in an expression for the judge that each task names itself."""
_EXPRESSION_REMEDY = "write judges with + between, each a name or weight*name, such as numeric + 0.2*my_judges:format"


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
        _check_not_blank("follow-up", self, ("question", "judge"))
        _check_fields_encodable("follow-up", self, ("question", "answer"))


@keeps_old_names
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
        _check_not_blank("task", self, ("id", "question", "judge"))
        _check_fields_encodable("task", self, ("id", "question", "answer", "family"))
        value: object = self.follow_ups
        if not isinstance(value, tuple):
            raise ConfigError("task.follow_ups", value, "give a tuple")

    @property
    def answer_label(self) -> str:
        """Name of the reference answer in an error message."""
        return self.where or f"answer of task {self.id}"

    @property
    def workspace_text(self) -> str:
        """Description of the workspace in the prompt, one line; "" for none."""
        return self.workspace.describe() if self.workspace is not None else ""

    @property
    def full_question(self) -> str:
        """The question, followed by the description of the workspace."""
        return f"{self.question}\n{self.workspace_text}" if self.workspace_text else self.question

    def split_turns(self) -> tuple["Task", ...]:
        """Return each question as a separate task, including the first, so that each can be graded like any other."""
        # Later questions get the task's id with their number.
        follow_up_tasks = (
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
        return (replace(self, follow_ups=()), *follow_up_tasks)


def _check_not_blank(thing: str, value: object, names: tuple[str, ...]) -> None:
    for name in names:
        if not getattr(value, name).strip():
            raise ConfigError(f"{thing}.{name}", getattr(value, name), "it may not be empty")


def _check_fields_encodable(thing: str, value: object, names: tuple[str, ...]) -> None:
    """Refuse fields that cannot be written as UTF-8."""
    for name in names:
        validate_utf8(f"{thing}.{name}", getattr(value, name))


def fingerprint_question(question: str) -> str:
    """Return a stable name of a question: 64 lowercase hexadecimal digits, equal on every machine and in every run."""
    return hashlib.sha256(question.encode()).hexdigest()


def get_split(question: str) -> Split:
    """Return `held_out` for one question in five, otherwise `train`.

    The split depends on the text alone. A question that evaluation holds out is therefore also held out of the cold
    start, for any generator and any seed.
    """
    return Split.HELD_OUT if int(fingerprint_question(question)[:8], 16) % 100 < _HELD_OUT_PERCENT else Split.TRAIN


def parse_split(split: Split | str) -> Split:
    """Return the split with that name.

    Raises:
        ConfigError: no split has that name.
    """
    try:
        return Split(split)
    except ValueError:
        raise ConfigError("split", split, f"choose among {', '.join(Split)}") from None


@dataclass(frozen=True, slots=True)
class WeightedJudge:
    """A judge and the factor on its value."""

    name: str
    weight: float = 1.0

    def __str__(self) -> str:
        return self.name if self.weight == 1.0 else f"{self.weight!r}*{self.name}".replace("e+", "e")


@lru_cache(maxsize=256)
def parse_weighted_judges(text: str) -> tuple[WeightedJudge, ...]:
    """Return the judges of an expression, at least one. The value of the first one decides if a task is solved.

    Raises:
        ConfigError: the syntax is different, a weight is not a finite number, or a judge is named twice.
    """
    judges = tuple(_parse_term(text, term.strip()) for term in text.split("+"))
    if len({judge.name for judge in judges}) < len(judges):
        raise ConfigError("judge", text, "name each judge once, with one weight")
    return judges


def _parse_term(text: str, term: str) -> WeightedJudge:
    weight, star, name = term.rpartition("*")
    try:
        factor = float(weight) if star else 1.0
    except ValueError:
        factor = math.nan
    if not name.strip() or not math.isfinite(factor):
        raise ConfigError("judge", text, _EXPRESSION_REMEDY)
    return WeightedJudge(name.strip(), factor)


def set_judges(weights: Mapping[str, float], tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Return the tasks with these judges, each with its weight. `task` means the task's own judge. An empty mapping
    changes nothing.
    """
    judges = tuple(WeightedJudge(name, weight) for name, weight in weights.items())
    return tuple(replace(task, judge=_format_judge(task, judges)) if judges else task for task in tasks)


def _format_judge(task: Task, judges: tuple[WeightedJudge, ...]) -> str:
    parts: list[WeightedJudge] = []
    for judge in judges:
        # The placeholder expands to the task's own judges.
        expanded = parse_weighted_judges(task.judge) if judge.name == OWN else (WeightedJudge(judge.name),)
        parts += [WeightedJudge(inner.name, inner.weight * judge.weight) for inner in expanded]
    return " + ".join(map(str, parts))
