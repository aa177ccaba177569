"""One way to read settings: typed, documented fields; a TOML file, then flags; an unknown key is an error."""

import difflib
import io
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TypeVar, get_type_hints

import tyro

from repl_rl.errors import ConfigError

T = TypeVar("T")
_STYLE = (tyro.conf.EnumChoicesFromValues,)
_RULER = re.compile(r"(?m)^[\s│]*[-─]{8,}[\s│]*$")
"""Between the parts of tyro's complaint, which is in a box or not."""
_HELP = ("Argument helptext", "For full helptext")
"""How the parts begin that repeat the help."""


def parse(kind: type[T], verb: str, argv: Sequence[str]) -> T:
    """Read `kind` from `--config FILE` (TOML; a table is a flag prefix) and flags; flags win.

    Raises:
        ConfigError: the file cannot be read; a key or flag is unknown (names the nearest known one), a value is of the
            wrong type, or one that is needed is not there.
        SystemExit: 0 after `--help`.
    """
    flags, file = _without_config(argv)
    known = set(_names(kind))
    from_file = list(_flatten(_load(file))) if file is not None else []
    for key, _ in from_file:
        _check(f"key in {file}", key, known)
    for flag in flags:
        if flag.startswith("--") and flag != "--help":
            # tyro negates a switch by `no-` before its last part.
            name = re.sub(r"(^|\.)no_(?=[^.]*$)", r"\1", flag[2:].partition("=")[0].replace("-", "_"))
            _check("option", name, known)
    words = [word for key, value in from_file for word in _words(key, value)]
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(kind, prog=f"repl-rl {verb}", args=[*words, *flags], config=_STYLE)
    except SystemExit as end:
        if not end.code:
            raise
    parts = [" ".join(re.sub("[╭╮╰╯│─]+", " ", part).split()) for part in _RULER.split(said.getvalue())]
    reason = " ".join(part for part in parts if part and not part.startswith(_HELP))
    remedy = f"{reason.rstrip('.')}; repl-rl {verb} --help lists the options"
    raise ConfigError("input", " ".join(argv), remedy)


def dump(config: object) -> str:
    """`config` as the TOML that `parse` reads back."""
    scalars, tables = [], []
    assert is_dataclass(config)
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            body = dump(value).replace("\n[", f"\n[{field.name}.")
            tables.append(f"\n[{field.name}]\n{body}")
        elif value is not None:
            scalars.append(f"{field.name} = {_literal(value)}\n")
    return "".join(scalars + tables)


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    # JSON's escapes are TOML's, which wants one more.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _without_config(argv: Sequence[str]) -> tuple[list[str], Path | None]:
    flags = list(argv)
    for i, flag in enumerate(flags):
        if flag == "--config":
            if i + 1 == len(flags):
                raise ConfigError("option", "--config", "name a TOML file after it")
            return [*flags[:i], *flags[i + 2 :]], Path(flags[i + 1])
        if flag.startswith("--config="):
            return [*flags[:i], *flags[i + 1 :]], Path(flag.partition("=")[2])
    return flags, None


def _load(file: Path) -> Mapping[str, object]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError("config file", str(file), f"it cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config file", str(file), f"it is not TOML: {error}") from error


def _flatten(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _words(key: str, value: object) -> list[str]:
    flag = "--" + key.replace("_", "-")
    if isinstance(value, bool):
        head, _, tail = flag[2:].rpartition(".")
        return [flag] if value else [f"--{head}{'.' if head else ''}no-{tail}"]
    return [flag, *map(str, value)] if isinstance(value, list) else [flag, str(value)]


def _names(kind: type, prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _names(hint, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _check(what: str, name: str, known: set[str]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]!r}?" if near else "see --help for the known ones"
    raise ConfigError(f"unknown {what}", name, remedy)
