"""Rows of files and data sets as plain records, each with its location for error messages."""

import importlib
import json
import math
import numbers
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Protocol

from repl_rl.errors import ConfigError
from repl_rl.tasks.texts import check_record, refuse_surrogates
from repl_rl.tasks.unpacked import beyond, most_claimed, most_unpacked, parquet_records, size_of_record

_SHOWN_CHARS = 80
_DATASET = "dataset:"
_BYTE_ORDER_MARK = "\ufeff"


def is_number(value: object) -> bool:
    """Return True for an int, a float, a Decimal and a real number of numpy, but not for a bool."""
    return isinstance(value, numbers.Real | Decimal) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Row:
    """One record. `where` is `file:3` for the third line of a file, otherwise `name, row 3`; both count from 1."""

    where: str
    number: int
    fields: Mapping[str, object]

    def text(self, field: str, default: str | None = None) -> str:
        """Return a field as text. A number is formatted by `str()`; `answer.value` reads a nested record.

        Raises:
            ConfigError: the field is missing and has no default, is empty, is neither text nor a finite number, or
                contains half of a surrogate pair.
        """
        value = self.value(field)
        if value is None and default is not None:
            return default
        if value is None:
            raise ConfigError(self.place(field), value, f"add it; it has {sorted(self.fields)}")
        if not (isinstance(value, str) or is_number(value)):
            raise ConfigError(self.place(field), value, "give a text or a number")
        if isinstance(value, numbers.Real | Decimal) and not _is_finite(value):
            raise ConfigError(self.place(field), value, "give a finite number, or a text")
        text = str(value)
        if not text.strip() and default is None:
            raise ConfigError(self.place(field), text, "it may not be empty")
        refuse_surrogates(self.place(field), text)
        return text

    def place(self, field: str) -> str:
        """Return the name of a field in an error message: `tasks.jsonl:3: field 'answer'`."""
        return f"{self.where}: field {field!r}"

    def value(self, field: str) -> object:
        """Return a field unchanged, or None if it is missing."""
        if field in self.fields:
            return self.fields[field]
        # A name with dots reads nested records.
        found: object = self.fields
        for part in field.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found


def _is_finite(value: numbers.Real | Decimal) -> bool:
    return (
        value.is_finite() if isinstance(value, Decimal) else isinstance(value, numbers.Integral) or math.isfinite(value)
    )


def rows(place: str, options: Mapping[str, str]) -> Iterator[Row]:
    """Return the rows of `dataset:NAME`, of a Parquet file, or else of a JSONL file.

    `options` may name a data set's `config` and its `part` (default `train`).

    Raises:
        ConfigError: the place cannot be read; the message names it.
    """
    if place.startswith(_DATASET):
        return _dataset_rows(place.removeprefix(_DATASET), options)
    for name in ("config", "part"):
        if name in options:
            raise ConfigError(f"option {name!r} of {place}", options[name], f"only {_DATASET}NAME has it; drop it")
    return _parquet_rows(Path(place)) if place.endswith(".parquet") else _json_rows(Path(place))


def as_json(text: str, where: str, remedy: str) -> object:
    """Parse a text as JSON. `where` and `remedy` appear in the error message.

    Raises:
        ConfigError: the text is not JSON, or gives a key of an object several values.
    """
    try:
        found: object = json.loads(text, object_pairs_hook=partial(_object, where))
    except (ValueError, RecursionError) as error:
        raise ConfigError(where, text[:_SHOWN_CHARS], f"{remedy}: {error}") from error
    return found


def _object(where: str, pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of JSON. Its keys must differ, because Python would drop all but the last value of a key."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        key, times = Counter(keys).most_common(1)[0]
        raise ConfigError(f"{where}: number of values of {key[:_SHOWN_CHARS]!r}", times, "give it one value")
    return found


def _json_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a JSONL file. Blank lines and a byte order mark at the beginning are skipped."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError("tasks file", str(path), f"it cannot be read ({reason}); give a JSONL file") from error
    for n, line in enumerate(text.removeprefix(_BYTE_ORDER_MARK).split("\n"), start=1):
        if not line.strip():
            continue
        record = as_json(line, f"{path}:{n}", "write one JSON object a line")
        if not isinstance(record, dict):
            raise ConfigError(f"{path}:{n}", line[:_SHOWN_CHARS], "write one JSON object a line")
        check_record(f"{path}:{n}", record)
        yield Row(f"{path}:{n}", n, record)


def _parquet_rows(path: Path) -> Iterator[Row]:
    # The import is slow, and only Parquet needs it.
    parquet = importlib.import_module("pyarrow.parquet")
    broken: type[Exception] = importlib.import_module("pyarrow").ArrowException
    try:
        file = parquet.ParquetFile(path)
        most = most_unpacked(path.stat().st_size)
    except (OSError, broken) as error:
        raise ConfigError("tasks file", str(path), f"it cannot be read as Parquet: {error}") from error
    with file:
        if most_claimed(file.metadata) > most:
            raise ConfigError("tasks file", str(path), beyond(most))
        records = _explain(parquet_records(file, most), "tasks file", str(path), "it cannot be read as Parquet")
        yield from _numbered(
            path.name, _limit_size(records, path.name, "tasks file", str(path), most), file.schema_arrow
        )


def _dataset_rows(name: str, options: Mapping[str, str]) -> Iterator[Row]:
    # The import is slow, and only data sets need it.
    import datasets

    part = options.get("part", "train")
    try:
        if (Path(name) / "state.json").exists() or (Path(name) / "dataset_dict.json").exists():
            saved = datasets.load_from_disk(name)
            table = saved[part] if isinstance(saved, Mapping) else saved
            size = None
        else:
            table = datasets.load_dataset(name, options.get("config"), split=part)
            size = table.info.download_size
        # Without files, the table is in memory only.
        size = size or sum(Path(file["filename"]).stat().st_size for file in table.cache_files) or table.data.nbytes
    except Exception as error:
        # The library raises errors of many kinds without a common base class.
        reason = str(error).split("\n")[0]
        raise ConfigError("dataset", name, f"its part {part!r} cannot be loaded: {reason}") from error
    schema: _Schema = table.features.arrow_schema
    records = _explain(table, "dataset", name, f"its part {part!r} cannot be read")
    yield from _numbered(name, _limit_size(records, name, "dataset", name, most_unpacked(size)), schema)


Record = Mapping[str, object]


def _explain(records: Iterable[Record], thing: str, name: str, remedy: str) -> Iterator[Record]:
    """Yield the records. An error of the library that reads them becomes a ConfigError.

    Raises:
        ConfigError: a record cannot be read, such as a text that is not valid UTF-8, or a date out of range.
    """
    try:
        yield from records
    except Exception as error:
        # The libraries raise errors of many kinds without a common base class.
        reason = str(error).split("\n")[0]
        raise ConfigError(thing, name, f"{remedy}: {reason}") from error


def _limit_size(records: Iterable[Record], where: str, thing: str, name: str, most: int) -> Iterator[Record]:
    """Yield the records until they take more than `most` bytes.

    Raises:
        ConfigError: they take more, or a record is refused by `check_record`.
    """
    taken = 0
    for n, record in enumerate(records, start=1):
        # Nesting is checked first, since the size is computed level by level.
        check_record(f"{where}, row {n}", record)
        taken += size_of_record(record)
        if taken > most:
            raise ConfigError(thing, name, beyond(most))
        yield record


class _ArrowField(Protocol):
    @property
    def type(self) -> "_Schema": ...


class _Schema(Protocol):
    """A pyarrow schema, or the type of a struct: fields by name."""

    def field(self, name: str) -> _ArrowField: ...


def _numbered(name: str, records: Iterable[Record], schema: _Schema) -> Iterator[Row]:
    for n, record in enumerate(records, start=1):
        fields = {key: _shortened(value, schema.field(key).type) for key, value in record.items()}
        yield Row(f"{name}, row {n}", n, fields)


def _shortened(value: object, kind: _Schema) -> object:
    """Return a value of a column. A float of 16 or 32 bits gets only the digits that its column holds.

    Python's floats have 64 bits, so 0.1 of such a column would be 0.10000000149011612.
    """
    if not isinstance(value, float | dict):
        return value
    types = importlib.import_module("pyarrow.types")
    if isinstance(value, float) and (types.is_float32(kind) or types.is_float16(kind)):
        # The import is slow, and only such columns need it.
        numpy = importlib.import_module("numpy")
        return float(str((numpy.float32 if types.is_float32(kind) else numpy.float16)(value)))
    if isinstance(value, dict) and types.is_struct(kind):
        return {name: _shortened(inner, kind.field(name).type) for name, inner in value.items()}
    return value
