"""JSON form of a trajectory and its credit, in the schema of `SCHEMA_VERSION`; older versions can be read.

The typed dictionaries are the schema. A record may come from a stranger, so its types are checked before use.

Records of older versions are upgraded first; missing fields are inferred from their texts. If a line was executed after
a console prompt, the console is assumed to have received it unchanged. For other executed text the console's input is
unknown, so the text cannot be executed again. An observation with a truncation marker counts as truncated.

A record names its workspace by digest. Workspaces are stored next to the trajectories, each once, as
`workspaces/DIGEST.json`.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import NotRequired, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

from repl_rl.credit.credited_trajectory import CreditedTrajectory, LineCredit
from repl_rl.errors import InvariantError, StoreError
from repl_rl.trajectory.console_text import LineBuffer
from repl_rl.trajectory.trajectory import (
    Alternative,
    Execution,
    Failure,
    FailureKind,
    HostCall,
    Line,
    LineEnd,
    LineStatus,
    NamedReward,
    Observed,
    Prompt,
    Sampled,
    Segment,
    Stop,
    Trajectory,
    WorkspaceContent,
)
from repl_rl.utils.atomic_files import is_inside, write_text_atomically

SCHEMA_VERSION = 4
"""Current schema version.

Version 1 had no credit. Versions 1 and 2 lacked `ran` and `cut`, and stored the class name of a failure. Versions 1 to
3 lacked `workspace`.
"""
READABLE = (1, 2, 3, SCHEMA_VERSION)
"""Schema versions that this release reads. It writes the last one."""


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
    """Candidate lines that were sampled at the same position and not chosen; present if there are any."""
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
    """Rewards that add up to the outcome; absent if the outcome is the value of a single judge."""
    grade: NotRequired[float | None]
    """Unweighted value of the task's first judge; present if `outcomes` is present."""
    failure: tuple[str, str] | None
    credit: list[CreditRecord]
    host_functions: NotRequired[list[str]]
    parent: NotRequired[str]
    children: NotRequired[list["TrajectoryRecord"]]
    """Trajectories that were sampled for host functions, without their own credit."""
    workspace: str | None
    """Digest of the console's workspace; None means that it was empty."""


def dump_record(entry: CreditedTrajectory) -> bytes:
    """Return the entry as one line of ASCII JSON, with its newline."""
    return json.dumps(to_record(entry), ensure_ascii=True, separators=(",", ":")).encode() + b"\n"


def parse_record(text: bytes, where: str, folder: Path | None = None) -> CreditedTrajectory:
    """Parse a line that `dump_record` wrote. `where` begins error messages; workspaces are stored in `folder`.

    Raises:
        StoreError: it is not a record, has an unknown version, or breaks an invariant.
    """
    try:
        return from_record(json.loads(text), folder)
    except StoreError as error:
        raise StoreError(f"{where}: {error}") from error
    except (KeyError, TypeError, ValueError, InvariantError, AttributeError, RecursionError) as error:
        raise StoreError(f"{where}: not a trajectory: {error!r}") from error


def to_record(entry: CreditedTrajectory) -> TrajectoryRecord:
    """Return the JSON form of a trajectory and its credit."""
    trajectory = entry.trajectory
    failure = trajectory.failure
    record = TrajectoryRecord(
        schema_version=SCHEMA_VERSION,
        policy_step=trajectory.policy_step,
        id=trajectory.id,
        task_id=trajectory.task_id,
        prompt=(trajectory.prompt.text, list(trajectory.prompt.token_ids)),
        segments=[_build_segment_record(segment, trajectory.policy_step) for segment in trajectory.segments],
        stop=trajectory.stop.value,
        seed=trajectory.seed,
        wall_s=trajectory.wall_s,
        outcome=trajectory.outcome,
        failure=(failure.kind.value, failure.message) if failure else None,
        credit=[
            CreditRecord(reward=c.reward, advantage=c.advantage, logprobs=list(c.logprobs)) for c in entry.credit_L
        ],
        workspace=trajectory.workspace.digest if trajectory.workspace is not None else None,
    )
    # Optional fields are written only if they hold something.
    if trajectory.host_functions:
        record["host_functions"] = list(trajectory.host_functions)
    if trajectory.parent:
        record["parent"] = trajectory.parent
    if trajectory.children:
        record["children"] = [to_record(CreditedTrajectory(child)) for child in trajectory.children]
    if trajectory.outcomes:
        record["outcomes"] = [(part.name, part.value) for part in trajectory.outcomes]
        record["grade"] = trajectory.grade
    return record


def from_record(record: TrajectoryRecord, folder: Path | None = None) -> CreditedTrajectory:
    """Build a trajectory and its credit from JSON, and check every invariant again. `folder`: see `parse_record`.

    Raises:
        StoreError: the schema version or the policy step is missing or unknown (I10).
    """
    version = record.get("schema_version")
    if version not in READABLE or "policy_step" not in record:
        raise StoreError(
            f"schema_version is {version!r} and policy_step is {record.get('policy_step')!r}; "
            f"this release reads records of version {', '.join(map(str, READABLE))} that name their policy step"
        )
    # Old records are upgraded first, so that everything below knows only the current schema.
    newest = record if version == SCHEMA_VERSION else upgrade_record(record)
    # The file may come from a stranger: check types before any field is used.
    validate_types(newest, TrajectoryRecord)
    credit_L = tuple(LineCredit(c["reward"], c["advantage"], tuple(c["logprobs"])) for c in newest["credit"])
    return CreditedTrajectory(_parse_trajectory(newest, folder), credit_L)


def _build_segment_record(segment: Segment, policy_step: int) -> SegmentRecord:
    if isinstance(segment, Observed):
        return SegmentRecord(observed=segment.text, token_ids=list(segment.token_ids), cut=segment.cut)
    return SegmentRecord(sampled=[_build_line_record(line, policy_step) for line in segment.lines])


def _build_line_record(line: Line, policy_step: int) -> LineRecord:
    run = line.execution
    record = LineRecord(
        text=line.text,
        token_ids=list(line.token_ids),
        logprobs=list(line.logprobs),
        end=line.end.value,
        execution=(run.status.value, run.elapsed_s, run.answer) if run else None,
        rewards=[(reward.name, reward.value) for reward in line.rewards],
    )
    if run is not None:
        record["ran"] = list(run.ran)
        if run.calls:
            record["calls"] = [_build_call_record(call) for call in run.calls]
    if line.alternatives:
        record["alternatives"] = [_build_alternative_record(other, policy_step) for other in line.alternatives]
    # Most lines have the policy step of their trajectory, so only other values are stored.
    if line.policy_step != policy_step:
        record["policy_step"] = line.policy_step
    return record


def _build_alternative_record(other: Alternative, policy_step: int) -> AlternativeRecord:
    record = AlternativeRecord(
        text=other.text,
        token_ids=list(other.token_ids),
        logprobs=list(other.logprobs),
        end=other.end.value,
        advantage=other.advantage,
    )
    if other.policy_step != policy_step:
        record["policy_step"] = other.policy_step
    return record


def _build_call_record(call: HostCall) -> CallRecord:
    return CallRecord(
        name=call.name,
        arguments=call.arguments,
        answer=call.answer,
        error=call.error,
        elapsed_s=call.elapsed_s,
        child=call.child,
        trained=call.trained,
    )


def _parse_trajectory(record: TrajectoryRecord, folder: Path | None) -> Trajectory:
    """Build a trajectory and its children from a record of the current version."""
    text, ids = record["prompt"]
    failure, digest = record["failure"], record["workspace"]
    return Trajectory(
        id=record["id"],
        task_id=record["task_id"],
        prompt=Prompt(text, tuple(ids)),
        segments=tuple(_parse_segment(segment, record["policy_step"]) for segment in record["segments"]),
        stop=Stop(record["stop"]),
        policy_step=record["policy_step"],
        seed=record["seed"],
        wall_s=record["wall_s"],
        outcome=record["outcome"],
        failure=Failure(FailureKind(failure[0]), failure[1]) if failure else None,
        host_functions=tuple(record.get("host_functions", ())),
        children=tuple(_parse_trajectory(child, folder) for child in record.get("children", ())),
        parent=record.get("parent", ""),
        outcomes=tuple(NamedReward(name, value) for name, value in record.get("outcomes", ())),
        grade=record.get("grade"),
        workspace=_find_stored_workspace(digest, folder) if digest is not None else None,
    )


def _parse_segment(record: SegmentRecord, policy_step: int) -> Segment:
    if "sampled" not in record:
        return Observed(record["observed"], tuple(record["token_ids"]), record["cut"])
    return Sampled(tuple(_parse_line(line, policy_step) for line in record["sampled"]))


def _parse_line(record: LineRecord, policy_step: int) -> Line:
    run = record["execution"]
    calls = tuple(HostCall(**call) for call in record.get("calls", ()))
    return Line(
        token_ids=tuple(record["token_ids"]),
        logprobs=tuple(record["logprobs"]),
        text=record["text"],
        end=LineEnd(record["end"]),
        execution=Execution(LineStatus(run[0]), run[1], run[2], tuple(record["ran"]), calls) if run else None,
        rewards=tuple(NamedReward(name, value) for name, value in record["rewards"]),
        alternatives=tuple(_parse_alternative(other, policy_step) for other in record.get("alternatives", ())),
        policy_step=record.get("policy_step", policy_step),
    )


def _parse_alternative(record: AlternativeRecord, policy_step: int) -> Alternative:
    ids, logprobs, step = tuple(record["token_ids"]), tuple(record["logprobs"]), record.get("policy_step", policy_step)
    return Alternative(ids, logprobs, record["text"], LineEnd(record["end"]), record["advantage"], step)


_SCALARS: Mapping[object, frozenset[type]] = {
    str: frozenset({str}),
    bool: frozenset({bool}),
    int: frozenset({int}),
    float: frozenset({int, float}),
    NoneType: frozenset({NoneType}),
}
"""JSON types that are allowed for each scalar type of a field."""


def validate_types(value: object, hint: object, where: str = "record") -> None:
    """Check JSON against a schema, because a stranger's record may hold anything. Missing keys are not checked.

    A tuple in the schema is a list in JSON; in-memory records still hold tuples.

    Raises:
        TypeError: a value has another type than its field; the message names the field.
    """
    kinds = _get_scalar_types(hint)
    if kinds is not None:
        if type(value) not in kinds:
            raise TypeError(f"{where} is {value!r:.80}")
    # An optional field: None, or the other type.
    elif get_origin(hint) is UnionType:
        if value is not None:
            validate_types(value, next(option for option in get_args(hint) if option is not NoneType), where)
    elif isinstance(hint, type) and is_typeddict(hint):
        if not isinstance(value, dict):
            raise TypeError(f"{where} is {value!r:.80}")
        for key, field in _get_fields(hint).items():
            if key in value:
                validate_types(value[key], field, f"{where}.{key}")
    else:
        _validate_list(value, hint, where)


def _validate_list(value: object, hint: object, where: str) -> None:
    """Check a list or tuple against its type; see `validate_types`."""
    inner = get_args(hint)
    if not isinstance(value, list | tuple) or (get_origin(hint) is tuple and len(value) != len(inner)):
        raise TypeError(f"{where} is {value!r:.80}")
    if get_origin(hint) is tuple:
        for item, field in zip(value, inner, strict=True):
            validate_types(item, field, where)
    elif (kinds := _get_scalar_types(inner[0])) is not None:
        # Compare sets of types, because a list of token ids holds thousands of entries.
        if not kinds.issuperset(map(type, value)):
            raise TypeError(f"{where} holds something else: {value!r:.80}")
    else:
        for item in value:
            validate_types(item, inner[0], where)


@cache
def _get_fields(record: type) -> Mapping[str, object]:
    return get_type_hints(record)


@cache
def _get_scalar_types(hint: object) -> frozenset[type] | None:
    """Return the JSON types of a scalar or optional scalar, or None for any other type."""
    if get_origin(hint) is UnionType:
        options = [_get_scalar_types(option) for option in get_args(hint)]
        return None if None in options else frozenset().union(*(kinds for kinds in options if kinds is not None))
    return _SCALARS.get(hint)


_PROMPT_END = re.compile(r"(?:>>> |\.\.\. )\Z")
_CUT_MARK = re.compile(
    r"\n\[\.\.\. \d+ (?:(?:tokens|characters) cut|(?:bytes|characters) of output not shown) \.\.\.\]\n"
)
_FAILURE_KINDS = {
    "SandboxFault": FailureKind.SANDBOX_FAULT,
    "UserCodeError": FailureKind.USER_ERROR,
    "ConfigError": FailureKind.PROMPT_TOO_LONG,
}
"""Kinds of failures by the class names that old records hold."""


def upgrade_record(record: TrajectoryRecord) -> TrajectoryRecord:
    """Return a record of an older version in the current schema, as far as its fields can be inferred."""
    newer = record.copy()
    newer["workspace"] = None
    # Version 3 lacks only `workspace`.
    if record["schema_version"] == 3:
        return newer
    newer["segments"] = list(_upgrade_segments(record))
    if record["schema_version"] == 1:
        newer["credit"] = []
    if record["failure"] is not None:
        kind, message = record["failure"]
        newer["failure"] = (_FAILURE_KINDS.get(kind, FailureKind.OTHER).value, message)
    return newer


def _upgrade_segments(record: TrajectoryRecord) -> Iterator[SegmentRecord]:
    """Yield the segments with `cut` and `ran`, which versions 1 and 2 lacked."""
    buffer = LineBuffer()
    previous_text, _ = record["prompt"]
    for segment in record["segments"]:
        if "sampled" not in segment:
            previous_text = segment["observed"]
            yield SegmentRecord(
                observed=previous_text, token_ids=segment["token_ids"], cut=_CUT_MARK.search(previous_text) is not None
            )
            continue
        lines: list[LineRecord] = []
        for line in segment["sampled"]:
            newer = line.copy()
            # Text that follows no console prompt was run by a tool, so the console's input is unknown.
            if line["execution"] is not None:
                newer["ran"] = list(buffer.feed(line["text"])) if _PROMPT_END.search(previous_text) else []
            lines.append(newer)
            # Within a segment, no observation and so no prompt precedes the next line.
            previous_text = ""
        yield SegmentRecord(sampled=lines)


_WORKSPACES = "workspaces"
_MAX_WORKSPACE_BYTES = 256 << 20
"""Maximum size of a workspace file to read, bytes. It is larger than the size limit of a task's workspace."""

_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, eq=False)
class StoredWorkspace:
    """Workspace that a record names. Its content is read on first use; workspaces with equal digests are equal."""

    digest: str
    folder: Path | None
    """Folder of the trajectories; None means that the record is in no folder."""

    @property
    def content(self) -> bytes:
        """Content of the workspace; see `WorkspaceContent.content`.

        Raises:
            StoreError: it is not stored here, or does not match its digest.
        """
        if self.folder is None:
            raise StoreError(
                f"the workspace {self.digest[:12]} was not stored with its trajectory; give the run's folder"
            )
        path = _get_workspace_path(self.folder, self.digest)
        exists = os.path.lexists(path)
        # The folder may come from a stranger: follow no link out of it and read no oversized file.
        if exists and (
            not is_inside(self.folder, path) or not path.is_file() or path.stat().st_size > _MAX_WORKSPACE_BYTES
        ):
            raise StoreError(f"the workspace {path} is no file of its run, or too large; copy it from its run")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise StoreError(f"the workspace {path} cannot be read: {error.strerror}; copy it from its run") from error
        digest = hashlib.sha256(content).hexdigest()
        if digest != self.digest:
            raise StoreError(f"the workspace {path} is damaged: its digest is {digest[:12]}; copy it from its run")
        return content

    def __eq__(self, other: object) -> bool:
        return getattr(other, "digest", None) == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def store_workspace(folder: Path, setup: WorkspaceContent | None) -> None:
    """Store the workspace of a trajectory in `folder`, if it is not stored yet.

    Raises:
        StoreError: `setup` is a `StoredWorkspace`, and its own file cannot be read.
    """
    if setup is not None and not (path := _get_workspace_path(folder, setup.digest)).exists():
        write_text_atomically(path, setup.content.decode())


def _find_stored_workspace(digest: str, folder: Path | None) -> StoredWorkspace:
    # The digest becomes a file name, so it must not hold a path.
    if not _DIGEST.fullmatch(digest):
        raise StoreError(f"its workspace {digest[:80]!r} is no digest of 64 hexadecimal digits")
    return StoredWorkspace(digest, folder)


def _get_workspace_path(folder: Path, digest: str) -> Path:
    return folder / _WORKSPACES / f"{digest}.json"
