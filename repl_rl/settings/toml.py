"""Settings as TOML: `dump` writes them, `load` and `flatten` read them as pairs of a dotted key and a value."""

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
"""Metadata of a field that `dump` leaves out, because it permits something to one command only."""


def load(file: Path) -> Mapping[str, object]:
    """Load a TOML file, without removed settings at their neutral values.

    Raises:
        ConfigError: the file cannot be read, or is not TOML.
    """
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
        # This recurses, so a table that is nested too deeply raises RecursionError here.
        return without_removed(found)
    except OSError as error:
        raise ConfigError("config file", str(file), f"it cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("config file", str(file), f"it is not TOML: {error}") from error


def flatten(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted keys and values of a nested table."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def dump(config: object, table: str = "") -> str:
    """Return `config` as TOML that reads back as the same settings, below `table` unless that is empty."""
    # TOML requires the scalars of a table before its subtables, so collect the two apart.
    scalars, tables = [], []
    assert is_dataclass(config)
    hints = typed(type(config))
    for field in fields(config):
        if field.metadata.get("unrecorded"):
            continue
        name, value = field.name, getattr(config, field.name)
        seam = seam_of(hints[name])
        if seam is not None:
            # A chosen kind is written as its name, and as a table of that name if it has options.
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
