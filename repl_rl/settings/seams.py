"""Registries from which a setting selects one kind. Each kind is a frozen dataclass of its options.

Kind and options are one value, so options that a kind does not read cannot be expressed.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

from repl_rl.errors import ConfigError


class Kind(Protocol):
    """Entry of a registry. Its fields are its options; a kind without options is chosen by name alone."""

    kind: ClassVar[str]
    """Name of the kind."""
    about: ClassVar[str]
    """Description of a few words, for the help."""


K = TypeVar("K", bound=Kind)


@dataclass(frozen=True, slots=True, eq=False)
class Seam(Generic[K]):
    """Registry of kinds."""

    thing: str
    """Name of the registry in messages."""
    kinds: dict[str, type[K]]
    """Kinds by name, in the order of the help."""

    def add(self, kind: type[K]) -> None:
        """Register a kind. It then appears in the help and in `repl-rl doctor`.

        Raises:
            ConfigError: its name is in use.
        """
        if kind.kind in self.kinds:
            raise ConfigError(f"{self.thing} kind", kind.kind, "there is one of that name; choose another")
        self.kinds[kind.kind] = kind

    def named(self, name: str) -> type[K]:
        """Return the kind of that name.

        Raises:
            ConfigError: the name is unknown.
        """
        if name not in self.kinds:
            raise ConfigError(self.thing, name, f"choose one of {', '.join(self.kinds)}")
        return self.kinds[name]

    def chosen(self, wanted: object) -> K:
        """Return a kind with its options: `wanted` itself, or the kind of that name with default options.

        Raises:
            ConfigError: the kind is unknown.
        """
        if isinstance(wanted, str):
            return self.named(wanted)()
        # An instance of a subclass has the same name but other options, so only the registered class itself is valid.
        kind = self.kinds.get(getattr(wanted, "kind", ""))
        if kind is None or not isinstance(wanted, kind) or kind is not type(wanted):
            raise ConfigError(self.thing, wanted, f"choose one of {', '.join(self.kinds)}")
        return wanted

    def described(self) -> str:
        """Return the kinds with their descriptions, for the help."""
        return ", ".join(f"{name} ({kind.about})" for name, kind in self.kinds.items())

    def tables(self) -> dict[str, type[K]]:
        """Return the kinds that have options, by name."""
        return {name: kind for name, kind in self.kinds.items() if has_options(kind)}


def has_options(kind: type) -> bool:
    """Return True if the kind has options."""
    return is_dataclass(kind) and bool(fields(kind))
