"""The schema of a stored trajectory: the fields of its JSON, as this release writes them."""

from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import NotRequired, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

SCHEMA_VERSION = 4
"""Version 1 had no credit. Versions 1 and 2 had neither `ran` nor `cut`, and named the class of a failure. Versions 1
to 3 had no `workspace`."""


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
    """As a line's."""


class LineRecord(TypedDict):
    text: str
    token_ids: list[int]
    logprobs: list[float]
    end: str
    execution: tuple[str, float, str | None] | None
    ran: NotRequired[list[str]]
    """What the console was given; there where `execution` is."""
    calls: NotRequired[list[CallRecord]]
    """Calls of host functions; there where it made some."""
    rewards: list[tuple[str, float]]
    alternatives: NotRequired[list[AlternativeRecord]]
    """What else was written at its place; there where a sampler asked for several lines."""
    policy_step: NotRequired[int]
    """Of the policy that wrote it; there where it is not its trajectory's."""


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
    """Its parts; there where it has several, or was not given by one judge."""
    grade: NotRequired[float | None]
    """There where `outcomes` is."""
    failure: tuple[str, str] | None
    credit: list[CreditRecord]
    host_functions: NotRequired[list[str]]
    parent: NotRequired[str]
    children: NotRequired[list["TrajectoryRecord"]]
    """Trajectories that were sampled for host functions, without credit of their own."""
    workspace: str | None
    """Digest of what the console began with; None: it was empty."""


_SCALARS: Mapping[object, frozenset[type]] = {
    str: frozenset({str}),
    bool: frozenset({bool}),
    int: frozenset({int}),
    float: frozenset({int, float}),
    NoneType: frozenset({NoneType}),
}
"""What JSON holds where a field is of that type."""


def check_types(value: object, hint: object, where: str = "record") -> None:
    """Hold JSON to a schema: a stranger's record may have anything in any field. Missing keys are not looked at.

    A tuple, as records have before they are written, is a list.

    Raises:
        TypeError: a value is of another type than its field; names the field.
    """
    kinds = _scalars(hint)
    if kinds is not None:
        if type(value) not in kinds:
            raise TypeError(f"{where} is {value!r:.80}")
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
        if not kinds.issuperset(map(type, value)):  # ids of tokens: thousands
            raise TypeError(f"{where} holds something else: {value!r:.80}")
    else:
        for each in value:
            check_types(each, inner[0], where)


@cache
def _fields(record: type) -> Mapping[str, object]:
    return get_type_hints(record)


@cache
def _scalars(hint: object) -> frozenset[type] | None:
    """The types of JSON of a scalar, or of one that may be None; None: it is no scalar."""
    if get_origin(hint) is UnionType:
        parts = [_scalars(each) for each in get_args(hint)]
        return None if None in parts else frozenset().union(*(part for part in parts if part is not None))
    return _SCALARS.get(hint)
