"""Parser for the workspace of a task in rows of files and data sets."""

import base64
import stat
from collections.abc import Mapping
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.tasks.rows import Row, as_json
from repl_rl.tasks.texts import check_record
from repl_rl.tasks.workspace import MAX_BYTES, Workspace

FIELD = "workspace"
_PARTS = ("values", "files", "lines", "preload", "told")
_SHOWN_CHARS = 80


def workspace_of(row: Row, folder: Path | None, *, columns: bool) -> Workspace | None:
    """Return the workspace in a row's field `workspace`: a record, or its JSON as text. Return None if it has none.

    Args:
        row: the row.
        folder: folder of the task file, in which each `{"path": ...}` is looked up; None if no such file exists.
        columns: rows share their columns, so a field that is None may belong to other rows only.

    Raises:
        ConfigError: the field is no workspace; the message names the row.
    """
    said = row.value(FIELD)
    # Records in JSON text do not share their keys with other rows.
    if isinstance(said, str):
        said, columns = as_json(said, f"{row.where}: field {FIELD!r}", "write one JSON object"), False
        check_record(row.where, {FIELD: said})
    if said is None:
        return None
    if not isinstance(said, Mapping):
        raise ConfigError(f"{row.where}: field {FIELD!r}", _cut(said), f"give a record of {', '.join(_PARTS)}")
    unknown = sorted(set(said) - set(_PARTS))
    if unknown:
        raise ConfigError(f"{row.where}: field {FIELD!r}, key", unknown[0], f"choose among {', '.join(_PARTS)}")
    given = {name: value for name, value in said.items() if value is not None}
    # With shared columns, a row without a workspace has a record of empty fields.
    if columns and not any(given.values()):
        return None
    values, files = (_record(row, given, name) for name in ("values", "files"))
    if columns:
        values = {name: value for name, value in values.items() if value is not None}
    found = {path: _file(row, path, value, folder) for path, value in files.items() if value is not None}
    told = given.get("told")
    try:
        return Workspace(
            values,
            found,
            _texts(given.get("lines", ())),
            _texts(given.get("preload", ())),
            None if told is None else str(told),
        )
    except ConfigError as error:
        raise ConfigError(f"{row.where}: {error.thing}", error.value, error.remedy) from error


def _record(row: Row, given: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = given.get(name, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{row.where}: workspace.{name}", _cut(found), "give a record")
    return found


def _texts(given: object) -> tuple[str, ...]:
    """Return the lines of a list of texts, or of a text with several lines."""
    if isinstance(given, str):
        return tuple(given.removesuffix("\n").split("\n"))
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise ConfigError("workspace, lines or modules", _cut(given), "give a list of texts, or one text")
    return tuple(given)


def _file(row: Row, path: str, value: object, folder: Path | None) -> bytes:
    """Return a file's content: a text, bytes, `{"base64": ...}`, or `{"path": ...}` next to the task file."""
    what = f"{row.where}: workspace.files[{path!r}]"
    if isinstance(value, str | bytes):
        return value.encode() if isinstance(value, str) else value
    given = {name: each for name, each in value.items() if each is not None} if isinstance(value, Mapping) else {}
    ((kind, content),) = given.items() if len(given) == 1 else ((None, None),)
    if kind == "base64" and isinstance(content, str):
        try:
            return base64.b64decode(content, validate=True)
        except ValueError as error:
            raise ConfigError(what, content[:_SHOWN_CHARS], f"give base64: {error}") from error
    if kind == "path" and isinstance(content, str):
        return _read(what, content, folder)
    raise ConfigError(what, _cut(value), 'give a text, {"base64": ...}, or {"path": ...} beside the task file')


def _read(what: str, name: str, folder: Path | None) -> bytes:
    if folder is None:
        raise ConfigError(what, name, "only a task file has files beside it; give base64")
    try:
        # Links are resolved first, so that none leads out of the folder.
        place = (folder / name).resolve()
        if Path(name).is_absolute() or not place.is_relative_to(folder.resolve()):
            raise ConfigError(what, name, "give a path below the folder of the task file")
        found = place.stat()
        # Reading a pipe would block.
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(what, name, "it is no regular file; give one")
        if found.st_size > MAX_BYTES:
            raise ConfigError(f"{what}, bytes", found.st_size, f"give at most {MAX_BYTES}")
        return place.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        # A null character is a ValueError, and a loop of links a RuntimeError.
        raise ConfigError(what, name[:_SHOWN_CHARS], f"it cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _cut(value: object) -> str:
    return repr(value)[:_SHOWN_CHARS]
