"""One way to read settings: typed, documented fields; a TOML file, then flags; an unknown key is an error."""

import difflib
import inspect
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


def parse(kind: type[T], verb: str, argv: Sequence[str], presets: Path | None = None) -> T:
    """Read `kind` from `--preset NAME`, `--config FILE` (TOML; a table is a flag prefix) and flags; the later win.

    `presets` is the folder of the presets, NAME.toml each; None: the verb has none.

    Raises:
        ConfigError: a file cannot be read; a preset, key or flag is unknown (names the known ones), a value is of the
            wrong type, or one that is needed is not there.
        SystemExit: 0 after `--help`.
    """
    flags, config = _without(argv, "config", "a TOML file")
    files = [Path(config)] if config is not None else []
    if presets is not None:
        flags, preset = _without(flags, "preset", f"one of {', '.join(_presets(presets))}")
        files = ([_preset(presets, preset)] if preset is not None else []) + files
    known = set(_names(kind))
    from_files = []
    for file in files:
        for key, value in _flatten(_load(file)):
            _check(f"key in {file}", key, known)
            from_files.append((key, value))
    for flag in flags:
        if flag.startswith("--") and flag != "--help":
            # tyro negates a switch by `no-` before its last part.
            name = re.sub(r"(^|\.)no_(?=[^.]*$)", r"\1", flag[2:].partition("=")[0].replace("-", "_"))
            _check("option", name, known)
    words = [word for key, value in from_files for word in _words(key, value)]
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            about = _about(kind, presets)
            return tyro.cli(kind, prog=f"repl-rl {verb}", description=about, args=[*words, *flags], config=_STYLE)
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


def _about(kind: type, presets: Path | None) -> str:
    """What `--help` says before the options."""
    about = f"{inspect.getdoc(kind)}\n--config FILE: settings from a TOML file; options win over it."
    if presets is None:
        return about
    return f"{about}\n--preset NAME: shipped settings, {' or '.join(_presets(presets))}; --config and options win."


def _without(argv: Sequence[str], option: str, what: str) -> tuple[list[str], str | None]:
    """`argv` without `--option VALUE`, and the value."""
    flags = list(argv)
    for i, flag in enumerate(flags):
        if flag == f"--{option}":
            if i + 1 == len(flags):
                raise ConfigError("option", flag, f"name {what} after it")
            return [*flags[:i], *flags[i + 2 :]], flags[i + 1]
        if flag.startswith(f"--{option}="):
            return [*flags[:i], *flags[i + 1 :]], flag.partition("=")[2]
    return flags, None


def _presets(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.toml"))


def _preset(folder: Path, name: str) -> Path:
    known = _presets(folder)
    if name not in known:
        raise ConfigError("preset", name, f"choose {' or '.join(known)}, or give a file of your own as --config FILE")
    return folder / f"{name}.toml"


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
