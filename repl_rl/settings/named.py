"""Names in settings: an entry of a table, or user code as `module:attribute`, with options in parentheses.

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
"""Annotation of an option -> the Python types that it accepts, and their name in messages."""


@dataclass(frozen=True, slots=True)
class Named:
    """A name with options."""

    name: str
    options: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def read(cls, thing: str, text: str) -> "Named":
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
        """Return the text that `read` parses to this value."""
        options = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{self.name}({options})" if options else self.name

    def bound(self, thing: str, function: Callable[..., T], positional: bool = False) -> Callable[..., T]:
        """Bind these options to `function`, after checking each against the annotation of its keyword.

        An option that is a function is given as `module:function`, and imported.

        Args:
            thing: kind of the named object in messages.
            function: the named class or function.
            positional: parameters that may be passed by position are options too.

        Raises:
            ConfigError: there is no such option, or a value has another type or is out of bounds.
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
    """Return the options of a class or function, each with its annotation, or with `object` if it has none."""
    kinds = {inspect.Parameter.KEYWORD_ONLY} | ({inspect.Parameter.POSITIONAL_OR_KEYWORD} if positional else set())
    hints = get_type_hints(_body(function), include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return {each.name: hints.get(each.name, object) for each in parameters if each.kind in kinds}


def refuse_other(thing: str, name: str, key: str, value: object, known: Sequence[str]) -> None:
    """Reject an option that `name` does not have.

    Raises:
        ConfigError: the option is unknown; the message lists the known ones.
    """
    if key not in known:
        remedy = f"its options are {', '.join(known)}" if known else "it has no options"
        raise ConfigError(f"option {key} of {thing} {name}", value, remedy)


def typed_option(where: str, value: object, hint: object) -> object:
    """Check an option against its annotation and convert it. A function is imported by its name.

    Raises:
        ConfigError: the value has another type, is not one of the choices, or is out of bounds.
        UserCodeError: as `imported`.
    """
    check(where, value, hint)
    wanted = plain(hint)
    if wanted is Callable and isinstance(value, str):
        return imported(where, value)
    if value is None or wanted not in _KINDS:
        return value
    kind, told = _KINDS[wanted]
    # A bool is an int in Python, but no number in a setting.
    if not isinstance(value, kind) or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(where, value, f"give {told}")
    return float(value) if wanted is float and isinstance(value, int) else value


def plain(hint: object) -> object:
    """Return a type without bound, `| None` and arguments: `Callable` for `Callable[[int], str] | None`."""
    origin = get_origin(hint)
    if origin is Annotated:
        return plain(get_args(hint)[0])
    if origin in (Union, UnionType):
        parts = [part for part in get_args(hint) if part is not NoneType]
        return plain(parts[0]) if len(parts) == 1 else hint
    return hint if origin is None else origin


def _body(function: Callable[..., object]) -> object:
    """Return the object with the annotations: `__init__` of a class, or the function itself."""
    return inspect.getattr_static(function, "__init__") if isinstance(function, type) else function


def refuse_code(thing: str, text: str) -> None:
    """Reject a setting of an untrusted file that names code as `module:attribute`, directly or in an option.

    Raises:
        ConfigError: the setting names code.
    """
    if ":" in text:
        remedy = "importing it runs it; give --trust if you trust that file (trust=True in Python)"
        raise ConfigError(thing, text, remedy)


def imported(thing: str, name: str) -> object:
    """Import `module:attribute`. Messages call it a `thing`.

    The module may be in the working folder, which is searched for it and for the modules that it imports.

    Raises:
        ConfigError: the module or the attribute does not exist.
        UserCodeError: the module raised an error during its import.
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
    """Return the entry `name` of `table`, or import it as `module:attribute`.

    Raises:
        ConfigError: neither exists.
        UserCodeError: as `imported`.
    """
    if name in table:
        return table[name]
    if ":" not in name:
        raise ConfigError(thing, name, f"choose one of {', '.join(table)}, or give module:name")
    return imported(thing, name)
