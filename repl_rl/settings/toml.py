"""Settings as TOML: `dump` writes them, `load` and `flatten` read them as pairs of a dotted key and a value."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.machine.files import lies_in
from repl_rl.settings.flags import seam_of, typed
from repl_rl.settings.removed import without_removed
from repl_rl.settings.scalars import literal
from repl_rl.settings.seams import has_options
from repl_rl.settings.toml_text import MOST_BYTES, TooLong, parse_toml

UNRECORDED: Mapping[str, bool] = {"unrecorded": True}
"""Metadata of a field that `dump` leaves out, because it permits something to one command only."""


def load(file: Path, *, linked: bool = False) -> Mapping[str, object]:
    """Load a TOML file, without removed settings at their neutral values.

    Args:
        file: the file. That of a run may come from a stranger.
        linked: follow a link that leads out of the file's folder, because the user named the file.

    Raises:
        ConfigError: the file is too large, is a link that is not followed, cannot be read, or is not TOML.
    """
    thing = "config file"
    if not linked and not lies_in(file.parent, file):
        raise ConfigError(thing, str(file), "it is a link that leads out of its folder; put the file there")
    try:
        # A device has no size, so read only one byte more than is permitted.
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(thing, str(file), f"it has more than {MOST_BYTES:,} bytes; give a smaller one")
        # This recurses, so a table that is nested too deeply raises RecursionError here.
        return without_removed(parse_toml(content.decode()))
    except OSError as error:
        raise ConfigError(thing, str(file), f"it cannot be read: {error.strerror}") from error
    except TooLong as error:
        raise ConfigError(thing, str(file), f"it cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(thing, str(file), f"it is not TOML: {error}") from error


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
