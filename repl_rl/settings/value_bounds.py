"""Bounds of settings: written in the annotation, checked by `check_value`, and shown in the help.

max_lines: Annotated[int, AtLeast(1)] = 8
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from repl_rl.errors import ConfigError

LARGEST = 2**32 - 1
"""Largest number of a bounded setting. numpy takes no larger seed, and larger limits overflow in the kernel."""


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Inclusive lower bound."""

    least: float
    message: str = ""
    """Remedy in the error message. "" means a text that names the bound."""

    def accepts(self, value: float) -> bool:
        """Return True if the number is within the bound. nan never is."""
        return value >= self.least

    def __str__(self) -> str:
        return f">= {self.least:g}"

    @property
    def remedy(self) -> str:
        """Remedy in the error message: a valid value."""
        return self.message or f"give at least {self.least:g}"


@dataclass(frozen=True, slots=True)
class Above:
    """Exclusive lower bound `floor`, with an optional upper bound: `at_most` is inclusive, `below` exclusive."""

    floor: float
    at_most: float | None = None
    below: float | None = None

    def accepts(self, value: float) -> bool:
        """See `AtLeast.accepts`."""
        return (
            value > self.floor
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.at_most is not None:
            return f"in ({self.floor:g}, {self.at_most:g}]"
        return f"> {self.floor:g}" if self.below is None else f"in ({self.floor:g}, {self.below:g})"

    @property
    def remedy(self) -> str:
        """See `AtLeast.remedy`."""
        if self.at_most is not None:
            return f"give a number above {self.floor:g} and at most {self.at_most:g}"
        return f"give a number above {self.floor:g}" + ("" if self.below is None else f" and below {self.below:g}")


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """Powers of two that are at least `least`."""

    least: int

    def accepts(self, value: float) -> bool:
        """See `AtLeast.accepts`."""
        # A power of two has one set bit, which subtracting 1 clears.
        return value >= self.least and int(value) & (int(value) - 1) == 0

    def __str__(self) -> str:
        return f"a power of two >= {self.least}"

    @property
    def remedy(self) -> str:
        """See `AtLeast.remedy`."""
        return f"give a power of two, at least {self.least}"


Bound = AtLeast | Above | PowerOfTwo


def get_bound(hint: object) -> Bound | None:
    """Return the bound in an annotation, or None if it has none."""
    if get_origin(hint) is Annotated:
        return next((extra for extra in get_args(hint)[1:] if isinstance(extra, Bound)), None)
    return None


def check_value(thing: str, value: object, hint: object) -> None:
    """Check a value against the annotation of its setting: its choices and its bound.

    Args:
        thing: name of the setting in messages.
        value: None is valid and means that nothing was chosen.
        hint: the annotation, `Annotated` included.

    Raises:
        ConfigError: the value is not one of the choices, out of bounds, or larger than `LARGEST`, as infinity is.
    """
    if value is None:
        return
    choices = _get_choices(hint)
    if choices:
        # A tuple setting is checked item by item.
        for one in value if isinstance(value, tuple) else (value,):
            if one not in choices:
                raise ConfigError(thing, one, f"choose one of {', '.join(map(str, choices))}")
    bound = get_bound(hint)
    if bound is None:
        return
    if not isinstance(value, int | float) or not bound.accepts(value):
        raise ConfigError(thing, value, bound.remedy)
    if value > LARGEST:
        raise ConfigError(thing, value, f"give at most {LARGEST:,}")


def check_fields(settings: object, table: str = "") -> None:
    """Check each field of a dataclass against its annotation. `__post_init__` calls this first.

    Raises:
        ConfigError: a field is not one of its choices, or out of bounds. The message prefixes its name with `table`.
    """
    prefix = f"{table}." if table else ""
    for name, hint in _get_hints(type(settings)).items():
        check_value(prefix + name, getattr(settings, name), hint)


def _get_hints(kind: type) -> Mapping[str, object]:
    return {
        name: hint
        for name, hint in get_type_hints(kind, include_extras=True).items()
        if get_bound(hint) is not None or _get_choices(hint)
    }


def _get_choices(hint: object) -> tuple[object, ...]:
    """Return the values of a `Literal`, which may be inside an `Annotated`, a tuple or a union with None."""
    origin = get_origin(hint)
    if origin is Literal:
        return get_args(hint)
    if origin is Annotated:
        return _get_choices(get_args(hint)[0])
    if origin is tuple and get_args(hint)[1:] == (...,):
        return _get_choices(get_args(hint)[0])
    if origin in (Union, UnionType):
        parts = [part for part in get_args(hint) if part is not type(None)]
        return _get_choices(parts[0]) if len(parts) == 1 else ()
    return ()
