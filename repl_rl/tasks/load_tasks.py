"""Loaders of tasks from built-in families, files and data sets, and the registry of all sources.

Errors name the file, the line and the field.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar
from urllib.parse import parse_qsl

from repl_rl.errors import ConfigError, ReplRLError, UserCodeError
from repl_rl.settings.component_registry import Registry
from repl_rl.settings.function_tables import read_weight_table
from repl_rl.tasks.generated_tasks import generate, get_families
from repl_rl.tasks.public_benchmarks import SUITES, DABench, SuiteAdapter, make_gsm8k_task, make_math_task
from repl_rl.tasks.read_rows import (
    FIELD,
    FieldOptions,
    TaskRow,
    get_field,
    get_field_name,
    is_number,
    read_rows,
    read_workspace,
)
from repl_rl.tasks.task import (
    FollowUp,
    Split,
    Task,
    WeightedJudge,
    get_split,
    parse_split,
    parse_weighted_judges,
)
from repl_rl.tasks.task_source import TaskRequest, TaskSource

DEFAULT_COUNT = 1000
"""Number of tasks that a source without an end gives by default."""
_PREFIX = re.compile(r"[A-Za-z][\w-]*")
"""Form of a prefix. Any other text before a colon is part of a path."""
_SHOWN_CHARS = 80
_MAPPED_FIELDS = ("id", "question", "answer", "family")
"""Fields that the user can map to other names, by options of the source."""
_SOURCE_OPTIONS = (*_MAPPED_FIELDS, "judge", "config", "part")
_ROW_FIELDS = {"id", "question", "answer", "judge", "family", "follow_ups"}
"""Fields of a row that become attributes of its task."""


def load_tasks(
    source: str,
    *,
    split: Split | str = Split.ALL,
    count: int | None = None,
    seed: int = 0,
    judges: Collection[str] = (),
    trust: bool = False,
) -> tuple[Task, ...]:
    """Load the tasks of `source` that are in `split`. Returns at least one.

    Args:
        source: one of

            - `builtin:quickstart`, `builtin:easy`, `builtin:hard`, or `builtin:` and a family's name;
            - `builtin:graded`, `builtin:graded/2` (one level), `builtin:dates` (one topic), `builtin:dates/2`;
            - PATH: JSONL or Parquet with `question` and `answer`, and optionally `id` (default: the number of the row),
              `judge`, `family`, `follow_ups` and `workspace`. Without `judge`, the judge is `numeric` for an answer
              that is a number, and `exact` for one that is a text;
            - `dataset:NAME`: a name that `datasets` can load, or a folder that it saved;
            - `gsm8k:` and then PATH or `dataset:NAME`: a worked `answer` that ends in `#### 18`, judge `numeric`;
            - `math:` and then PATH or `dataset:NAME`: `problem`, and `answer` or a `solution` with a `\\boxed{}`,
              judge `math`;
            - `math500:`, `aime:`, `humaneval:`, `mbpp:`, `cruxeval:`, `cruxeval-input:` and then PATH or
              `dataset:NAME`: see `repl_rl.tasks.public_benchmarks`;
            - `dabench:FOLDER`: questions about tables, judge `named_values`;
            - `KIND:PLACE`: a source of an installed package, see `repl_rl.TaskSource`.

            A file or data set may end in options such as `?question=problem&judge=math`. They name the fields that hold
            `id`, `question`, `answer` and `family` (`a.b` reads a nested one), the judge of all rows, and a data set's
            `config` and `part`. Every other field of a row is kept in `Task.fields`.
        split: part of the questions. The text alone decides if a question is in `train` or `held_out`, also in files.
        count: largest number of tasks (>= 1). None means all of a file, and 1000 for built-in tasks.
        seed: seed of the built-in tasks; a file ignores it.
        judges: the user's judges, as `module:function`, that rows may name. Importing one runs it.
        trust: rows may name any judge.

    Raises:
        ConfigError: names the file and the line, the value, and the remedy.
    """
    if count is not None and count < 1:
        raise ConfigError("number of tasks", count, "ask for at least 1")
    request = TaskRequest(parse_split(split), count, seed, None if trust else judges)
    kind, place = find_task_source(source)
    tasks = _load_from(kind, place, request)
    fitting = (t for t in tasks if request.split is Split.ALL or get_split(t.question) is request.split)
    wanted = tuple(islice(fitting, count))
    if not wanted:
        # A source that returns only fitting tasks is asked again, to count all of its tasks.
        if not tasks and request.split is not Split.ALL:
            tasks = _load_from(kind, place, replace(request, split=Split.ALL, count=None))
        remedy = "give a file with at least one"
        if tasks:
            remedy = f"its {len(tasks)} questions all fall into the other part (one in five is held out); give more"
        raise ConfigError(f"number of tasks in {source} (split {request.split!s})", 0, remedy)
    return wanted


def find_task_source(source: str) -> tuple[TaskSource, str]:
    """Return the source of tasks that a setting names, and the place in it. A text without a known prefix is a file.

    Raises:
        ConfigError: the prefix is unknown, and no such file exists.
    """
    kind, colon, place = source.partition(":")
    if kind in TASK_SOURCES.entries:
        return TASK_SOURCES.entries[kind](), place
    if colon and _PREFIX.fullmatch(kind) and not os.path.exists(_split_source_options(source)[0]):
        remedy = f"choose one of {', '.join(TASK_SOURCES.entries)}, or give a file that exists"
        raise ConfigError(f"prefix of tasks {source}", kind, remedy)
    return _Files(), source


def validate_recorded_source(thing: str, source: str) -> None:
    """Refuse a source from an untrusted file if it imports code, such as an environment or a judge.

    Raises:
        ConfigError: the source imports code.
    """
    kind, _, place = source.partition(":")
    # An unknown prefix runs no code, and its file may be missing on this machine.
    found, place = (TASK_SOURCES.entries[kind](), place) if kind in TASK_SOURCES.entries else (_Files(), source)
    if found.runs_code(place):
        remedy = "importing what it names runs it; give --trust if you trust that file (trust=True in Python)"
        raise ConfigError(thing, source, remedy)


def _load_from(kind: TaskSource, place: str, request: TaskRequest) -> tuple[Task, ...]:
    """Load the tasks of a source, which may be code of another package."""
    try:
        tasks = tuple(kind.load(place, request))
    except (ReplRLError, MemoryError):
        raise
    except Exception as error:
        raise UserCodeError(f"task source {kind.kind!r}: loading {place!r} raised {error!r}") from error
    for task in tasks:
        if not isinstance(task, Task):
            raise UserCodeError(f"task source {kind.kind!r}: {place!r} has a {type(task).__name__}; return tasks only")
    return tasks


def _iterate_tasks(
    adapter: SuiteAdapter, source: str, judges: Collection[str] | None
) -> Iterator[tuple[TaskRow, Task]]:
    """Yield the rows of a source, each with its task. `judges` are those that a row may name; None permits any."""
    place, options = _split_source_options(source)
    columns = place.startswith("dataset:") or place.endswith(".parquet")
    folder = None if place.startswith("dataset:") else Path(place).parent
    # Every field that the task does not use stays in `Task.fields`.
    read = _ROW_FIELDS - set(_KEPT.get(adapter, ())) - set(options)
    taken = {FIELD, *read, *(options[name] for name in _MAPPED_FIELDS if name in options)}
    for row in read_rows(place, options):
        workspace = read_workspace(row, folder, columns=columns)
        others = {name: value for name, value in row.fields.items() if name not in taken}
        task = replace(adapter(row, options), workspace=workspace, fields=others)
        # A judge in the source's options is the user's own choice.
        if judges is not None and "judge" not in options:
            _validate_row_judges(row.location, task, judges)
        yield row, task


def _validate_row_judges(where: str, task: Task, judges: Collection[str]) -> None:
    """Refuse judges of a row that would be imported, except those in `judges`."""
    for text in (task.judge, *(each.judge for each in task.follow_ups)):
        for name in (judge.name for judge in parse_weighted_judges(text)):
            if ":" in name and name not in judges:
                remedy = f"it would be imported, and run; name it yourself (--judges {name}), or give --trust"
                raise ConfigError(f"{where}: judge", name, f"{remedy} (trust=True in Python)")


def _split_source_options(source: str) -> tuple[str, Mapping[str, str]]:
    """Split off the options, such as `?question=problem`. A question mark without a later `=` belongs to the name."""
    place, _, query = source.rpartition("?")
    if not place or "=" not in query:
        return source, {}
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name, value in options.items():
        if name not in _SOURCE_OPTIONS:
            raise ConfigError(f"option {name!r} of {place}", value, f"choose among {', '.join(_SOURCE_OPTIONS)}")
        if not value:
            raise ConfigError(f"option {name!r} of {place}", value, "name a field")
    return place, options


def _iterate_distinct(tasks: Iterable[tuple[TaskRow, Task]]) -> Iterator[Task]:
    """Yield the tasks. Raise ConfigError if two have the same id."""
    seen: dict[str, TaskRow] = {}
    for row, task in tasks:
        if task.id in seen:
            earlier = seen[task.id]
            # Within one file, the line number is enough.
            where = f"line {earlier.number}" if row.location.endswith(f":{row.number}") else earlier.location
            raise ConfigError(f"{row.location}: id", task.id, f"{where} has the same id; give each task a unique id")
        seen[task.id] = row
        yield task


def _make_plain_task(row: TaskRow, options: FieldOptions) -> Task:
    answer = get_field_name(row, options, "answer", "answer")
    return Task(
        id=get_field(row, options, "id", "id", default=str(row.number)),
        question=get_field(row, options, "question", "question"),
        answer=row.get_text(answer),
        judge=options.get("judge") or _choose_judge(row, answer),
        family=get_field(row, options, "family", "family", default=""),
        follow_ups=tuple(_iterate_follow_ups(row)),
        where=row.describe_field(answer),
    )


def _choose_judge(row: TaskRow, answer: str) -> str:
    """Return the judge that a row names, or its judges with weights, or `numeric` for a number and `exact` for a text.

    Raises:
        ConfigError: a weight is not a finite number.
    """
    named = row.get_value("judge")
    if isinstance(named, Mapping):
        where = row.describe_field("judge")
        return " + ".join(str(WeightedJudge(*pair)) for pair in read_weight_table(where, named).items())
    return row.get_text("judge", "numeric" if is_number(row.get_value(answer)) else "exact")


def _iterate_follow_ups(row: TaskRow) -> Iterator[FollowUp]:
    records = row.get_value("follow_ups") or []
    if not isinstance(records, list):
        raise ConfigError(f"{row.location}: field 'follow_ups'", records, "give a list of records")
    for n, record in enumerate(records, start=1):
        if not isinstance(record, Mapping):
            raise ConfigError(f"{row.location}: field 'follow_ups'", record, "give records with question and answer")
        inner = TaskRow(f"{row.location}: follow-up {n}", n, record)
        judge, place = _choose_judge(inner, "answer"), inner.describe_field("answer")
        yield FollowUp(inner.get_text("question"), inner.get_text("answer"), judge, place)


_KEPT: MappingProxyType[SuiteAdapter, tuple[str, ...]] = MappingProxyType(
    {make_gsm8k_task: ("id", "answer", "judge"), make_math_task: ("judge",)}
)
"""Fields of `_ROW_FIELDS` that an adapter does not read, or reads only in part, so that they stay in `Task.fields`."""


class _Builtin(TaskSource):
    """Generated tasks of the built-in families."""

    kind: ClassVar[str] = "builtin"
    about: ClassVar[str] = "generated families"

    def load(self, place: str, request: TaskRequest) -> Iterable[Task]:
        families = get_families(f"{self.kind}:{place}")
        return generate(families, request.split, request.count or DEFAULT_COUNT, request.seed)

    def runs_code(self, place: str) -> bool:
        return False


class _Files(TaskSource):
    """Rows of a JSONL or Parquet file, which has no prefix."""

    kind: ClassVar[str] = "file"
    about: ClassVar[str] = "rows of a file"

    def load(self, place: str, request: TaskRequest) -> Iterable[Task]:
        return self._load_rows(place, request, _make_plain_task)

    def _load_rows(self, place: str, request: TaskRequest, adapter: SuiteAdapter) -> Iterable[Task]:
        # Read to the end, so that an error does not depend on the number of tasks that are wanted.
        return tuple(_iterate_distinct(_iterate_tasks(adapter, place, request.allowed_judges)))

    def runs_code(self, place: str) -> bool:
        return ":" in _split_source_options(place)[1].get("judge", "")


class _Datasets(_Files):
    """Rows of a data set."""

    kind: ClassVar[str] = "dataset"
    about: ClassVar[str] = "a data set of the package datasets"

    def load(self, place: str, request: TaskRequest) -> Iterable[Task]:
        return super().load(f"{self.kind}:{place}", request)


def _make_suite_source(name: str, title: str, adapter: SuiteAdapter) -> type[TaskSource]:
    """Return the source of a known suite: files and data sets whose rows have the form of that suite."""

    class Suite(_Files):
        kind: ClassVar[str] = name
        about: ClassVar[str] = f"rows of {title}"

        def load(self, place: str, request: TaskRequest) -> Iterable[Task]:
            return self._load_rows(place, request, adapter)

    return Suite


TASK_SOURCES: Registry[TaskSource] = Registry(
    "source of tasks",
    {
        _Builtin.kind: _Builtin,
        _Datasets.kind: _Datasets,
        **{name: _make_suite_source(name, title, adapter) for name, title, adapter in SUITES},
        DABench.kind: DABench,
    },
    ["repl_rl.task_sources"],
)
"""Registry of the sources that a prefix of `--tasks` selects. Installed packages add theirs by entry points."""
