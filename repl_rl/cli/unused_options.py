"""Refusal of options that a command does not read in its present mode, such as `sft --fresh --learning.steps 5`."""

from collections.abc import Iterable
from typing import TypeVar

from repl_rl.errors import ConfigError
from repl_rl.settings.argument_parser import ParsedSettings, get_registry, get_typed_fields

T = TypeVar("T")


def refuse_unread(asked: ParsedSettings[T], usual: T, names: Iterable[str], remedy: str) -> None:
    """Reject the first of `names` that the user set.

    A flag is rejected with any value. A key of a file is rejected only with another value than the default, because a
    recorded file has every setting.

    Args:
        asked: the settings from files and flags.
        usual: settings whose `names` have their defaults.
        names: settings that this mode of the command does not read.
        remedy: the reason, and the way to a valid command.

    Raises:
        ConfigError: the user set one of them.
    """
    hints = get_typed_fields(type(asked.config))
    for name in names:
        value = getattr(asked.config, name)
        # The options of a kind, such as `docker.image`, belong to the setting that selects the kind.
        seam = get_registry(hints[name])
        heads = {name, *(seam.get_entries_with_options() if seam is not None else ())}
        for flag in sorted(asked.flags):
            head, *parts = flag.split(".")
            if head in heads:
                raise ConfigError(flag, _get_nested(value, parts), remedy)
        if value != getattr(usual, name):
            raise ConfigError(name, value, remedy)


def _get_nested(value: object, parts: Iterable[str]) -> object:
    """Return the attribute at the path `parts`, or None if it is missing."""
    for part in parts:
        value = getattr(value, part, None)
    return value
