"""What a setting may be: written in its type, checked by one function, and told in the help.

max_lines: Annotated[int, AtLeast(1)] = 8
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from repl_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AtLeast:
    """A number that is not below `least`."""

    least: float
    why: str = ""
    """What is told to whoever gives another; "": the bound itself."""

    def admits(self, value: float) -> bool:
        """True for a number within; nan is within nothing."""
        return value >= self.least

    def __str__(self) -> str:
        return f">= {self.least:g}"

    @property
    def remedy(self) -> str:
        """What to give instead."""
        return self.why or f"give at least {self.least:g}"


@dataclass(frozen=True, slots=True)
class Above:
    """A number above `floor`, and at most or below a ceiling where there is one."""

    floor: float
    at_most: float | None = None
    below: float | None = None

    def admits(self, value: float) -> bool:
        """See `AtLeast.admits`."""
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
    """A power of two that is not below `least`."""

    least: int

    def admits(self, value: float) -> bool:
        """See `AtLeast.admits`."""
        return value >= self.least and int(value) & (int(value) - 1) == 0

    def __str__(self) -> str:
        return f"a power of two >= {self.least}"

    @property
    def remedy(self) -> str:
        """See `AtLeast.remedy`."""
        return f"give a power of two, at least {self.least}"


Bound = AtLeast | Above | PowerOfTwo


def bound_of(hint: object) -> Bound | None:
    """The bound that a type carries; None: it has none."""
    if get_origin(hint) is Annotated:
        return next((extra for extra in get_args(hint)[1:] if isinstance(extra, Bound)), None)
    return None


def check(thing: str, value: object, hint: object) -> None:
    """Hold a value to the type that a setting is written with: its choices and its bound.

    Args:
        thing: what messages call it.
        value: None passes: it means that nothing was chosen.
        hint: the annotation, `Annotated` included.

    Raises:
        ConfigError: it is none of the choices, or out of bounds.
    """
    if value is None:
        return
    choices = _choices(hint)
    if choices:
        for one in value if isinstance(value, tuple) else (value,):
            if one not in choices:
                raise ConfigError(thing, one, f"choose one of {', '.join(map(str, choices))}")
    bound = bound_of(hint)
    if bound is None:
        return
    if not isinstance(value, int | float) or not bound.admits(value):
        raise ConfigError(thing, value, bound.remedy)


def check_fields(settings: object, table: str = "") -> None:
    """Hold each field of a dataclass to its type; the first thing in its `__post_init__`.

    Raises:
        ConfigError: a field is none of its choices, or out of bounds; it is named with the `table` before it.
    """
    prefix = f"{table}." if table else ""
    for name, hint in _hints(type(settings)).items():
        check(prefix + name, getattr(settings, name), hint)


def _hints(kind: type) -> Mapping[str, object]:
    return {
        name: hint
        for name, hint in get_type_hints(kind, include_extras=True).items()
        if bound_of(hint) is not None or _choices(hint)
    }


def _choices(hint: object) -> tuple[object, ...]:
    """The values of a `Literal`, which may be in an `Annotated`, a tuple, or beside None."""
    origin = get_origin(hint)
    if origin is Literal:
        return get_args(hint)
    if origin is Annotated:
        return _choices(get_args(hint)[0])
    if origin is tuple and get_args(hint)[1:] == (...,):
        return _choices(get_args(hint)[0])
    if origin in (Union, UnionType):
        parts = [part for part in get_args(hint) if part is not type(None)]
        return _choices(parts[0]) if len(parts) == 1 else ()
    return ()
