"""What a person names: an entry of a table, or code of their own as `module:attribute`, with options in parentheses.

two_stream                          two_stream(line_weight=0.5)
my_rewards:brevity                  my_samplers:ThinkFirst(depth=2)
"""

import ast
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, get_type_hints

from repl_rl.errors import ConfigError, ReplRLError, UserCodeError
from repl_rl.settings.bounds import check

T = TypeVar("T")


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

    def bound(self, thing: str, function: Callable[..., T]) -> Callable[..., T]:
        """`function` with these options, each held to the annotation of its keyword.

        Raises:
            ConfigError: it has no such option, or a value is out of bounds.
        """
        if not self.options:
            return function
        accepted = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        hints = get_type_hints(_body(function), include_extras=True)
        for key, value in self.options.items():
            if key not in accepted:
                remedy = f"its options are {', '.join(accepted)}" if accepted else "it has no options"
                raise ConfigError(f"option {key} of {thing} {self.name}", value, remedy)
            check(f"{key} of {thing} {self.name}", value, hints.get(key))
        return partial(function, **self.options)


def _body(function: Callable[..., object]) -> object:
    """What carries the annotations of a class's arguments, or of a function's."""
    return inspect.getattr_static(function, "__init__") if isinstance(function, type) else function


def imported(thing: str, name: str) -> object:
    """What `module:attribute` names. `thing` says in messages what it was to be.

    Raises:
        ConfigError: there is no such module, or it has no such attribute.
        UserCodeError: the module raised while it was imported.
    """
    module, _, attribute = name.partition(":")
    try:
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
