"""Deprecation of public names: an old name works for two more releases, with a `DeprecationWarning`.

    module                        `OldModuleFinder`, by a table of `repl_rl.deprecations.old_names`
    name of a module              `module_getattr`
    members and arguments         `keeps_old_names`, by the tables of `repl_rl.deprecations.old_names`
    attribute or method           `deprecated_members`; `bind_old_methods` for a method that a user wrote,
                                  `bind_protocol_methods` for a method of a protocol
    keyword argument              `deprecated_keywords`
    key of a table of settings    `rename_keys`
    key of a stored row           `read_old_keys`, without a warning

A warning names the old name, the new name and the release that removes the old one. It points at the caller's line.
Type checkers see the new names only.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import signature
from operator import attrgetter
from types import FrameType, ModuleType
from typing import TypeVar, cast

from repl_rl.deprecations.old_names import OLD_FUNCTIONS, OLD_KEYWORDS, OLD_MEMBERS, OLD_MODULES
from repl_rl.errors import ConfigError

V = TypeVar("V")
ClassT = TypeVar("ClassT", bound=type)
CallableT = TypeVar("CallableT", bound=Callable[..., object])

REMOVED_IN = "0.5.0"
"""The release of repl_rl that removes the old names."""
_SKIPPED = frozenset({__name__, "repl_rl", "abc", "dataclasses", "importlib", "importlib._bootstrap", "typing"})
"""Modules whose frames are never the caller: this one, and those that import, create classes or copy dataclasses."""


class OldNameWarning(DeprecationWarning):
    """An old name of repl_rl is in use. Programs show it with `warnings.simplefilter("default", OldNameWarning)`."""


class OldModuleFinder(MetaPathFinder, Loader):
    """Finder of modules by their old paths. It loads the module of the new path, which then has two names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an old path."""
        return ModuleSpec(fullname, self) if fullname in OLD_MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of the new path."""
        _warn(spec.name, OLD_MODULES[spec.name])
        module = import_module(OLD_MODULES[spec.name])
        # The import system replaces the spec of the module that it gets.
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec; the module is already loaded."""
        module.__spec__ = self._spec


def module_getattr(
    module_name: str, old_to_new: Mapping[str, str], fallback: Callable[[str], object] | None = None
) -> Callable[[str], object]:
    """Make the `__getattr__` (PEP 562) of a module that keeps old names::

        globals()["__getattr__"] = module_getattr(__name__, {"Births": "SandboxOptions"})

    A plain assignment works too, but then type checkers accept any name of that module.

    Args:
        module_name: `__name__` of the module.
        old_to_new: the new name of each old one. A dotted new name is imported from its own module.
        fallback: is called with any other name; None raises AttributeError.
    """

    def get(name: str) -> object:
        if name in old_to_new:
            home, _, attribute = old_to_new[name].rpartition(".")
            home = home or module_name
            _warn(f"{module_name}.{name}", f"{home}.{attribute}")
            return getattr(import_module(home), attribute)
        if fallback is not None:
            return fallback(name)
        raise AttributeError(f"module {module_name!r} has no attribute {name!r}")

    return get


def keeps_old_names(cls: ClassT) -> ClassT:
    """Decorate a class whose old members and arguments `old_names` lists. Put it above `@dataclass`."""
    key = f"{cls.__module__}:{cls.__qualname__}"
    if key in OLD_KEYWORDS:
        cls = deprecated_keywords(**OLD_KEYWORDS[key])(cls)
    return deprecated_members(**OLD_MEMBERS[key])(cls) if key in OLD_MEMBERS else cls


def translate_function(module: str, name: str) -> str:
    """Return the new name of a function that settings may name, and warn if `name` is an old one."""
    module = OLD_MODULES.get(module, module)
    new = OLD_FUNCTIONS.get(module, {}).get(name)
    if new is None:
        return name
    _warn(f"{module}:{name}", f"{module}:{new}")
    return new


def deprecated_members(**old_to_new: str) -> Callable[[ClassT], ClassT]:
    """Decorate a class whose attributes or methods have new names::

        @deprecated_members(cut="truncated")
        @dataclass(frozen=True, slots=True)
        class Observed: ...

    Put it above `@dataclass`. An old name reads, calls and sets the new one, in subclasses too.
    A subclass that overrides an old method is warned once, and its method is called under the new name.

    A Protocol gets no old attributes, because `isinstance` would ask every implementation for them.
    Its subclasses are bound; for other implementations call `bind_old_methods`.

    Raises:
        TypeError: the class has a member of that old name.
    """

    def decorate(cls: ClassT) -> ClassT:
        for old, new in old_to_new.items():
            at, member = _find_member(cls, old)
            if at < len(cls.__mro__) and not isinstance(member, _OldMember):
                raise TypeError(f"{cls.__qualname__}.{old} is a member of the class; an alias would hide it")
            if not getattr(cls, "_is_protocol", False):
                setattr(cls, old, _OldMember(cls, old, new))
        _watch_subclasses(cls, old_to_new)
        return cls

    return decorate


def bind_protocol_methods(thing: object, protocol: type) -> None:
    """Bind the old methods of a user's class to the new names of `protocol`. Call it before `isinstance`."""
    key = f"{protocol.__module__}:{protocol.__qualname__}"
    bind_old_methods(type(thing), OLD_MEMBERS.get(key, {}))


def bind_old_methods(cls: type, old_to_new: Mapping[str, str]) -> None:
    """Bind what a user's class overrides under an old name to the new name, and warn once per class and name.

    A class that overrides both names works with old and new releases, so it is left as it is.
    """
    for old, new in old_to_new.items():
        old_at, member = _find_member(cls, old)
        new_at, _ = _find_member(cls, new)
        if old_at < new_at and not isinstance(member, _OldMember):
            name = f"{cls.__module__}.{cls.__qualname__}"
            _warn(f"{old!r}, which {name} defines,", repr(new))
            setattr(cls, new, member)


def deprecated_keywords(**old_to_new: str) -> Callable[[CallableT], CallableT]:
    """Decorate a function, or a class for its constructor, whose keyword arguments have new names.

    A dotted new name such as `settings.seed` is a field of a dataclass argument with a default. Without a dot::

        @deprecated_keywords(overshoot="newline_tokens")
        @dataclass(frozen=True)
        class RolloutConfig: ...

    Put it above `@dataclass`. `dataclasses.replace` takes the old names as well.
    The constructor of a subclass that is a dataclass is generated, so decorate that subclass as well.

    Raises (the decorated one):
        TypeError: an argument has both its old and its new name.
    """

    def decorate(target: CallableT) -> CallableT:
        if not isinstance(target, type):
            return cast(CallableT, _accept_old_keywords(target, target.__qualname__, old_to_new))
        init = cast("Callable[..., object]", _find_member(target, "__init__")[1])
        setattr(target, init.__name__, _accept_old_keywords(init, target.__qualname__, old_to_new))
        return target

    return decorate


def rename_keys(
    mapping: Mapping[str, object],
    table: Mapping[str, str],
    where: str,
    on_rename: Callable[[str, str], None] | None = None,
) -> dict[str, object]:
    """Return settings under their new keys, and warn once per old key.

    Args:
        mapping: nested tables (`{"trainer": {"updates": 2}}`) or dotted keys (`{"trainer.updates": 2}`). The result has
            the same form.
        table: the new key of each old one, both dotted. The key of a table renames all that is in it.
        where: the source of the settings, for messages; such as `config.toml`.
        on_rename: is called with each old key and its new one, in place of the warning.

    Raises:
        ConfigError: a setting is given under its old key and under its new one.
    """
    result: dict[str, object] = {}
    renamed: list[tuple[str, Sequence[str], object]] = []
    for path, value in _iterate_leaves(mapping):
        # The longest old key that fits decides.
        dotted = len(path) == 1 and "." in path[0]
        parts = tuple(path[0].split(".")) if dotted else path
        old = next((old for end in range(len(parts), 0, -1) if (old := ".".join(parts[:end])) in table), None)
        if old is None:
            _insert(result, path, value)
        else:
            new = [*table[old].split("."), *parts[old.count(".") + 1 :]]
            renamed.append((old, [".".join(new)] if dotted else new, value))
    # The renamed keys come last, so that each finds what was given under its new name.
    for old, place, value in renamed:
        if not _insert(result, place, value):
            remedy = f"it is the old name of {table[old]!r}, which is there too; leave {old!r} out"
            raise ConfigError(f"key in {where}", old, remedy)
    for old in dict.fromkeys(old for old, _, _ in renamed):
        if on_rename is None:
            _warn(f"{old!r} in {where}", repr(table[old]))
        else:
            on_rename(old, table[old])
    return result


def read_old_keys(row: Mapping[str, V], table: Mapping[str, str]) -> dict[str, V]:
    """Return a stored row, or a JSON object, under its new keys, without a warning.

    Args:
        row: only its top-level keys are renamed; call this function separately for each nested object.
        table: the new key of each old one. A `*` matches any nonempty text, which replaces the `*` of the new key.

    Where both keys are present, the value of the new one is kept.
    """
    patterns = [(*old.partition("*"), new) for old, new in table.items() if "*" in old]
    result: dict[str, V] = {}
    for key, value in row.items():
        new = table[key] if key in table else _match_pattern(key, patterns)
        if new is None:
            result[key] = value
        elif new not in row:
            result[new] = value
    return result


class _OldMember:
    """An attribute or a method under its old name."""

    def __init__(self, owner: type, old: str, new: str) -> None:
        self._owner, self._old, self._new = owner, old, new
        self.__doc__ = f"Deprecated name of `{new}`; it is removed in repl_rl {REMOVED_IN}."

    def __get__(self, instance: object, owner: type | None = None) -> object:
        cls = type(instance) if owner is None else owner
        receiver = cls if instance is None else instance
        self._warn()
        bases = cls.__mro__[: cls.__mro__.index(self._owner)]
        overrides = [base for base in bases if not isinstance(vars(base).get(self._old, self), _OldMember)]
        if not overrides:
            return attrgetter(self._new)(receiver)
        # An override of the old name calls `super()`. The new name is bound to that override, so look behind it.
        return getattr(super(overrides[-1], receiver), self._new)

    def __set__(self, instance: object, value: object) -> None:
        self._warn()
        setattr(instance, self._new, value)

    def _warn(self) -> None:
        _warn(f"{self._owner.__qualname__}.{self._old}", f"{self._owner.__qualname__}.{self._new}")


def _find_member(cls: type, name: str) -> tuple[int, object]:
    """Return the index in `cls.__mro__` of the class that defines a member, and the member.

    Without such a class, return the length of `cls.__mro__` and None.
    """
    for at, base in enumerate(cls.__mro__):
        if name in vars(base):
            return at, vars(base)[name]
    return len(cls.__mro__), None


def _watch_subclasses(cls: type, old_to_new: Mapping[str, str]) -> None:
    """Bind the old methods of each subclass of `cls` when that subclass is made."""
    own = vars(cls).get("__init_subclass__")

    def __init_subclass__(subclass: type, /, **options: object) -> None:
        inherited = super(cls, subclass)
        if own is None:
            inherited.__init_subclass__(**options)
        else:
            own.__get__(None, subclass)(**options)
        bind_old_methods(subclass, old_to_new)

    setattr(cls, __init_subclass__.__name__, classmethod(__init_subclass__))


def _accept_old_keywords(
    function: Callable[..., object], name: str, old_to_new: Mapping[str, str]
) -> Callable[..., object]:
    @wraps(function)
    def call(*args: object, **keywords: object) -> object:
        if not old_to_new.keys().isdisjoint(keywords):
            # `dataclasses.replace` passes all fields, so there the new name does not come from the caller.
            replaces = sys._getframe(1).f_globals.get("__name__") == "dataclasses"
            for old, new in [pair for pair in old_to_new.items() if pair[0] in keywords]:
                if new in keywords and not replaces:
                    raise TypeError(f"{name}() got {old!r} and {new!r}, which is its new name; leave {old!r} out")
                _warn(f"the argument {old!r} of {name}()", repr(new))
                argument, _, field = new.partition(".")
                value = keywords.pop(old)
                keywords[argument] = _set_field(function, keywords, argument, field, value) if field else value
        return function(*args, **keywords)

    return call


def _set_field(
    function: Callable[..., object], keywords: Mapping[str, object], argument: str, field: str, value: object
) -> object:
    """Return an argument, given or by default, with one field changed."""
    settings = keywords.get(argument, signature(function).parameters[argument].default)
    assert is_dataclass(settings)
    assert not isinstance(settings, type)
    return replace(settings, **{field: value})


def _iterate_leaves(
    mapping: Mapping[str, object], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield each value that is no table, or an empty one, with the keys that lead to it."""
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from _iterate_leaves(value, (*path, key))
        else:
            yield (*path, key), {} if isinstance(value, Mapping) else value


def _insert(tables: dict[str, object], path: Sequence[str], value: object) -> bool:
    """Put a value into nested tables. Return False if another value is at that place."""
    *heads, last = path
    for head in heads:
        inner = tables.setdefault(head, {})
        if not isinstance(inner, dict):
            return False
        tables = inner
    if last in tables:
        return False
    tables[last] = value
    return True


def _match_pattern(key: str, patterns: Sequence[tuple[str, str, str, str]]) -> str | None:
    """Return the new key by the first pattern (text before the `*`, the `*`, text behind it, new key) that fits."""
    for before, _, behind, new in patterns:
        if key.startswith(before) and key.endswith(behind) and len(key) > len(before) + len(behind):
            return new.replace("*", key[len(before) : len(key) - len(behind)])
    return None


def _warn(old: str, new: str) -> None:
    """Warn at the first line outside of `_SKIPPED`."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and (name := frame.f_globals.get("__name__")) in _SKIPPED:
        # `warnings` does not count frames of the import system.
        level += name != "importlib._bootstrap"
        frame = frame.f_back
    message = f"{old} is deprecated and is removed in repl_rl {REMOVED_IN}; use {new}"
    warnings.warn(message, OldNameWarning, stacklevel=level)
