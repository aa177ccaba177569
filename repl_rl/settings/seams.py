"""A seam of which a person chooses one side: a table of kinds, each a frozen dataclass of its own options.

Kind and options are one value, so options that a kind does not read cannot be written down.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

from repl_rl.errors import ConfigError


class Kind(Protocol):
    """One side of a seam. Its fields are its options; without options it is chosen by its name alone."""

    kind: ClassVar[str]
    """Its name."""
    about: ClassVar[str]
    """What it is, for the help: a few words."""


K = TypeVar("K", bound=Kind)


@dataclass(frozen=True, slots=True, eq=False)
class Seam(Generic[K]):
    """The kinds that there are."""

    thing: str
    """What messages call the seam."""
    kinds: dict[str, type[K]]
    """By name, in the order in which the help tells them."""

    def add(self, kind: type[K]) -> None:
        """Let one more kind be chosen. It is in the help and in `repl-rl doctor` from then on.

        Raises:
            ConfigError: its name is taken.
        """
        if kind.kind in self.kinds:
            raise ConfigError(f"{self.thing} kind", kind.kind, "there is one of that name; choose another")
        self.kinds[kind.kind] = kind

    def named(self, name: str) -> type[K]:
        """The kind of that name.

        Raises:
            ConfigError: there is none.
        """
        if name not in self.kinds:
            raise ConfigError(self.thing, name, f"choose one of {', '.join(self.kinds)}")
        return self.kinds[name]

    def chosen(self, wanted: object) -> K:
        """A kind with its options: `wanted` itself, or the kind of that name as it is by default.

        Raises:
            ConfigError: there is no such kind.
        """
        if isinstance(wanted, str):
            return self.named(wanted)()
        kind = self.kinds.get(getattr(wanted, "kind", ""))
        if kind is None or not isinstance(wanted, kind) or kind is not type(wanted):
            raise ConfigError(self.thing, wanted, f"choose one of {', '.join(self.kinds)}")
        return wanted

    def described(self) -> str:
        """The kinds in a sentence, for the help."""
        return ", ".join(f"{name} ({kind.about})" for name, kind in self.kinds.items())

    def tables(self) -> dict[str, type[K]]:
        """The kinds that have options."""
        return {name: kind for name, kind in self.kinds.items() if has_options(kind)}


def has_options(kind: type) -> bool:
    """Whether there is anything to choose about a kind."""
    return is_dataclass(kind) and bool(fields(kind))
