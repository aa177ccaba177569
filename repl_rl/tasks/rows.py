"""Rows of files and data sets as plain records, each with the place that a complaint about it names."""

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from repl_rl.errors import ConfigError

_SHOWN_CHARS = 80
_DATASET = "dataset:"


@dataclass(frozen=True, slots=True)
class Row:
    """One record. `where` is `file:3` for the third line of a file, else `name, row 3`; both count from 1."""

    where: str
    number: int
    fields: Mapping[str, object]

    def text(self, field: str, default: str | None = None) -> str:
        """A field as text; a number is written as `str()` shows it. `answer.value` looks into a nested record.

        Raises:
            ConfigError: it is missing and has no default, it is empty, or it is neither text nor number.
        """
        value = self.value(field)
        if value is None and default is not None:
            return default
        if value is None:
            raise ConfigError(f"{self.where}: field {field!r}", value, f"add it; it has {sorted(self.fields)}")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(f"{self.where}: field {field!r}", value, "give a text or a number")
        text = str(value)
        if not text.strip() and default is None:
            raise ConfigError(f"{self.where}: field {field!r}", text, "it may not be empty")
        return text

    def value(self, field: str) -> object:
        """A field as it is; None where it is missing."""
        if field in self.fields:
            return self.fields[field]
        found: object = self.fields
        for part in field.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found


def rows(place: str, options: Mapping[str, str]) -> Iterator[Row]:
    """The rows of `dataset:NAME`, of a Parquet file, or else of a JSONL file.

    `options` may name a data set's `config` and its `part` (default `train`).

    Raises:
        ConfigError: it cannot be read; names the place.
    """
    if place.startswith(_DATASET):
        return _dataset_rows(place.removeprefix(_DATASET), options)
    for name in ("config", "part"):
        if name in options:
            raise ConfigError(f"option {name!r} of {place}", options[name], f"only {_DATASET}NAME has it; drop it")
    return _parquet_rows(Path(place)) if place.endswith(".parquet") else _json_rows(Path(place))


def as_json(text: str, where: str, remedy: str) -> object:
    """What a text of JSON says; `where` and `remedy` are what a complaint says.

    Raises:
        ConfigError: it is no JSON.
    """
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(where, text[:_SHOWN_CHARS], f"{remedy}: {error}") from error
    return found


def _json_rows(path: Path) -> Iterator[Row]:
    """Blank lines are skipped."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError("tasks file", str(path), f"it cannot be read ({reason}); give a JSONL file") from error
    for n, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        record = as_json(line, f"{path}:{n}", "write one JSON object a line")
        if not isinstance(record, dict):
            raise ConfigError(f"{path}:{n}", line[:_SHOWN_CHARS], "write one JSON object a line")
        yield Row(f"{path}:{n}", n, record)


def _parquet_rows(path: Path) -> Iterator[Row]:
    # Slow to import, and only Parquet needs it.
    parquet = importlib.import_module("pyarrow.parquet")
    broken: type[Exception] = importlib.import_module("pyarrow").ArrowException
    try:
        with parquet.ParquetFile(path) as file:
            records = [record for batch in file.iter_batches() for record in batch.to_pylist()]
    except (OSError, broken) as error:
        raise ConfigError("tasks file", str(path), f"it cannot be read as Parquet: {error}") from error
    return _numbered(path.name, records)


def _dataset_rows(name: str, options: Mapping[str, str]) -> Iterator[Row]:
    import datasets  # slow to import, and only data sets need it

    part = options.get("part", "train")
    try:
        if (Path(name) / "state.json").exists() or (Path(name) / "dataset_dict.json").exists():
            saved = datasets.load_from_disk(name)
            table = saved[part] if isinstance(saved, Mapping) else saved
        else:
            table = datasets.load_dataset(name, options.get("config"), split=part)
    except Exception as error:  # the library raises errors of many kinds, none with a common root
        reason = str(error).split("\n")[0]
        raise ConfigError("dataset", name, f"its part {part!r} cannot be loaded: {reason}") from error
    return _numbered(name, table)


def _numbered(name: str, records: Iterable[Mapping[str, object]]) -> Iterator[Row]:
    return (Row(f"{name}, row {n}", n, record) for n, record in enumerate(records, start=1))
