"""Rows of task files and data sets as plain records, and the workspace in a row.

`read_rows` yields the rows of a JSONL file, a Parquet file or a data set, each with its location for error messages.
`read_workspace` parses a row's field `workspace`.
"""

import base64
import importlib
import json
import math
import numbers
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Protocol

from repl_rl.errors import ConfigError
from repl_rl.tasks.bounded_decompression import (
    compute_claimed_bytes,
    compute_max_unpacked_bytes,
    describe_size_error,
    estimate_record_bytes,
    read_parquet_records,
)
from repl_rl.tasks.task_workspace import MAX_BYTES, Workspace
from repl_rl.tasks.validate_text import check_record, validate_utf8

FIELD = "workspace"
"""Field of a row that holds its workspace."""
_PARTS = ("values", "files", "lines", "preload", "told")
"""Keys of a workspace in a row."""
Record = Mapping[str, object]
_SHOWN_CHARS = 80
_DATASET = "dataset:"
_BYTE_ORDER_MARK = "\ufeff"


def is_number(value: object) -> bool:
    """Return True for an int, a float, a Decimal and a real number of numpy, but not for a bool."""
    return isinstance(value, numbers.Real | Decimal) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One record. `location` is `file:3` for the third line of a file, otherwise `name, row 3`; both count from 1."""

    location: str
    number: int
    fields: Mapping[str, object]

    def get_text(self, field: str, default: str | None = None) -> str:
        """Return a field as text. A number is formatted by `str()`; `answer.value` reads a nested record.

        Raises:
            ConfigError: the field is missing and has no default, is empty, is neither text nor a finite number, or
                contains half of a surrogate pair.
        """
        value = self.get_value(field)
        if value is None and default is not None:
            return default
        if value is None:
            raise ConfigError(self.describe_field(field), value, f"add it; it has {sorted(self.fields)}")
        if not (isinstance(value, str) or is_number(value)):
            raise ConfigError(self.describe_field(field), value, "give a text or a number")
        if isinstance(value, numbers.Real | Decimal) and not _is_finite(value):
            raise ConfigError(self.describe_field(field), value, "give a finite number, or a text")
        text = str(value)
        if not text.strip() and default is None:
            raise ConfigError(self.describe_field(field), text, "it may not be empty")
        validate_utf8(self.describe_field(field), text)
        return text

    def describe_field(self, field: str) -> str:
        """Return the name of a field in an error message: `tasks.jsonl:3: field 'answer'`."""
        return f"{self.location}: field {field!r}"

    def get_value(self, field: str) -> object:
        """Return a field unchanged, or None if it is missing."""
        if field in self.fields:
            return self.fields[field]
        # A name with dots reads nested records.
        value: object = self.fields
        for part in field.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def _is_finite(value: numbers.Real | Decimal) -> bool:
    return (
        value.is_finite() if isinstance(value, Decimal) else isinstance(value, numbers.Integral) or math.isfinite(value)
    )


class _ArrowField(Protocol):
    """A field of a pyarrow schema."""

    @property
    def type(self) -> "_ArrowSchema": ...


class _ArrowSchema(Protocol):
    """A pyarrow schema, or the type of a struct: fields by name."""

    def field(self, name: str) -> _ArrowField: ...


def read_rows(source: str, options: Mapping[str, str]) -> Iterator[TaskRow]:
    """Return the rows of `dataset:NAME`, of a Parquet file, or else of a JSONL file.

    `options` may name a data set's `config` and its `part` (default `train`).

    Raises:
        ConfigError: the place cannot be read; the message names it.
    """
    if source.startswith(_DATASET):
        return _read_dataset_rows(source.removeprefix(_DATASET), options)
    for name in ("config", "part"):
        if name in options:
            raise ConfigError(f"option {name!r} of {source}", options[name], f"only {_DATASET}NAME has it; drop it")
    return _read_parquet_rows(Path(source)) if source.endswith(".parquet") else _read_json_rows(Path(source))


def parse_json(text: str, where: str, remedy: str) -> object:
    """Parse a text as JSON. `where` and `remedy` appear in the error message.

    Raises:
        ConfigError: the text is not JSON, or gives a key of an object several values.
    """
    try:
        value: object = json.loads(text, object_pairs_hook=partial(_build_object, where))
    except (ValueError, RecursionError) as error:
        raise ConfigError(where, text[:_SHOWN_CHARS], f"{remedy}: {error}") from error
    return value


def _build_object(where: str, pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of JSON. Its keys must differ, because Python would drop all but the last value of a key."""
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        key, count = Counter(keys).most_common(1)[0]
        raise ConfigError(f"{where}: number of values of {key[:_SHOWN_CHARS]!r}", count, "give it one value")
    return record


def _read_json_rows(path: Path) -> Iterator[TaskRow]:
    """Yield the rows of a JSONL file. Blank lines and a byte order mark at the beginning are skipped."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError("tasks file", str(path), f"it cannot be read ({reason}); give a JSONL file") from error
    for n, line in enumerate(text.removeprefix(_BYTE_ORDER_MARK).split("\n"), start=1):
        if not line.strip():
            continue
        record = parse_json(line, f"{path}:{n}", "write one JSON object per line")
        if not isinstance(record, dict):
            raise ConfigError(f"{path}:{n}", line[:_SHOWN_CHARS], "write one JSON object per line")
        check_record(f"{path}:{n}", record)
        yield TaskRow(f"{path}:{n}", n, record)


def _read_parquet_rows(path: Path) -> Iterator[TaskRow]:
    """Yield the rows of a Parquet file."""
    # The import is slow, and only Parquet needs it.
    parquet = importlib.import_module("pyarrow.parquet")
    arrow_error: type[Exception] = importlib.import_module("pyarrow").ArrowException
    try:
        file = parquet.ParquetFile(path)
        max_bytes = compute_max_unpacked_bytes(path.stat().st_size)
    except (OSError, arrow_error) as error:
        raise ConfigError("tasks file", str(path), f"it cannot be read as Parquet: {error}") from error
    with file:
        if compute_claimed_bytes(file.metadata) > max_bytes:
            raise ConfigError("tasks file", str(path), describe_size_error(max_bytes))
        records = _translate_errors(
            read_parquet_records(file, max_bytes), "tasks file", str(path), "it cannot be read as Parquet"
        )
        yield from _number_rows(
            path.name, _limit_size(records, path.name, "tasks file", str(path), max_bytes), file.schema_arrow
        )


def _read_dataset_rows(name: str, options: Mapping[str, str]) -> Iterator[TaskRow]:
    """Yield the rows of a data set: a folder that `datasets` saved, or a name that it can load."""
    # The import is slow, and only data sets need it.
    import datasets

    part = options.get("part", "train")
    try:
        if (Path(name) / "state.json").exists() or (Path(name) / "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(name)
            table = loaded[part] if isinstance(loaded, Mapping) else loaded
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
    schema: _ArrowSchema = table.features.arrow_schema
    records = _translate_errors(table, "dataset", name, f"its part {part!r} cannot be read")
    yield from _number_rows(name, _limit_size(records, name, "dataset", name, compute_max_unpacked_bytes(size)), schema)


def _translate_errors(records: Iterable[Record], thing: str, name: str, remedy: str) -> Iterator[Record]:
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


def _limit_size(records: Iterable[Record], where: str, thing: str, name: str, max_bytes: int) -> Iterator[Record]:
    """Yield the records until they take more than `max_bytes`.

    Raises:
        ConfigError: they take more, or a record is refused by `check_record`.
    """
    used_bytes = 0
    for n, record in enumerate(records, start=1):
        # Nesting is checked first, since the size is computed level by level.
        check_record(f"{where}, row {n}", record)
        used_bytes += estimate_record_bytes(record)
        if used_bytes > max_bytes:
            raise ConfigError(thing, name, describe_size_error(max_bytes))
        yield record


def _number_rows(name: str, records: Iterable[Record], schema: _ArrowSchema) -> Iterator[TaskRow]:
    """Yield the records of a table as rows, numbered from 1."""
    for n, record in enumerate(records, start=1):
        fields = {key: _round_to_column_precision(value, schema.field(key).type) for key, value in record.items()}
        yield TaskRow(f"{name}, row {n}", n, fields)


def _round_to_column_precision(value: object, arrow_type: _ArrowSchema) -> object:
    """Return a value of a column. A float of 16 or 32 bits gets only the digits that its column holds.

    Python's floats have 64 bits, so 0.1 of such a column would be 0.10000000149011612.
    """
    if not isinstance(value, float | dict):
        return value
    types = importlib.import_module("pyarrow.types")
    if isinstance(value, float) and (types.is_float32(arrow_type) or types.is_float16(arrow_type)):
        # The import is slow, and only such columns need it.
        numpy = importlib.import_module("numpy")
        return float(str((numpy.float32 if types.is_float32(arrow_type) else numpy.float16)(value)))
    if isinstance(value, dict) and types.is_struct(arrow_type):
        return {name: _round_to_column_precision(inner, arrow_type.field(name).type) for name, inner in value.items()}
    return value


def read_workspace(row: TaskRow, folder: Path | None, *, columns: bool) -> Workspace | None:
    """Return the workspace in a row's field `workspace`: a record, or its JSON as text. Return None if it has none.

    Args:
        row: the row.
        folder: folder of the task file, in which each `{"path": ...}` is looked up; None if no such file exists.
        columns: True for Parquet and data sets, where each row has the fields of all rows. None then means missing.

    Raises:
        ConfigError: the field is not a workspace; the message names the row.
    """
    record = row.get_value(FIELD)
    # Records in JSON text do not share their keys with other rows.
    if isinstance(record, str):
        record, columns = parse_json(record, f"{row.location}: field {FIELD!r}", "write one JSON object"), False
        check_record(row.location, {FIELD: record})
    if record is None:
        return None
    if not isinstance(record, Mapping):
        raise ConfigError(f"{row.location}: field {FIELD!r}", _shorten(record), f"give a record of {', '.join(_PARTS)}")
    unknown = sorted(set(record) - set(_PARTS))
    if unknown:
        raise ConfigError(f"{row.location}: field {FIELD!r}, key", unknown[0], f"choose among {', '.join(_PARTS)}")
    entries = {name: value for name, value in record.items() if value is not None}
    # With shared columns, a row without a workspace has a record of empty fields.
    if columns and not any(entries.values()):
        return None
    # Read the parts. With shared columns, a value or file that is None belongs to another row.
    values, files = (_read_record(row, entries, name) for name in ("values", "files"))
    if columns:
        values = {name: value for name, value in values.items() if value is not None}
    contents = {
        path: _read_file_content(row, path, value, folder) for path, value in files.items() if value is not None
    }
    description = entries.get("told")
    try:
        return Workspace(
            values,
            contents,
            _read_lines(entries.get("lines", ())),
            _read_lines(entries.get("preload", ())),
            None if description is None else str(description),
        )
    except ConfigError as error:
        raise ConfigError(f"{row.location}: {error.thing}", error.value, error.remedy) from error


def _read_record(row: TaskRow, entries: Mapping[str, object], name: str) -> Mapping[str, object]:
    part = entries.get(name, {})
    if not isinstance(part, Mapping):
        raise ConfigError(f"{row.location}: workspace.{name}", _shorten(part), "give a record")
    return part


def _read_lines(value: object) -> tuple[str, ...]:
    """Return the lines of a list of texts, or of a text with several lines."""
    if isinstance(value, str):
        return tuple(value.removesuffix("\n").split("\n"))
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ConfigError("workspace, lines or modules", _shorten(value), "give a list of texts, or one text")
    return tuple(value)


def _read_file_content(row: TaskRow, path: str, value: object, folder: Path | None) -> bytes:
    """Return a file's content: a text, bytes, `{"base64": ...}`, or `{"path": ...}` next to the task file."""
    thing = f"{row.location}: workspace.files[{path!r}]"
    if isinstance(value, str | bytes):
        return value.encode() if isinstance(value, str) else value
    entries = {name: entry for name, entry in value.items() if entry is not None} if isinstance(value, Mapping) else {}
    ((kind, content),) = entries.items() if len(entries) == 1 else ((None, None),)
    if kind == "base64" and isinstance(content, str):
        try:
            return base64.b64decode(content, validate=True)
        except ValueError as error:
            raise ConfigError(thing, content[:_SHOWN_CHARS], f"give base64: {error}") from error
    if kind == "path" and isinstance(content, str):
        return read_from_folder(thing, content, folder)
    raise ConfigError(thing, _shorten(value), 'give a text, {"base64": ...}, or {"path": ...} next to the task file')


def read_from_folder(thing: str, name: str, folder: Path | None) -> bytes:
    """Return the content of a file below the folder of a task file. Messages call it a `thing`.

    Raises:
        ConfigError: there is no folder, the file is not below it or not regular, or it cannot be read.
    """
    if folder is None:
        raise ConfigError(thing, name, "a path needs a task file to start from; give base64")
    try:
        # Links are resolved first, so that none leads out of the folder.
        path = (folder / name).resolve()
        if Path(name).is_absolute() or not path.is_relative_to(folder.resolve()):
            raise ConfigError(thing, name, "give a path below the folder of the task file")
        status = path.stat()
        # Reading a pipe would block.
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(thing, name, "it is not a regular file; give one")
        if status.st_size > MAX_BYTES:
            raise ConfigError(f"{thing}, bytes", status.st_size, f"give at most {MAX_BYTES}")
        return path.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        # A null character is a ValueError, and a loop of links a RuntimeError.
        raise ConfigError(thing, name[:_SHOWN_CHARS], f"it cannot be read: {_describe_error(error)}") from error


def _describe_error(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _shorten(value: object) -> str:
    return repr(value)[:_SHOWN_CHARS]


FieldOptions = Mapping[str, str]
"""Options of the user about the fields of a source, after `?`: field of a task -> its name in the rows."""


def get_field(row: TaskRow, options: FieldOptions, name: str, *fields: str, default: str | None = None) -> str:
    """Return the text of the field that the user named for `name`, or else of the first of `fields` that exists."""
    return row.get_text(get_field_name(row, options, name, *fields), None if name in options else default)


def get_field_name(row: TaskRow, options: FieldOptions, name: str, *fields: str) -> str:
    """Return the name of the field that `get_field` reads."""
    return options.get(name) or next((field for field in fields if row.get_value(field) is not None), fields[0])
