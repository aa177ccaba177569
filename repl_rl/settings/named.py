"""What a person names: an entry of a table, or code of their own as `module:attribute`, with options in parentheses.

two_stream                          two_stream(line_weight=0.5)
my_rewards:brevity                  my_samplers:ThinkFirst(depth=2)
"""

import ast
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, TypeVar, Union, get_args, get_origin, get_type_hints

from repl_rl.errors import ConfigError, ReplRLError, UserCodeError
from repl_rl.settings.bounds import check
from repl_rl.settings.working_folder import look_here_for

T = TypeVar("T")
_KINDS: Mapping[object, tuple[type | UnionType, str]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    str: (str, "a text"),
}
"""What an option of such an annotation may be, and how messages call it."""


@dataclass(frozen=True, slots=True)
class Named:
    """A name with options."""

    name: str
    options: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def read(cls, thing: str, text: str) -> "Named":
        """Read `name` or `name(option=value, ...)`; values are Python literals.

        Raises:
            ConfigError: it is written in another way.
        """
        name, opened, rest = text.strip().partition("(")
        if not opened:
            return cls(name)
        remedy = "write options as name(option=value, ...), each value a number, a string, True, False or None"
        try:
            call = ast.parse(f"_({rest}", mode="eval").body
            if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
                raise ConfigError(thing, text, remedy)
            options = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords if word.arg}
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise ConfigError(thing, text, remedy) from error
        if len(options) != len(call.keywords):
            raise ConfigError(thing, text, remedy)
        return cls(name, options)

    def __str__(self) -> str:
        """As `read` reads it."""
        options = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{self.name}({options})" if options else self.name

    def bound(self, thing: str, function: Callable[..., T], positional: bool = False) -> Callable[..., T]:
        """`function` with these options, each held to the annotation of its keyword.

        An option that is to be a function is given as `module:function`, and imported.

        Args:
            thing: what messages call it.
            function: what is named.
            positional: arguments that may be given by position are options too.

        Raises:
            ConfigError: it has no such option, or a value is of another type or out of bounds.
            UserCodeError: as `imported`.
        """
        if not self.options:
            return function
        hints = options_of(function, positional)
        values: dict[str, object] = {}
        for key, value in self.options.items():
            refuse_other(thing, self.name, key, value, tuple(hints))
            values[key] = typed_option(f"{key} of {thing} {self.name}", value, hints[key])
        return partial(function, **values)


def options_of(function: Callable[..., object], positional: bool = False) -> Mapping[str, object]:
    """The options of a class or function, each with its annotation; `object` where there is none."""
    kinds = {inspect.Parameter.KEYWORD_ONLY} | ({inspect.Parameter.POSITIONAL_OR_KEYWORD} if positional else set())
    hints = get_type_hints(_body(function), include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return {each.name: hints.get(each.name, object) for each in parameters if each.kind in kinds}


def refuse_other(thing: str, name: str, key: str, value: object, known: Sequence[str]) -> None:
    """Refuse an option that `name` does not have.

    Raises:
        ConfigError: it has none of that key; says which it has.
    """
    if key not in known:
        remedy = f"its options are {', '.join(known)}" if known else "it has no options"
        raise ConfigError(f"option {key} of {thing} {name}", value, remedy)


def typed_option(where: str, value: object, hint: object) -> object:
    """`value` as an option of that annotation takes it; one that is to be a function is imported by its name.

    Raises:
        ConfigError: it is of another type, none of the choices, or out of bounds.
        UserCodeError: as `imported`.
    """
    check(where, value, hint)
    wanted = plain(hint)
    if wanted is Callable and isinstance(value, str):
        return imported(where, value)
    if value is None or wanted not in _KINDS:
        return value
    kind, told = _KINDS[wanted]
    if not isinstance(value, kind) or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(where, value, f"give {told}")
    return float(value) if wanted is float and isinstance(value, int) else value


def plain(hint: object) -> object:
    """A type without its bound, beside None, or without its arguments: `Callable` for `Callable[[int], str] | None`."""
    origin = get_origin(hint)
    if origin is Annotated:
        return plain(get_args(hint)[0])
    if origin in (Union, UnionType):
        parts = [part for part in get_args(hint) if part is not NoneType]
        return plain(parts[0]) if len(parts) == 1 else hint
    return hint if origin is None else origin


def _body(function: Callable[..., object]) -> object:
    """What carries the annotations of a class's arguments, or of a function's."""
    return inspect.getattr_static(function, "__init__") if isinstance(function, type) else function


def refuse_code(thing: str, text: str) -> None:
    """Refuse a setting of a stranger's file that names code, as itself or in an option: `module:attribute`.

    Raises:
        ConfigError: it does.
    """
    if ":" in text:
        remedy = "importing it runs it; give --trust if you trust that file (trust=True in Python)"
        raise ConfigError(thing, text, remedy)


def imported(thing: str, name: str) -> object:
    """What `module:attribute` names. `thing` says in messages what it was to be.

    The module may be one of the working folder, which is looked at for it and for what it imports itself.

    Raises:
        ConfigError: there is no such module, or it has no such attribute.
        UserCodeError: the module raised while it was imported.
    """
    module, _, attribute = name.partition(":")
    try:
        look_here_for(module)
        found: object = getattr(importlib.import_module(module), attribute)
    except (ReplRLError, MemoryError):
        raise
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(thing, name, f"it cannot be imported: {error}; give module:name") from error
    except Exception as error:
        raise UserCodeError(f"{thing} {name}: importing {module!r} raised {error!r}") from error
    return found


def found(thing: str, name: str, table: Mapping[str, T]) -> T | object:
    """The entry of `table` called `name`, else what `module:attribute` names.

    Raises:
        ConfigError: there is neither.
        UserCodeError: as `imported`.
    """
    if name in table:
        return table[name]
    if ":" not in name:
        raise ConfigError(thing, name, f"choose one of {', '.join(table)}, or give module:name")
    return imported(thing, name)
