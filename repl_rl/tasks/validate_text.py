"""Validation of text from outside: characters, nesting, and Python code."""

import ast
import warnings
from collections.abc import Mapping, Sequence

from repl_rl.errors import ConfigError

MAX_LEVELS = 100
"""Maximum number of levels of lists and records in one another in a row."""
MAX_PYTHON_LEVELS = 200
"""Maximum number of levels of a syntax tree that is printed again. Printing takes about three calls per level."""
_SHOWN_CHARS = 80
_TOO_DEEP = "it is nested too deeply"


class NotPython(ValueError):
    """Text that Python cannot parse. The message is one line."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line
        """Number of the line with the mistake, from 1; None if Python names no line."""


def parse_python(text: str) -> ast.Module:
    """Parse a program. Warnings about it are dropped.

    Raises:
        NotPython: the text is not Python, or is too deep for the parser.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise NotPython(str(error), getattr(error, "lineno", None)) from error
    except (MemoryError, RecursionError) as error:
        # The parser refuses deep nesting with these errors.
        raise NotPython(_TOO_DEEP) from error


def print_python(tree: ast.AST) -> str:
    """Return the code of a syntax tree.

    Raises:
        NotPython: the tree is too deep, or has a number that is too long to print.
    """
    # A bound of levels does not depend on the depth of the caller, as a RecursionError does.
    level: list[ast.AST] = [tree]
    for _ in range(MAX_PYTHON_LEVELS):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            break
    else:
        raise NotPython(_TOO_DEEP)
    try:
        return ast.unparse(tree)
    except (ValueError, RecursionError) as error:
        raise NotPython(str(error)) from error


def validate_utf8(location: str, text: str) -> None:
    """Refuse a text that cannot be written as UTF-8.

    Raises:
        ConfigError: the text contains half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        excerpt = text[max(0, error.start - _SHOWN_CHARS // 2) : error.start + _SHOWN_CHARS // 2]
        remedy = f"character {error.start + 1} is half of a surrogate pair, which is no text; write the pair or drop it"
        raise ConfigError(location, excerpt, remedy) from error


def check_record(location: str, record: Mapping[str, object]) -> None:
    """Refuse a record of a file with a text that is not UTF-8, or with values that are nested too deeply.

    Args:
        location: location of the record, such as `tasks.jsonl:3`.
        record: the record.

    Raises:
        ConfigError: names the location and the field, such as `answer.value` for a field of a nested record.
    """
    _check_value(location, (), record)


def _check_value(location: str, path: tuple[object, ...], value: Mapping[str, object] | Sequence[object]) -> None:
    if len(path) > MAX_LEVELS:
        raise ConfigError(f"{_describe_location(location, path[:1])}, levels", len(path), f"nest at most {MAX_LEVELS}")
    for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value, start=1):
        # A place is written only for a message, since a file may have millions of values.
        if isinstance(key, str) and not _is_utf8(key):
            validate_utf8(f"{_describe_location(location, path)}, key" if path else f"{location}: key", key)
        if isinstance(inner, str):
            if not _is_utf8(inner):
                validate_utf8(_describe_location(location, (*path, key)), inner)
        elif isinstance(inner, dict | list | tuple):
            _check_value(location, (*path, key), inner)


def _is_utf8(text: str) -> bool:
    """Return False for a text with half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _describe_location(location: str, path: tuple[object, ...]) -> str:
    return f"{location}: field {'.'.join(map(str, path))!r}"
