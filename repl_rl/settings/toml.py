"""Settings as TOML: written by `dump`, read as pairs of a dotted key and a value."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.settings.flags import seam_of, typed
from repl_rl.settings.removed import without_removed
from repl_rl.settings.scalars import literal
from repl_rl.settings.seams import has_options

UNRECORDED: Mapping[str, bool] = {"unrecorded": True}
"""Metadata of a field that `dump` leaves out: a permission of one command."""


def load(file: Path) -> Mapping[str, object]:
    """Read a TOML file, without removed settings that hold their neutral value.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
        return without_removed(found)  # raises here where a table is nested too deeply
    except OSError as error:
        raise ConfigError("config file", str(file), f"it cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("config file", str(file), f"it is not TOML: {error}") from error


def flatten(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys and values."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def dump(config: object, table: str = "") -> str:
    """`config` as the TOML that is read back to the same settings; all of it in `table`, if there is a name."""
    scalars, tables = [], []
    assert is_dataclass(config)
    hints = typed(type(config))
    for field in fields(config):
        if field.metadata.get("unrecorded"):
            continue
        name, value = field.name, getattr(config, field.name)
        seam = seam_of(hints[name])
        if seam is not None:
            choice = seam.chosen(value)
            scalars.append(f"{name} = {literal(choice.kind)}\n")
            if not has_options(type(choice)):
                continue
            name, value = choice.kind, choice
        if is_dataclass(value):
            tables.append(dump(value, f"{table}.{name}" if table else name))
        elif isinstance(value, Mapping):
            own = [f"{key} = {literal(one)}\n" for key, one in value.items()]
            tables.append("".join([f"\n[{table}.{name}]\n" if table else f"\n[{name}]\n", *own]) if own else "")
        elif value is not None:
            scalars.append(f"{name} = {literal(value)}\n")
    return "".join([f"\n[{table}]\n" if table else "", *scalars, *tables])
