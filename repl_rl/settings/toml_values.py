"""Conversion between TOML values and words of the command line, and open tables.

An open table has free keys. It is given as `--chat-template-kwargs.KEY VALUE`, or as a table of a file.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import get_args, get_origin, get_type_hints

from repl_rl.errors import ConfigError

Scalar = bool | int | float | str
"""Type of a value in an open table."""


def format_toml_value(value: object) -> str:
    """Format a value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(format_toml_value, value))}]"
    # TOML has JSON's escapes, and also requires one for the control character 7F.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_scalar(text: str) -> Scalar:
    """Parse a word: a boolean, number or quoted text as in TOML, else the text unchanged."""
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, bool | int | float | str) else text


def is_open_table(hint: object) -> bool:
    """Return True if the annotation is that of an open table."""
    return get_origin(hint) is Mapping and get_args(hint)[0] is str


def list_open_tables(kind: type) -> tuple[str, ...]:
    """Return the fields of a dataclass that are open tables."""
    hints = get_type_hints(kind)
    return tuple(one.name for one in fields(kind) if is_open_table(hints[one.name]))


def parse_pairs(words: Iterable[str]) -> dict[str, Scalar]:
    """Return the table of the words `KEY=VALUE`; later ones win."""
    return {key: parse_scalar(text) for key, _, text in (word.partition("=") for word in words)}


def collect_table_words(
    known: Sequence[str], flags: Sequence[str], pairs: Iterable[tuple[str, object]]
) -> dict[str, list[str]]:
    """Return the words `KEY=VALUE` per open table: those of files first, then those of flags.

    Args:
        known: names of the open tables.
        flags: `--NAME.KEY` and its value, alternately.
        pairs: `NAME.KEY` and a TOML value, from files.

    Raises:
        ConfigError: a key is no identifier, or a value is neither a boolean, a number nor a text.
    """
    found: dict[str, list[str]] = {name: [] for name in known}
    for dotted, value in pairs:
        if not isinstance(value, bool | int | float | str):
            raise ConfigError(dotted, value, "give true, false, a number or a text")
        name, _, key = dotted.partition(".")
        found[name].append(f"{_format_key(dotted, key)}={format_toml_value(value)}")
    for flag, text in zip(flags[::2], flags[1::2], strict=True):
        name, _, key = flag.removeprefix("--").partition(".")
        name = name.replace("-", "_")
        found[name].append(f"{_format_key(flag, key)}={text}")
    return found


def split_table_flags(known: Sequence[str], flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return `flags` without those of the known tables, and the latter as alternating flags and values.

    Raises:
        ConfigError: a flag of a known table has no value.
    """
    others, mine = list[str](), list[str]()
    left = iter(flags)
    for flag in left:
        if not flag.startswith("--") or not flag[2:].replace("-", "_").startswith(tuple(f"{name}." for name in known)):
            others.append(flag)
            continue
        name, given, value = flag.partition("=")
        text = value if given else next(left, None)
        if text is None:
            raise ConfigError("option", flag, "give its value after it, such as true, 3 or a text")
        mine += [name, text]
    return others, mine


def _format_key(where: str, key: str) -> str:
    name = key.replace("-", "_")
    if not name.isidentifier():
        raise ConfigError("key", where, "name it with letters, digits and underscores")
    return name
