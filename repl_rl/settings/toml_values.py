"""Conversion between TOML values and words of the command line, and open tables.

An open table has free keys. It is given as `--chat-template-kwargs.KEY VALUE`, or as a table of a file.
"""

import json
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
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


def list_open_tables(kind: type, prefix: str = "") -> dict[str, object]:
    """Return the annotations of a dataclass's open tables, and of those in its tables, by dotted name."""
    hints, found = get_type_hints(kind), dict[str, object]()
    assert is_dataclass(kind)
    for one in fields(kind):
        hint = hints[one.name]
        if is_open_table(hint):
            found[prefix + one.name] = hint
        elif isinstance(hint, type) and is_dataclass(hint):
            found |= list_open_tables(hint, f"{prefix}{one.name}.")
    return found


def parse_pairs(words: Iterable[str]) -> dict[str, Scalar]:
    """Return the table of the words `KEY=VALUE`; later ones win."""
    return {key: parse_scalar(text) for key, _, text in (word.partition("=") for word in words)}


def collect_table_words(
    known: Mapping[str, object],
    flags: Sequence[str],
    pairs: Iterable[tuple[str, object]],
    bare: Mapping[str, Sequence[str]],
) -> dict[str, list[str]]:
    """Return the words `KEY=VALUE` per open table: from files or, if given, from `bare`, then from flags.

    Args:
        known: annotations of the open tables by dotted name.
        flags: `--NAME.KEY` and its value, alternately.
        pairs: `NAME.KEY` and a TOML value, from files.
        bare: the words after `--NAME` per table.

    Raises:
        ConfigError: a key is not a name, or a value is neither a boolean, a number nor a text.
    """
    found: dict[str, list[str]] = {name: [] for name in known}
    for dotted, value in pairs:
        if not isinstance(value, Scalar):
            raise ConfigError(dotted, value, "give true, false, a number or a text")
        name, key = _split_owner(dotted, known)
        found[name].append(f"{_format_key(dotted, key, known[name])}={format_toml_value(value)}")
    found |= {name: [*words] for name, words in bare.items()}
    for flag, text in zip(flags[::2], flags[1::2], strict=True):
        name, key = _split_owner(flag.removeprefix("--").replace("-", "_"), known)
        found[name].append(f"{_format_key(flag, key, known[name])}={text}")
    return found


def _split_owner(dotted: str, known: Collection[str]) -> tuple[str, str]:
    """Return the open table of a dotted key, and the key in it, which is "" for the table itself."""
    owner = next(name for name in known if dotted == name or dotted.startswith(f"{name}."))
    return owner, dotted[len(owner) + 1 :]


def pop_table_words(known: Collection[str], flags: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return `flags` without `--NAME WORD ...` of the known tables, and the words per table. The last flag wins.

    Raises:
        ConfigError: a flag of a known table has no word.
    """
    others, found = list[str](), dict[str, list[str]]()
    current: list[str] | None = None
    for flag in flags:
        option, given, value = flag.partition("=")
        if flag.startswith("--"):
            name = option[2:].replace("-", "_")
            current = found.setdefault(name, []) if name in known else None
            if current is None:
                others.append(flag)
            else:
                current[:] = [value] if given else []
        elif current is not None:
            current.append(flag)
        else:
            others.append(flag)
    for name, words in found.items():
        if not words:
            raise ConfigError("option", f"--{name.replace('_', '-')}", "give a name after it")
    return others, found


def split_table_flags(known: Collection[str], flags: Sequence[str]) -> tuple[list[str], list[str]]:
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


def format_toml_key(key: str) -> str:
    """Format a key as TOML, quoted if it must be."""
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else format_toml_value(key)


def _format_key(where: str, key: str, hint: object) -> str:
    """Return a key with underscores for hyphens. In a table of functions, `module:function.option` is valid, too."""
    name = key.replace("-", "_")
    form = r"[^\W\d]\w*" if hint == Mapping[str, Scalar] else r"[\w.]+(:\w+(\.\w+)?)?"
    if not re.fullmatch(form, name):
        raise ConfigError("key", where, "name it with letters, digits and underscores")
    return name
