"""Loaders of tasks from files, data sets and built-in families. Errors name the file, the line and the field."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from urllib.parse import parse_qsl

from repl_rl.errors import ConfigError
from repl_rl.tasks.environments import VERIFIERS, installed
from repl_rl.tasks.generate import families_of, generate
from repl_rl.tasks.model import FollowUp, Split, Task, parse_split, split_of
from repl_rl.tasks.rows import Row, is_number, rows
from repl_rl.tasks.setups import FIELD, workspace_of
from repl_rl.tasks.suites import SUITES, Suite
from repl_rl.tasks.weights import weighed

_DEFAULT_COUNT = 1000
_SHOWN_CHARS = 80
_MAPPED = ("id", "question", "answer", "family")
_OPTIONS = (*_MAPPED, "judge", "config", "part")


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
            - `math500:`, `aime:`, `humaneval:`, `mbpp:` and then PATH or `dataset:NAME`: see `repl_rl.tasks.suites`;
            - `verifiers:NAME`: an installed environment; `?field=value` after it sets a field of its config.

            A place may end in options such as `?question=problem&judge=math`. They name the fields that hold `id`,
            `question`, `answer` and `family` (`a.b` reads a nested one), the judge of all rows, and a data set's
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
    side = parse_split(split)
    kind, _, rest = source.partition(":")
    if kind == "builtin":
        return generate(families_of(source), side, count or _DEFAULT_COUNT, seed)
    if kind == VERIFIERS:
        wanted = tuple(installed(rest).drawn(side, count, _DEFAULT_COUNT))
        # Without a fitting task, all tasks are counted for the error message.
        tasks = wanted or tuple(installed(rest).drawn(Split.ALL, None, _DEFAULT_COUNT))
    else:
        adapter, place = (_ADAPTERS[kind], rest) if kind in _ADAPTERS else (_plain, source)
        # Read to the end, so that an error does not depend on the number of tasks that are wanted.
        tasks = tuple(_distinct(_read(adapter, place, None if trust else judges)))
        wanted = tuple(islice((t for t in tasks if side is Split.ALL or split_of(t.question) is side), count))
    if not wanted:
        remedy = "give a file with at least one"
        if tasks:
            remedy = f"its {len(tasks)} questions all fall into the other part (one in five is held out); give more"
        raise ConfigError(f"number of tasks in {source} (split {side!s})", 0, remedy)
    return wanted


@dataclass(frozen=True, slots=True)
class _Reading:
    """Names of the fields of one source, as the user mapped them."""

    options: Mapping[str, str] = field(default_factory=dict)

    def text(self, row: Row, name: str, default: str | None = None) -> str:
        """Return the text of the field that the source has for `name`. A field that the user mapped is required."""
        mapped = self.options.get(name)
        return row.text(mapped) if mapped is not None else row.text(name, default)

    def field(self, name: str) -> str:
        """Return the name that the source has for the field `name`."""
        return self.options.get(name, name)


Adapter = Callable[[Row, _Reading], Task]
_READ = {"id", "question", "answer", "judge", "family", "follow_ups"}
"""Fields of a row that become attributes of its task."""


def refuse_source(thing: str, source: str) -> None:
    """Refuse a source from an untrusted file if it imports code: an environment, or a judge.

    Raises:
        ConfigError: the source imports code.
    """
    if source.startswith(f"{VERIFIERS}:") or ":" in _place(source)[1].get("judge", ""):
        remedy = "importing what it names runs it; give --trust if you trust that file (trust=True in Python)"
        raise ConfigError(thing, source, remedy)


def _read(adapter: Adapter, source: str, judges: Collection[str] | None) -> Iterator[tuple[Row, Task]]:
    place, options = _place(source)
    reading = _Reading(options)
    columns = place.startswith("dataset:") or place.endswith(".parquet")
    folder = None if place.startswith("dataset:") else Path(place).parent
    # Every field that the task does not use stays in `Task.fields`.
    read = _READ - set(_KEPT.get(adapter, ())) - set(options)
    taken = {FIELD, *read, *(options[name] for name in _MAPPED if name in options)}
    for row in rows(place, options):
        workspace = workspace_of(row, folder, columns=columns)
        others = {name: value for name, value in row.fields.items() if name not in taken}
        task = replace(adapter(row, reading), workspace=workspace, fields=others)
        # A judge in the source's options is the user's own choice.
        if judges is not None and "judge" not in options:
            _refuse_judges(row.where, task, judges)
        yield row, task


def _refuse_judges(where: str, task: Task, judges: Collection[str]) -> None:
    """Refuse judges of a row that would be imported, except those in `judges`."""
    for text in (task.judge, *(each.judge for each in task.follow_ups)):
        for name in (judge.name for judge in weighed(text)):
            if ":" in name and name not in judges:
                remedy = f"it would be imported, and run; name it yourself (--judge {name}), or give --trust"
                raise ConfigError(f"{where}: judge", name, f"{remedy} (trust=True in Python)")


def _place(source: str) -> tuple[str, Mapping[str, str]]:
    """Split off the options, such as `?question=problem`. A question mark without a later `=` belongs to the name."""
    place, _, query = source.rpartition("?")
    if not place or "=" not in query:
        return source, {}
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ConfigError(f"option {name!r} of {place}", value, f"choose among {', '.join(_OPTIONS)}")
        if not value:
            raise ConfigError(f"option {name!r} of {place}", value, "name a field")
    return place, options


def _distinct(tasks: Iterable[tuple[Row, Task]]) -> Iterator[Task]:
    seen: dict[str, Row] = {}
    for row, task in tasks:
        if task.id in seen:
            earlier = seen[task.id]
            # Within one file, the line number is enough.
            where = f"line {earlier.number}" if row.where.endswith(f":{row.number}") else earlier.where
            raise ConfigError(f"{row.where}: id", task.id, f"{where} has it; give each task its own")
        seen[task.id] = row
        yield task


def _plain(row: Row, reading: _Reading) -> Task:
    return Task(
        id=reading.text(row, "id", str(row.number)),
        question=reading.text(row, "question"),
        answer=reading.text(row, "answer"),
        judge=reading.options.get("judge") or _judge(row, reading.field("answer")),
        family=reading.text(row, "family", ""),
        follow_ups=tuple(_follow_ups(row)),
        where=row.place(reading.field("answer")),
    )


def _judge(row: Row, answer: str) -> str:
    """Return the judge that a row names, or else `numeric` for a number and `exact` for a text."""
    return row.text("judge", "numeric" if is_number(row.value(answer)) else "exact")


def _follow_ups(row: Row) -> Iterator[FollowUp]:
    records = row.value("follow_ups") or []
    if not isinstance(records, list):
        raise ConfigError(f"{row.where}: field 'follow_ups'", records, "give a list of records")
    for n, record in enumerate(records, start=1):
        if not isinstance(record, Mapping):
            raise ConfigError(f"{row.where}: field 'follow_ups'", record, "give records with question and answer")
        inner = Row(f"{row.where}: follow-up {n}", n, record)
        judge, place = _judge(inner, "answer"), inner.place("answer")
        yield FollowUp(inner.text("question"), inner.text("answer"), judge, place)


def _gsm8k(row: Row, reading: _Reading) -> Task:
    worked = reading.text(row, "answer")
    _, marker, answer = worked.rpartition("####")
    if not marker or not answer.strip():
        raise ConfigError(f"{row.where}: answer", worked[-_SHOWN_CHARS:], "end it with '#### ' and the number")
    return Task(
        id=f"gsm8k-{row.number - 1}",
        question=reading.text(row, "question"),
        answer=answer.strip(),
        judge=reading.options.get("judge", "numeric"),
        family=reading.text(row, "family", "gsm8k"),
        where=row.place(reading.field("answer")),
    )


def _math(row: Row, reading: _Reading) -> Task:
    question = "question" if "question" in reading.options or row.value("problem") is None else "problem"
    given = reading.text(row, "answer", "")
    answer = given or _boxed(row)
    family = row.text("subject", "") or row.text("type", "math")
    return Task(
        id=f"math-{reading.text(row, 'id', '') or row.text('unique_id', str(row.number - 1))}",
        question=reading.text(row, question),
        answer=answer,
        judge=reading.options.get("judge", "math"),
        family=reading.text(row, "family", family),
        where=row.place(reading.field("answer") if given else "solution"),
    )


def _boxed(row: Row) -> str:
    """Return the content of the last `\\boxed{}` of the solution, including inner braces."""
    solution = row.text("solution")
    _, marker, rest = solution.rpartition("\\boxed{")
    # Find the brace that closes it.
    depth = 1
    for at, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0 and marker and rest[:at].strip():
            return rest[:at].strip()
    raise ConfigError(f"{row.where}: field 'solution'", solution[-_SHOWN_CHARS:], "put the answer into \\boxed{...}")


def _of(suite: Suite) -> Adapter:
    return lambda row, reading: suite(row, reading.options)


_KEPT: MappingProxyType[Adapter, tuple[str, ...]] = MappingProxyType(
    {_gsm8k: ("id", "answer", "judge"), _math: ("judge",)}
)
"""Fields of `_READ` that an adapter does not read, or reads only in part, so that they stay in `Task.fields`."""
_ADAPTERS: MappingProxyType[str, Adapter] = MappingProxyType(
    {"gsm8k": _gsm8k, "math": _math, **{name: _of(suite) for name, suite in SUITES.items()}}
)
