"""Functions of the host that lines can call: how one is described, what it may use, and how a call is checked.

    def search(query: str, hits: int = 3) -> list[str]:
        '''Find pages.

        Args:
            query: what to look for.
            hits: how many pages.
        '''

    World(host_functions="my_tools:search")

In the console it is a plain function: `search("prime numbers")` waits for what the host answers. Arguments and answers
are JSON values. What a console asks is untrusted; it is held to the function's own signature here, on the host.
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
"""Of a call or an answer: what a console's socket takes as one message."""
HOST_ERROR_CHARS = 500
"""Of an error that a console is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """What the calls of one function may use."""

    seconds: Annotated[float, Above(0)] = 30.0
    """Wall clock of one call on the host, s (> 0)."""
    calls: Annotated[int, AtLeast(1)] = 64
    """Calls of a rollout (>= 1), refused ones not counted."""
    argument_bytes: Annotated[int, Above(0, at_most=MOST_BYTES)] = 262_144
    """A call as JSON, bytes (1 to 1,048,576)."""
    answer_bytes: Annotated[int, Above(0, at_most=MOST_BYTES)] = 65_536
    """An answer as JSON, bytes (1 to 1,048,576)."""
    at_once: Annotated[int, AtLeast(1)] = 4
    """Calls of one rollout that run at the same time (>= 1); others wait."""
    at_once_in_all: Annotated[int, AtLeast(1)] = 64
    """The same over all rollouts (>= 1)."""

    def __post_init__(self) -> None:
        check_fields(self, "limits of a host function")


@dataclass(frozen=True, slots=True)
class HostFunction:
    """A function of the host under the name by which lines call it."""

    name: str
    run: Callable[..., object] | None
    """Plain or async. A plain one runs in a thread of its own; an async one must not block. A `staged` one is async,
    takes a `Stage` before its arguments and returns a `Played`. None: it is known from a record, and not called."""
    signature: str
    """As the policy is told it: `search(query: str, hits: int = 3) -> list[str]`."""
    about: str
    """What it does, in one line."""
    parameters: Mapping[str, object]
    """JSON schema of its arguments, an object's, in the order of positions."""
    limits: HostLimits = field(default_factory=HostLimits)
    staged: bool = False
    depth: int = 0
    """Rollouts of this depth are offered it no more; 0: all are."""
    model: str = ""
    """The model that it asks in place of the policy, as `World.model` names one; "": none."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError("name of a host function", self.name, "give it a name that Python takes; use def")

    @property
    def declared(self) -> str:
        """What the policy is told of it."""
        return f"{self.signature}: {self.about}"

    def bound(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        """The arguments of a call by name, held to the schema.

        Raises:
            TypeError: they do not fit; the message is for whoever wrote the call.
        """
        schemas = _table(self.parameters.get("properties"))
        if len(args) > len(schemas):
            raise TypeError(f"{self.name}() takes at most {len(schemas)} arguments, {len(args)} were given")
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
    """Whether a JSON value is of a schema, as far as type hints can say: types, unions, items, choices."""
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
        return True  # a schema that leaves the type open
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
    """Describe a function of the user by its type hints and its docstring, which says what each argument is.

    Raises:
        ConfigError: it has no name, or no schema can be made of its hints and docstring.
    """
    called = name or str(getattr(run, "__name__", ""))
    if not called.isidentifier():
        raise ConfigError("host function", run, "give it a __name__; use def, not lambda")
    try:
        schema = _table(get_json_schema(run)["function"])
        signature = inspect.signature(run)
    except Exception as error:  # transformers has exceptions of its own for each thing that is missing
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
    """A function that a record names and nobody has given: it is offered, since lines may mention it."""
    return HostFunction(name, None, f"{name}(...)", "known from a record alone", {})


def split_names(text: str) -> tuple[str, ...]:
    """The names of a list with commas between; commas within parentheses belong to options."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return tuple(part.strip() for part in parts if part.strip())


def own_function(named: Named) -> HostFunction:
    """A function of the user by name; its options are the fields of `HostLimits`.

    Raises:
        ConfigError: there is no such function, or no such limit, or it cannot be described.
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
    """Hold functions to names of their own.

    Raises:
        ConfigError: two share one, or one is the console's.
    """
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1 or name in ("submit_final_answer", "HostError"):
            raise ConfigError("host function", name, "that name is taken; give each function one of its own")


def refuse_hidden(functions: Sequence[HostFunction], tasks: Iterable[Task]) -> None:
    """Refuse workspaces with values that are named as a function of the host: one of them would take the other's place.

    Raises:
        SetupError: names the first such task and name.
    """
    names = {function.name for function in functions}
    for task in tasks:
        if task.workspace is not None and (both := sorted(names & set(task.workspace.values))):
            remedy = "a host function has that name; give the value another one"
            raise SetupError(f"task {task.id}: workspace value", both[0], remedy)
