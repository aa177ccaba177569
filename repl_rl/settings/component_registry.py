"""Selection of a component by a setting: from a registry or a table, or imported as user code.

- `Registry` has the kinds that a setting can select. Each kind is a frozen dataclass of its options, so options that it
  does not read cannot be expressed.
- `WorkingFolderFinder` finds user modules in the working folder, which an installed program does not search. The folder
  is not added to `sys.path`: libraries try to import dozens of optional modules, and a file of such a name there would
  run. Only modules that the user named are found, and modules that those import.
- `NameWithOptions` is an entry of a table, or user code as `module:attribute`, with options in parentheses:

        two_stream                          two_stream(line_weight=0.5)
        my_rewards:brevity                  my_samplers:ThinkFirst(depth=2)
"""

import ast
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint, entry_points
from types import FrameType, ModuleType, NoneType, UnionType
from typing import Annotated, ClassVar, Generic, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from repl_rl.deprecations import keeps_old_names, translate_function
from repl_rl.deprecations.old_names import OLD_OPTIONS
from repl_rl.errors import ConfigError, ReplRLError, UserCodeError
from repl_rl.settings.value_bounds import check_value

_log = logging.getLogger(__name__)
T = TypeVar("T")
_OPTION_TYPES: Mapping[object, tuple[type | UnionType, str]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    str: (str, "a text"),
}
"""Annotation of an option -> the Python types that it accepts, and their name in messages."""


class RegistryEntry(Protocol):
    """Entry of a registry. Its fields are its options; a kind without options is chosen by name alone."""

    kind: ClassVar[str]
    """Name of the kind."""
    about: ClassVar[str]
    """Description of a few words, for the help."""


K = TypeVar("K", bound=RegistryEntry)


@keeps_old_names
@dataclass(frozen=True, slots=True, eq=False)
class Registry(Generic[K]):
    """Registry of kinds: built-in ones, and those of installed packages that declare an entry point."""

    name: str
    """Name of the registry in messages."""
    _entries: dict[str, type[K]]
    _unread_groups: list[str] = field(default_factory=list)
    """Groups of entry points, removed when they have been read. An entry point is the class of a kind."""

    @property
    def entries(self) -> dict[str, type[K]]:
        """Kinds by name, in the order of the help: built-in ones first."""
        while self._unread_groups:
            for entry_point in _read_entry_points().select(group=self._unread_groups.pop()):
                try:
                    self.register(entry_point.load())
                # It is code of another package: a broken one must not keep users from the other kinds.
                except Exception as error:
                    message = "%s %r, declared by an installed package as %s, cannot be used: %s: %s"
                    kind = type(error).__name__
                    _log.warning(message, self.name, entry_point.name, entry_point.value, kind, error)
        return self._entries

    def register(self, kind: type[K]) -> None:
        """Register a kind. It then appears in the help and in `repl-rl doctor`.

        Raises:
            ConfigError: its name is in use.
        """
        if kind.kind in self.entries:
            raise ConfigError(f"{self.name} kind", kind.kind, "there is one of that name; choose another")
        self.entries[kind.kind] = kind

    def get(self, name: str) -> type[K]:
        """Return the kind of that name.

        Raises:
            ConfigError: the name is unknown.
        """
        if name not in self.entries:
            raise ConfigError(self.name, name, f"choose one of {', '.join(self.entries)}")
        return self.entries[name]

    def resolve(self, wanted: object) -> K:
        """Return a kind with its options: `wanted` itself, or the kind of that name with default options.

        Raises:
            ConfigError: the kind is unknown.
        """
        if isinstance(wanted, str):
            return self.get(wanted)()
        # An instance of a subclass has the same name but other options, so only the registered class itself is valid.
        kind = self.entries.get(getattr(wanted, "kind", ""))
        if kind is None or not isinstance(wanted, kind) or kind is not type(wanted):
            raise ConfigError(self.name, wanted, f"choose one of {', '.join(self.entries)}")
        return wanted

    def describe(self) -> str:
        """Return the kinds with their descriptions, for the help."""
        return ", ".join(f"{name} ({kind.about})" for name, kind in self.entries.items())

    def get_entries_with_options(self) -> dict[str, type[K]]:
        """Return the kinds that have options, by name."""
        return {name: kind for name, kind in self.entries.items() if has_options(kind)}


class _EntryPoints(Protocol):
    """Entry points of all groups, whose class differs between versions of Python."""

    def select(self, *, group: str) -> Iterable[EntryPoint]: ...


@cache
def _read_entry_points() -> _EntryPoints:
    """Read the entry points of all installed packages, once per process because it takes a tenth of a second."""
    return entry_points()


def has_options(kind: type) -> bool:
    """Return True if the kind has options."""
    return is_dataclass(kind) and bool(fields(kind))


class WorkingFolderFinder(MetaPathFinder):
    """Module finder at the end of `sys.meta_path`, so that installed packages win."""

    def __init__(self) -> None:
        self._named: dict[str, str] = {}
        """Named module -> folder to search."""
        self._found: dict[str, str] = {}
        """Found module -> its folder."""

    def request_module(self, module: str) -> None:
        """Register a module to find in the current working folder."""
        # The working folder may have been removed.
        with suppress(FileNotFoundError):
            self._named[module.partition(".")[0]] = os.getcwd()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a top-level module. Submodules are found through the path of their package."""
        if path is not None:
            return None
        # A module that a found one imports is searched in the same folder.
        folder = self._named.get(fullname) or self._found.get(_find_importing_module())
        spec = PathFinder.find_spec(fullname, [folder], target) if folder is not None else None
        if spec is not None and folder is not None:
            self._found[fullname] = folder
        return spec


def _find_importing_module() -> str:
    """Return the top-level name of the module with the current import statement, or "" without one."""
    # Walk up the stack from the caller of `find_spec`, past the frames of the import system.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if top not in ("importlib", "_frozen_importlib", "_frozen_importlib_external"):
            return top
        frame = frame.f_back
    return ""


_FINDER = WorkingFolderFinder()


def search_working_folder_for(module: str) -> None:
    """Let imports find `module`, and modules that it imports, in the working folder. Installed packages win."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
    _FINDER.request_module(module)


def import_attribute(thing: str, name: str) -> object:
    """Import `module:attribute`. Messages call it a `thing`.

    The module may be in the working folder, which is searched for it and for the modules that it imports.

    Raises:
        ConfigError: the module or the attribute does not exist.
        UserCodeError: the module raised an error during its import.
    """
    module, _, attribute = name.partition(":")
    try:
        search_working_folder_for(module)
        found: object = getattr(importlib.import_module(module), translate_function(module, attribute))
    except (ReplRLError, MemoryError):
        raise
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(thing, name, f"it cannot be imported: {error}; give module:name") from error
    except Exception as error:
        raise UserCodeError(f"{thing} {name}: importing {module!r} raised {error!r}") from error
    return found


def find_or_import(thing: str, name: str, table: Mapping[str, T]) -> T | object:
    """Return the entry `name` of `table`, or import it as `module:attribute`.

    Raises:
        ConfigError: neither exists.
        UserCodeError: see `import_attribute`.
    """
    if name in table:
        return table[name]
    if ":" not in name:
        raise ConfigError(thing, name, f"choose one of {', '.join(table)}, or give module:name")
    return import_attribute(thing, name)


def validate_no_code(thing: str, text: str) -> None:
    """Reject a setting of an untrusted file that names code as `module:attribute`, directly or in an option.

    Raises:
        ConfigError: the setting names code.
    """
    if ":" in text:
        remedy = "importing it runs it; give --trust if you trust that file (trust=True in Python)"
        raise ConfigError(thing, text, remedy)


def component(type: str, **options: bool | int | float | str) -> str:
    """Return a component with options for a setting of Python, such as `component("cispo", clip_high=5.0)`.

    Raises:
        ConfigError: the type has options in parentheses.
    """
    if "(" in type:
        raise ConfigError("component", type, "give its options as keyword arguments")
    return str(NameWithOptions(type, options))


@dataclass(frozen=True, slots=True)
class NameWithOptions:
    """A name with options."""

    name: str
    options: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def parse(cls, thing: str, text: str) -> "NameWithOptions":
        """Parse `name` or `name(option=value, ...)`; values are Python literals.

        Raises:
            ConfigError: the text has another form.
        """
        name, opened, rest = text.strip().partition("(")
        if not opened:
            return cls(name)
        remedy = "write options as name(option=value, ...), each value a number, a string, True, False or None"
        try:
            # The name may hold a colon, which is no Python. Parse the options as a call of `_` instead.
            call = ast.parse(f"_({rest}", mode="eval").body
            if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
                raise ConfigError(thing, text, remedy)
            options = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords if word.arg}
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise ConfigError(thing, text, remedy) from error
        # A double-starred argument has no name, and a repeated option would be lost.
        if len(options) != len(call.keywords):
            raise ConfigError(thing, text, remedy)
        return cls(name, options)

    def __str__(self) -> str:
        """Return the text that `parse` reads as this value."""
        options = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{self.name}({options})" if options else self.name

    def bind_options(self, thing: str, function: Callable[..., T], positional: bool = False) -> Callable[..., T]:
        """Bind these options to `function`, after checking each against the annotation of its keyword.

        An option that is a function is given as `module:function`, and imported.

        Args:
            thing: kind of the named object in messages.
            function: the named class or function.
            positional: parameters that may be passed by position are options too.

        Raises:
            ConfigError: there is no such option, or a value has another type or is out of bounds.
            UserCodeError: see `import_attribute`.
        """
        if not self.options:
            return function
        hints = get_options(function, positional)
        values: dict[str, object] = {}
        for given, value in self.options.items():
            key = translate_option(given, hints)
            validate_option_name(thing, self.name, key, value, tuple(hints))
            values[key] = validate_option_value(f"{key} of {thing} {self.name}", value, hints[key])
        return partial(function, **values)


def get_options(function: Callable[..., object], positional: bool = False) -> Mapping[str, object]:
    """Return the options of a class or function, each with its annotation, or with `object` if it has none."""
    kinds = {inspect.Parameter.KEYWORD_ONLY} | ({inspect.Parameter.POSITIONAL_OR_KEYWORD} if positional else set())
    hints = get_type_hints(_get_annotated_body(function), include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return {each.name: hints.get(each.name, object) for each in parameters if each.kind in kinds}


def _get_annotated_body(function: Callable[..., object]) -> object:
    """Return the object with the annotations: `__init__` of a class, or the function itself."""
    return inspect.getattr_static(function, "__init__") if isinstance(function, type) else function


def translate_option(key: str, known: Collection[str]) -> str:
    """Return the name of an option among the `known` ones, or `key` unchanged if it is no old name of any."""
    return key if key in known else next((new for new in OLD_OPTIONS.get(key, ()) if new in known), key)


def validate_option_name(thing: str, name: str, key: str, value: object, known: Sequence[str]) -> None:
    """Reject an option that `name` does not have.

    Raises:
        ConfigError: the option is unknown; the message lists the known ones.
    """
    if key not in known:
        remedy = f"its options are {', '.join(known)}" if known else "it has no options"
        raise ConfigError(f"option {key} of {thing} {name}", value, remedy)


def validate_option_value(where: str, value: object, hint: object) -> object:
    """Check an option against its annotation and convert it. A function is imported by its name.

    Raises:
        ConfigError: the value has another type, is not one of the choices, or is out of bounds.
        UserCodeError: see `import_attribute`.
    """
    check_value(where, value, hint)
    wanted = strip_annotation(hint)
    if wanted is Callable and isinstance(value, str):
        return import_attribute(where, value)
    if value is None or wanted not in _OPTION_TYPES:
        return value
    kind, told = _OPTION_TYPES[wanted]
    # A bool is an int in Python, but no number in a setting.
    if not isinstance(value, kind) or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(where, value, f"give {told}")
    return float(value) if wanted is float and isinstance(value, int) else value


def strip_annotation(hint: object) -> object:
    """Return a type without bound, `| None` and arguments: `Callable` for `Callable[[int], str] | None`."""
    origin = get_origin(hint)
    if origin is Annotated:
        return strip_annotation(get_args(hint)[0])
    if origin in (Union, UnionType):
        parts = [part for part in get_args(hint) if part is not NoneType]
        return strip_annotation(parts[0]) if len(parts) == 1 else hint
    return hint if origin is None else origin
