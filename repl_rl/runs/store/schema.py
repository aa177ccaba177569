"""JSON schema of a stored trajectory, as this release writes it."""

from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import NotRequired, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

SCHEMA_VERSION = 4
"""Current schema version.

Version 1 had no credit. Versions 1 and 2 lacked `ran` and `cut`, and stored the class name of a failure. Versions 1 to
3 lacked `workspace`.
"""


class CallRecord(TypedDict):
    name: str
    arguments: str
    answer: str | None
    error: str | None
    elapsed_s: float
    child: str
    trained: bool


class AlternativeRecord(TypedDict):
    text: str
    token_ids: list[int]
    logprobs: list[float]
    end: str
    advantage: float | None
    policy_step: NotRequired[int]
    """As in `LineRecord`."""


class LineRecord(TypedDict):
    text: str
    token_ids: list[int]
    logprobs: list[float]
    end: str
    execution: tuple[str, float, str | None] | None
    ran: NotRequired[list[str]]
    """Lines that the console received; present if `execution` is."""
    calls: NotRequired[list[CallRecord]]
    """Calls of host functions; present if the line made any."""
    rewards: list[tuple[str, float]]
    alternatives: NotRequired[list[AlternativeRecord]]
    """Other lines that were sampled in its place; present if the sampler asked for several."""
    policy_step: NotRequired[int]
    """Policy step of the weights that wrote the line; present if it differs from the trajectory's."""


class SegmentRecord(TypedDict, total=False):
    sampled: list[LineRecord]
    observed: str
    token_ids: list[int]
    cut: bool


class CreditRecord(TypedDict):
    reward: float
    advantage: float
    logprobs: list[float]


class TrajectoryRecord(TypedDict):
    schema_version: int
    policy_step: int
    id: str
    task_id: str
    prompt: tuple[str, list[int]]
    segments: list[SegmentRecord]
    stop: str
    seed: int
    wall_s: float
    outcome: float | None
    outcomes: NotRequired[list[tuple[str, float]]]
    """Parts of the outcome; present if it has several, or if it did not come from one judge."""
    grade: NotRequired[float | None]
    """Present if `outcomes` is."""
    failure: tuple[str, str] | None
    credit: list[CreditRecord]
    host_functions: NotRequired[list[str]]
    parent: NotRequired[str]
    children: NotRequired[list["TrajectoryRecord"]]
    """Trajectories that were sampled for host functions, without their own credit."""
    workspace: str | None
    """Digest of the console's workspace; None means that it was empty."""


_SCALARS: Mapping[object, frozenset[type]] = {
    str: frozenset({str}),
    bool: frozenset({bool}),
    int: frozenset({int}),
    float: frozenset({int, float}),
    NoneType: frozenset({NoneType}),
}
"""JSON types that are allowed for each scalar type of a field."""


def check_types(value: object, hint: object, where: str = "record") -> None:
    """Check JSON against a schema, because a stranger's record may hold anything. Missing keys are not checked.

    A tuple in the schema is a list in JSON; in-memory records still hold tuples.

    Raises:
        TypeError: a value has another type than its field; the message names the field.
    """
    kinds = _scalars(hint)
    if kinds is not None:
        if type(value) not in kinds:
            raise TypeError(f"{where} is {value!r:.80}")
    # An optional field: None, or the other type.
    elif get_origin(hint) is UnionType:
        if value is not None:
            check_types(value, next(each for each in get_args(hint) if each is not NoneType), where)
    elif isinstance(hint, type) and is_typeddict(hint):
        if not isinstance(value, dict):
            raise TypeError(f"{where} is {value!r:.80}")
        for key, field in _fields(hint).items():
            if key in value:
                check_types(value[key], field, f"{where}.{key}")
    else:
        _check_list(value, hint, where)


def _check_list(value: object, hint: object, where: str) -> None:
    inner = get_args(hint)
    if not isinstance(value, list | tuple) or (get_origin(hint) is tuple and len(value) != len(inner)):
        raise TypeError(f"{where} is {value!r:.80}")
    if get_origin(hint) is tuple:
        for each, field in zip(value, inner, strict=True):
            check_types(each, field, where)
    elif (kinds := _scalars(inner[0])) is not None:
        # Compare sets of types, because a list of token ids holds thousands of entries.
        if not kinds.issuperset(map(type, value)):
            raise TypeError(f"{where} holds something else: {value!r:.80}")
    else:
        for each in value:
            check_types(each, inner[0], where)


@cache
def _fields(record: type) -> Mapping[str, object]:
    return get_type_hints(record)


@cache
def _scalars(hint: object) -> frozenset[type] | None:
    """Return the JSON types of a scalar or optional scalar, or None for any other type."""
    if get_origin(hint) is UnionType:
        parts = [_scalars(each) for each in get_args(hint)]
        return None if None in parts else frozenset().union(*(part for part in parts if part is not None))
    return _SCALARS.get(hint)
