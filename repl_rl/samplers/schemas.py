"""JSON schemas of tools: malformed schemas are rejected, and the arguments of a policy are validated.

Supported is the part of JSON Schema that describes a value: `type`, `enum`, `const`, `properties`, `required`, `items`,
`anyOf` and `nullable`. The policy sees the rest of a schema, but it is not validated.
"""

from collections.abc import Mapping, Sequence

from repl_rl.errors import ConfigError

_TOLD: Mapping[str, str] = {
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def check_tool(name: str, schema: Mapping[str, object]) -> None:
    """Reject a schema with which no call can be validated.

    Raises:
        ConfigError: with the tool, the place in its schema, and the expected content.
    """
    function = schema.get("function")
    if schema.get("type") != "function" or not isinstance(function, Mapping) or function.get("name") != name:
        raise ConfigError(f"schema of tool {name}", schema, 'give {"type": "function", "function": {"name": ...}}')
    parameters = function.get("parameters", {"type": "object", "properties": {}})
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        remedy = 'give {"type": "object", "properties": {...}}'
        raise ConfigError(f"schema of tool {name}, parameters", parameters, remedy)
    _check(f"schema of tool {name}, parameters", parameters)


def wrong_argument(schema: Mapping[str, object], arguments: Mapping[str, object]) -> str | None:
    """Return a short description of the first invalid argument, or None if all are valid.

    Args:
        schema: a schema that `check_tool` has accepted.
        arguments: values by name. The function itself rejects unknown and missing names.
    """
    function = schema["function"]
    assert isinstance(function, Mapping)
    properties = function.get("parameters", {}).get("properties", {})
    found = (_wrong(key, value, properties[key]) for key, value in arguments.items() if key in properties)
    return next((each for each in found if each is not None), None)


def _check(where: str, schema: object) -> None:
    if not isinstance(schema, Mapping):
        raise ConfigError(where, schema, "give a JSON schema, an object")
    # Check this level, then the schemas inside it.
    for kind in _kinds(schema.get("type", [])):
        if kind not in _TOLD:
            raise ConfigError(f"{where}, type", kind, f"choose among {', '.join(_TOLD)}")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise ConfigError(f"{where}, properties", properties, "give an object, a schema by each name")
    if not _list(required) or not set(map(str, required)) <= set(properties):
        raise ConfigError(f"{where}, required", required, f"list names of its properties: {', '.join(properties)}")
    for key, value in properties.items():
        _check(f"{where}, {key}", value)
    for word in ("enum", "anyOf"):
        if word in schema and not (_list(schema[word]) and schema[word]):
            raise ConfigError(f"{where}, {word}", schema[word], "give a list, not empty")
    if "items" in schema:
        _check(f"{where}, items", schema["items"])
    for number, value in enumerate(schema.get("anyOf", [])):
        _check(f"{where}, anyOf {number}", value)


def _wrong(where: str, value: object, schema: Mapping[str, object]) -> str | None:
    """Return a short description of an invalid value, or None for a valid one."""
    if value is None and schema.get("nullable") is True:
        return None
    kinds = _kinds(schema.get("type", []))
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"{where} is {value!r:.80}; give {' or '.join(_TOLD[kind] for kind in kinds)}"
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    # Compare types too, because True equals 1 in Python.
    if isinstance(allowed, Sequence) and not any(type(one) is type(value) and one == value for one in allowed):
        return f"{where} is {value!r:.80}; give one of {', '.join(map(repr, allowed))}"
    # One fitting alternative suffices. Otherwise report the error of the first.
    ways = schema.get("anyOf")
    if isinstance(ways, Sequence) and (told := [_wrong(where, value, way) for way in ways]) and None not in told:
        return told[0]
    return _wrong_inside(where, value, schema)


def _wrong_inside(where: str, value: object, schema: Mapping[str, object]) -> str | None:
    parts: list[tuple[str, object, object]] = []
    if isinstance(value, list | tuple) and "items" in schema:
        parts = [(f"{where}[{number}]", each, schema["items"]) for number, each in enumerate(value)]
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(value, Mapping):
        missing = [key for key in (required if isinstance(required, Sequence) else []) if key not in value]
        if missing:
            return f"{where} has no {missing[0]!r}"
        if isinstance(properties, Mapping):
            parts = [(f"{where}.{key}", each, properties[key]) for key, each in value.items() if key in properties]
    found = (_wrong(place, each, inner) for place, each, inner in parts if isinstance(inner, Mapping))
    return next((each for each in found if each is not None), None)


def _is(value: object, kind: str) -> bool:
    # bool is a subclass of int.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "integer":
        # JSON Schema counts 1.0 as an integer.
        return (isinstance(value, int) and number) or (isinstance(value, float) and value.is_integer())
    types: Mapping[str, type | tuple[type, ...]] = {
        "string": str, "boolean": bool, "array": (list, tuple), "object": Mapping, "null": type(None),
    }  # fmt: skip
    return number if kind == "number" else isinstance(value, types[kind])


def _kinds(said: object) -> list[str]:
    """Return the types that a schema names, as a list. A schema may name a single type."""
    return [str(each) for each in said] if _list(said) and isinstance(said, Sequence) else [str(said)]


def _list(value: object) -> bool:
    return isinstance(value, list | tuple)
