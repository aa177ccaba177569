"""Workspace of a task: the content of its console before the first line.

It is built once per task, for all of its rollouts.
"""

import ast
import base64
import hashlib
import json
import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ConfigError
from repl_rl.tasks.validate_text import NotPython, parse_python, validate_utf8

MAX_BYTES = 64 * 1024 * 1024
"""Largest size of a workspace as JSON, with its files in base64, bytes."""
MAX_FILES = 1000
_SHOWN_CHARS = 80
_SHOWN_NAMES = 12
_RESERVED_NAMES = ("submit_final_answer",)
"""Names that the console defines itself."""


@keeps_old_names
@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Initial content of a console. Workspaces of equal content are equal, and have one digest.

    The console first writes the files. Then it imports the modules, binds the values, and runs the lines as one
    program.
    """

    values: Mapping[str, object] = field(default_factory=dict, repr=False)
    """Values by name: any JSON value, with lists and not tuples."""
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """File contents by path in the console's working folder."""
    lines: tuple[str, ...] = ()
    """A program, line by line, without newlines."""
    preload: tuple[str, ...] = ()
    """Modules that are imported in advance, so that a line that imports them costs nothing."""
    told: str | None = None
    """Description of the workspace in the prompt, one line. None generates a list of names, types and sizes; "" leaves
    the description out."""
    content: bytes = field(init=False, repr=False)
    """The whole workspace as JSON, in canonical form."""
    digest: str = field(init=False)
    """SHA-256 of `content`, 64 lowercase hexadecimal digits."""

    def __post_init__(self) -> None:
        if not (self.values or self.files or self.lines or self.preload):
            raise ConfigError("workspace", "empty", "leave it out")
        for name in ("lines", "preload"):
            if not isinstance(getattr(self, name), tuple):
                raise ConfigError(f"workspace.{name}", getattr(self, name), "give a tuple of texts")
        # Check each part.
        for name, value in self.values.items():
            _check_value(name, value)
        _check_files(self.files)
        _check_modules(self.preload)
        _check_lines(self.lines)
        if self.told is not None:
            if "\n" in self.told:
                raise ConfigError("workspace.told", self.told[:_SHOWN_CHARS], "give one line")
            validate_utf8("workspace.told", self.told)
        # Sorted names give equal workspaces equal digests.
        record = {
            "values": {name: self.values[name] for name in sorted(self.values)},
            "files": {path: base64.b64encode(self.files[path]).decode() for path in sorted(self.files)},
            "lines": list(self.lines),
            "preload": list(self.preload),
            "told": self.told,
        }
        content = json.dumps(record, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
        if len(content) > MAX_BYTES:
            raise ConfigError(
                "workspace, bytes",
                len(content),
                f"give at most {MAX_BYTES}; files count in base64, a third more than on disk",
            )
        # The dataclass is frozen.
        object.__setattr__(self, "content", content)
        object.__setattr__(self, "digest", hashlib.sha256(content).hexdigest())

    def __eq__(self, other: object) -> bool:
        return getattr(other, "digest", None) == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @classmethod
    def from_content(cls, content: bytes) -> "Workspace":
        """Parse the `content` of a workspace.

        Raises:
            ConfigError: the content is not that of a workspace.
        """
        try:
            record = json.loads(content)
            files = {path: base64.b64decode(data, validate=True) for path, data in record["files"].items()}
            return cls(record["values"], files, tuple(record["lines"]), tuple(record["preload"]), record["told"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError("workspace", repr(content[:_SHOWN_CHARS]), f"it cannot be read: {error!r}") from error

    def describe(self) -> str:
        """Return the description in the prompt. By default, it lists values, files and modules, with sizes."""
        if self.told is not None:
            return self.told
        values = [f"{name} ({describe_value(value)})" for name, value in sorted(self.values.items())]
        files = [f"{path} ({_format_bytes(len(data))})" for path, data in sorted(self.files.items())]
        # A name that the lines bind again is listed once, as a value.
        defined = [f"{name} (defined)" for name in _find_defined_names(self.lines) if name not in self.values]
        parts = [
            _format_list("names", values + defined),
            _format_list("files", files),
            _format_list("imported", list(self.preload)),
        ]
        return f"In the console already: {'; '.join(part for part in parts if part)}."


def _check_value(name: str, value: object) -> None:
    thing = f"workspace.values[{name!r}]"
    reserved = name in _RESERVED_NAMES or (name.startswith("__") and name.endswith("__"))
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or reserved:
        raise ConfigError("workspace.values, name", name, "give a Python name that is not reserved")
    # The round trip detects values that JSON changes, such as tuples.
    try:
        unchanged = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(thing, _shorten(value), f"give a JSON value: {error}") from error
    if not unchanged:
        raise ConfigError(thing, _shorten(value), "give a JSON value: lists, not tuples, and texts as keys")


def _check_files(files: Mapping[str, bytes]) -> None:
    if len(files) > MAX_FILES:
        raise ConfigError("workspace.files, number", len(files), f"give at most {MAX_FILES}")
    for path, data in files.items():
        _check_path(path)
        if not isinstance(data, bytes):
            raise ConfigError(f"workspace.files[{path!r}]", _shorten(data), "give bytes")
        for parent in list(PurePosixPath(path).parents)[:-1]:
            if str(parent) in files:
                raise ConfigError("workspace.files, path", path, f"{parent} is a file; give it another name")


def _check_path(path: str) -> None:
    """Refuse a path that is not a plain path below the console's working folder."""
    parts = path.split("/")
    if path.startswith("/") or not path.isprintable() or {"", ".", ".."}.intersection(parts):
        raise ConfigError(
            "workspace.files, path", path, "give a path below the console's working folder, such as a/b.csv"
        )
    if any(len(part.encode()) > 255 for part in parts):
        raise ConfigError("workspace.files, path", path[:_SHOWN_CHARS], "give shorter names")


def _check_modules(names: tuple[str, ...]) -> None:
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError("workspace.preload", name, "give names of modules")


def _check_lines(lines: tuple[str, ...]) -> None:
    for line in lines:
        if not isinstance(line, str) or "\n" in line:
            raise ConfigError("workspace.lines", _shorten(line), "give a text without newline for each line")
    try:
        parse_python("\n".join(lines))
    except NotPython as error:
        # Python names no line of a program that is too deep.
        number = error.line or 1
        thing = f"workspace.lines, line {number}" if error.line or len(lines) == 1 else "workspace.lines"
        faulty_line = lines[min(number, len(lines)) - 1]
        raise ConfigError(thing, faulty_line[:_SHOWN_CHARS], f"correct it: {error}") from error


def _find_defined_names(lines: tuple[str, ...]) -> list[str]:
    """Return the names that the lines bind at top level: by assignment, definition or import."""
    defined: dict[str, None] = {}
    for node in parse_python("\n".join(lines)).body:
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.Assign):
            names = [
                n.id
                for target in node.targets
                for n in ast.walk(target)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            ]
        # The prompt does not list private names.
        defined.update(dict.fromkeys(name for name in names if not name.startswith("_") and name.isidentifier()))
    return list(defined)


def describe_value(value: object) -> str:
    """Return the type of a value, and its number of characters or elements."""
    kind = "None" if value is None else type(value).__name__
    return f"{kind} of {len(value):,}" if isinstance(value, str | list | dict) else kind


def _format_bytes(count: int) -> str:
    for unit, size in (("MB", 1_000_000), ("kB", 1000)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def _format_list(label: str, words: list[str]) -> str:
    if len(words) > _SHOWN_NAMES:
        words = [*words[:_SHOWN_NAMES], f"{len(words) - _SHOWN_NAMES} more"]
    return f"{label} {', '.join(words)}" if words else ""


def _shorten(value: object) -> str:
    return repr(value)[:_SHOWN_CHARS]
