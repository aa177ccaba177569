"""The schema of a stored trajectory: the fields of its JSON, as this release writes them."""

from typing import NotRequired, TypedDict

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
