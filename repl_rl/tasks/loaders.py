"""Tasks from files and from the built-in families. Every complaint names the file and the line."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.tasks.families import EASY, FAMILIES, HARD, generate, parse_split
from repl_rl.tasks.model import Split, Task, split_of

_BUILTIN = {"quickstart": (*EASY, *HARD), "easy": EASY, "hard": HARD, **{name: (name,) for name in FAMILIES}}
_DEFAULT_COUNT = 1000
_SHOWN_CHARS = 80


def load_tasks(
    source: str, *, split: Split | str = Split.ALL, count: int | None = None, seed: int = 0
) -> tuple[Task, ...]:
    """The tasks of `source` that lie in `split`, at least one.

    Args:
        source: one of

            - `builtin:quickstart`, `builtin:easy`, `builtin:hard`, or `builtin:` and a family's name;
            - `gsm8k:PATH`: JSONL with `question` and a worked `answer` that ends in `#### 18`;
            - PATH: JSONL with `id`, `question` and `answer` (a text or a number), and optionally `judge` and
              `family`; other fields are ignored.
        split: a question falls in `train` or `held_out` by its text alone, in files too.
        count: at most so many tasks (>= 1). None: all of a file, 1000 of a built-in source.
        seed: draws the built-in tasks; a file ignores it.

    Raises:
        ConfigError: names the file and the line, the value, and what to do.
    """
    if count is not None and count < 1:
        raise ConfigError("number of tasks", count, "ask for at least 1")
    side = parse_split(split)
    kind, _, name = source.partition(":")
    if kind == "builtin":
        if name not in _BUILTIN:
            raise ConfigError("built-in tasks", name, f"choose among {', '.join(_BUILTIN)}")
        return generate(_BUILTIN[name], side, count or _DEFAULT_COUNT, seed)
    # Read to the end, so that a complaint does not depend on how many tasks are wanted.
    tasks = tuple(_gsm8k(Path(name)) if kind == "gsm8k" else _jsonl(Path(source)))
    wanted = tuple(islice((t for t in tasks if side is Split.ALL or split_of(t.question) is side), count))
    if not wanted:
        raise ConfigError(f"number of tasks in {source} (split {side!s})", 0, "give a file with at least one")
    return wanted


def _jsonl(path: Path) -> Iterator[Task]:
    seen: dict[str, int] = {}
    for n, record in _records(path):
        task = Task(
            id=_text(path, n, record, "id"),
            question=_text(path, n, record, "question"),
            answer=_text(path, n, record, "answer"),
            judge=_text(path, n, record, "judge", "exact"),
            family=_text(path, n, record, "family", ""),
        )
        if task.id in seen:
            raise ConfigError(f"{path}:{n}: id", task.id, f"line {seen[task.id]} has it; give each task its own")
        seen[task.id] = n
        yield task


def _gsm8k(path: Path) -> Iterator[Task]:
    for index, (n, record) in enumerate(_records(path)):
        worked = _text(path, n, record, "answer")
        _, marker, answer = worked.rpartition("####")
        if not marker or not answer.strip():
            raise ConfigError(f"{path}:{n}: answer", worked[-_SHOWN_CHARS:], "end it with '#### ' and the number")
        question = _text(path, n, record, "question")
        yield Task(id=f"gsm8k-{index}", question=question, answer=answer.strip(), judge="numeric", family="gsm8k")


def _records(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """The JSON objects of a file with their line numbers, counted from 1. Blank lines are skipped."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError("tasks file", str(path), f"it cannot be read ({reason}); give a JSONL file") from error
    for n, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{n}", line[:_SHOWN_CHARS], f"write one JSON object a line: {error}") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{path}:{n}", line[:_SHOWN_CHARS], "write one JSON object a line")
        yield n, record


def _text(path: Path, n: int, record: dict[str, object], field: str, default: str | None = None) -> str:
    """A field as text. A number is written as `str()` shows it."""
    value = record.get(field, default)
    if value is None:
        raise ConfigError(f"{path}:{n}: field {field!r}", value, f"add it; this line has {sorted(record)}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{path}:{n}: field {field!r}", value, "give a text or a number")
    text = str(value)
    if not text.strip() and default is None:
        raise ConfigError(f"{path}:{n}: field {field!r}", text, "it may not be empty")
    return text
