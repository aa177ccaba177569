"""Host functions that lines can call: their description, their limits, and the check of a call.

    def search(query: str, hits: int = 3) -> list[str]:
        '''Find pages.

        Args:
            query: what to look for.
            hits: how many pages.
        '''

    World(host_functions="my_tools:search")

In the console it is a plain function: `search("prime numbers")` waits for the answer of the host. Arguments and answers
are JSON values. A call from a console is untrusted, so the host checks it against the function's signature.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from transformers.utils import get_json_schema

from repl_rl.errors import ConfigError, SetupError
from repl_rl.settings.bounds import Above, AtLeast, check_fields
from repl_rl.settings.named import Named, imported
from repl_rl.tasks import Task

MOST_BYTES = 1 << 20
"""Size limit of a call or an answer, bytes: the largest message of a console's socket."""
HOST_ERROR_CHARS = 500
"""Length limit of an error that a console receives, characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """Limits of the calls of one function."""

    seconds: Annotated[float, Above(0)] = 30.0
    """Wall-clock time of one call on the host, seconds (> 0)."""
    calls: Annotated[int, AtLeast(1)] = 64
    """Calls per rollout (>= 1). A call that names no function does not count here."""
    argument_bytes: Annotated[int, Above(0, at_most=MOST_BYTES)] = 262_144
    """Size of a call as JSON, bytes (1 to 1,048,576)."""
    answer_bytes: Annotated[int, Above(0, at_most=MOST_BYTES)] = 65_536
    """Size of an answer as JSON, bytes (1 to 1,048,576)."""
    at_once: Annotated[int, AtLeast(1)] = 4
    """Concurrent calls per rollout (>= 1); others wait."""
    at_once_in_all: Annotated[int, AtLeast(1)] = 64
    """Concurrent calls over all rollouts (>= 1); others wait."""

    def __post_init__(self) -> None:
        check_fields(self, "limits of a host function")


@dataclass(frozen=True, slots=True)
class HostFunction:
    """Function of the host, under the name that lines use."""

    name: str
    run: Callable[..., object] | None
    """Implementation, plain or async. A plain one runs in a separate thread; an async one must not block.

    A `staged` one is async, takes a `Stage` before its arguments and returns a `Played`. None means that only a record
    names the function, and that it cannot be called.
    """
    signature: str
    """Signature as the policy sees it: `search(query: str, hits: int = 3) -> list[str]`."""
    about: str
    """Description in one line."""
    parameters: Mapping[str, object]
    """JSON schema of its arguments: an object with one property per argument, in positional order."""
    limits: HostLimits = field(default_factory=HostLimits)
    staged: bool = False
    depth: int = 0
    """Rollouts of this depth or deeper are not offered the function; 0 means that all are."""
    model: str = ""
    """Model that it queries in place of the policy, named as in `World.model`; empty means none."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError("name of a host function", self.name, "give it a name that Python takes; use def")

    @property
    def declared(self) -> str:
        """Declaration as the policy sees it."""
        return f"{self.signature}: {self.about}"

    def bound(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Return the arguments of a call by name, checked against the schema.

        Raises:
            TypeError: they do not fit; the message is for the author of the call.
        """
        schemas = _table(self.parameters.get("properties"))
        if len(args) > len(schemas):
            raise TypeError(f"{self.name}() takes at most {len(schemas)} arguments, {len(args)} were given")
        # Bind positional arguments first, then keywords, then check for missing ones and for types.
        given = dict(zip(schemas, args, strict=False))
        for key, value in kwargs.items():
            if key not in schemas:
                raise TypeError(f"{self.name}() has no argument {key!r}; it has {', '.join(schemas)}")
            if key in given:
                raise TypeError(f"{self.name}() got two values for {key!r}")
            given[key] = value
        required = self.parameters.get("required")
        missing = [key for key in (required if isinstance(required, list) else []) if key not in given]
        if missing:
            raise TypeError(f"{self.name}() needs {', '.join(map(str, missing))}")
        for key, value in given.items():
            if not fits(value, _table(schemas[key])):
                raise TypeError(f"{key} of {self.name}() is {_short(value)}; it must be {_kind(_table(schemas[key]))}")
        return given


_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip


def fits(value: object, schema: Mapping[str, object]) -> bool:
    """Return True if a JSON value matches a schema, as far as type hints go: types, unions, items, choices."""
    if value is None and schema.get("nullable") is True:
        return True
    union, choices, kind, items = (schema.get(key) for key in ("anyOf", "enum", "type", "items"))
    if isinstance(union, list):
        return any(fits(value, _table(each)) for each in union)
    if isinstance(choices, list) and value not in choices:
        return False
    kinds = kind if isinstance(kind, list) else [kind]
    if not any(_is(value, each) for each in kinds):
        return False
    return not isinstance(value, list) or items is None or all(fits(each, _table(items)) for each in value)


def _is(value: object, kind: object) -> bool:
    if not isinstance(kind, str) or kind not in _KINDS:
        return True  # the schema leaves the type open
    # A Python bool is also an int, but JSON keeps them apart.
    return isinstance(value, _KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _table(schema: object) -> Mapping[str, object]:
    return schema if isinstance(schema, Mapping) else {}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _kind(schema: Mapping[str, object]) -> str:
    choices = schema.get("enum")
    return f"one of {choices}" if isinstance(choices, list) else f"of type {schema.get('type', 'as documented')}"


def host_function(
    run: Callable[..., object], limits: HostLimits | None = None, name: str | None = None
) -> HostFunction:
    """Describe a function of the user by its type hints and its docstring, which documents each argument.

    Raises:
        ConfigError: the function has no name, an argument has no name, or its hints and docstring give no schema.
    """
    called = name or str(getattr(run, "__name__", ""))
    if not called.isidentifier():
        raise ConfigError("host function", run, "give it a __name__; use def, not lambda")
    try:
        schema = _table(get_json_schema(run)["function"])
        signature = inspect.signature(run)
    except Exception as error:  # transformers has a separate exception for each missing part
        remedy = f"write type hints, and a docstring with an Args section for each argument: {error}"
        raise ConfigError("host function", called, remedy) from error
    usual = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    odd = [p.name for p in signature.parameters.values() if p.kind not in usual]
    if odd:
        raise ConfigError(f"argument of host function {called}", odd[0], "give each argument a name and a default")
    about = str(schema["description"]).strip().partition("\n")[0]
    return HostFunction(
        called, run, f"{called}{signature}", about, _table(schema["parameters"]), limits or HostLimits()
    )


def of_record(name: str) -> HostFunction:
    """Return a function that only a record names. It is offered, because lines may mention it."""
    return HostFunction(name, None, f"{name}(...)", "known from a record alone", {})


def split_names(text: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list; commas within parentheses belong to options."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return tuple(part.strip() for part in parts if part.strip())


def own_function(named: Named) -> HostFunction:
    """Load a function of the user by name; its options are the fields of `HostLimits`.

    Raises:
        ConfigError: the function or a limit does not exist, or the function cannot be described.
        UserCodeError: its module raised.
    """
    thing = imported("host function", named.name)
    if isinstance(thing, HostFunction):
        if named.options:
            raise ConfigError("host function", named.name, "it has limits of its own; give no options")
        return thing
    if not callable(thing):
        raise ConfigError("host function", named.name, "name a function, or a HostFunction")
    return host_function(thing, named.bound("host function", HostLimits)())


def refuse_twins(functions: Sequence[HostFunction]) -> None:
    """Refuse functions that share a name.

    Raises:
        ConfigError: a name is not unique, or it belongs to the console.
    """
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1 or name in ("submit_final_answer", "HostError"):
            raise ConfigError("host function", name, "that name is taken; give each function one of its own")


def refuse_hidden(functions: Sequence[HostFunction], tasks: Iterable[Task]) -> None:
    """Refuse workspaces with a value named like a host function, because one of them would hide the other.

    Raises:
        SetupError: names the first such task and value.
    """
    names = {function.name for function in functions}
    for task in tasks:
        if task.workspace is not None and (both := sorted(names & set(task.workspace.values))):
            remedy = "a host function has that name; give the value another one"
            raise SetupError(f"task {task.id}: workspace value", both[0], remedy)
