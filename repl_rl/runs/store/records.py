"""JSON form of a trajectory and its credit, in the schema of `SCHEMA_VERSION`; older versions can be read."""

import json
import re
from pathlib import Path

from repl_rl.credit.credited import Credited, LineCredit
from repl_rl.errors import InvariantError, StoreError
from repl_rl.record.trajectory import (
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
)
from repl_rl.runs.store.older import upgraded
from repl_rl.runs.store.schema import (
    SCHEMA_VERSION,
    AlternativeRecord,
    CallRecord,
    CreditRecord,
    LineRecord,
    SegmentRecord,
    TrajectoryRecord,
    check_types,
)
from repl_rl.runs.store.workspaces import StoredWorkspace

_DIGEST = re.compile("[0-9a-f]{64}")
READABLE = (1, 2, 3, SCHEMA_VERSION)
"""Schema versions that this release reads. It writes the last one."""


def dump(entry: Credited) -> bytes:
    """Return the entry as one line of ASCII JSON, with its newline."""
    return json.dumps(to_record(entry), ensure_ascii=True, separators=(",", ":")).encode() + b"\n"


def parse(text: bytes, where: str, folder: Path | None = None) -> Credited:
    """Parse a line that `dump` wrote. `where` begins error messages; workspaces are stored in `folder`.

    Raises:
        StoreError: it is not a record, has an unknown version, or breaks an invariant.
    """
    try:
        return from_record(json.loads(text), folder)
    except StoreError as error:
        raise StoreError(f"{where}: {error}") from error
    except (KeyError, TypeError, ValueError, InvariantError, AttributeError, RecursionError) as error:
        raise StoreError(f"{where}: not a trajectory: {error!r}") from error


def to_record(entry: Credited) -> TrajectoryRecord:
    """Return the JSON form of a trajectory and its credit."""
    trajectory = entry.trajectory
    failure = trajectory.failure
    record = TrajectoryRecord(
        schema_version=SCHEMA_VERSION,
        policy_step=trajectory.policy_step,
        id=trajectory.id,
        task_id=trajectory.task_id,
        prompt=(trajectory.prompt.text, list(trajectory.prompt.token_ids)),
        segments=[_segment_record(segment, trajectory.policy_step) for segment in trajectory.segments],
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
        record["children"] = [to_record(Credited(child)) for child in trajectory.children]
    if trajectory.outcomes:
        record["outcomes"] = [(part.name, part.value) for part in trajectory.outcomes]
        record["grade"] = trajectory.grade
    return record


def from_record(record: TrajectoryRecord, folder: Path | None = None) -> Credited:
    """Build a trajectory and its credit from JSON, and check every invariant again. `folder`: see `parse`.

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
    newest = record if version == SCHEMA_VERSION else upgraded(record)
    # The file may come from a stranger: check types before any field is used.
    check_types(newest, TrajectoryRecord)
    credit_L = tuple(LineCredit(c["reward"], c["advantage"], tuple(c["logprobs"])) for c in newest["credit"])
    return Credited(_trajectory(newest, folder), credit_L)


def _trajectory(record: TrajectoryRecord, folder: Path | None) -> Trajectory:
    text, ids = record["prompt"]
    failure, digest = record["failure"], record["workspace"]
    return Trajectory(
        id=record["id"],
        task_id=record["task_id"],
        prompt=Prompt(text, tuple(ids)),
        segments=tuple(_segment(segment, record["policy_step"]) for segment in record["segments"]),
        stop=Stop(record["stop"]),
        policy_step=record["policy_step"],
        seed=record["seed"],
        wall_s=record["wall_s"],
        outcome=record["outcome"],
        failure=Failure(FailureKind(failure[0]), failure[1]) if failure else None,
        host_functions=tuple(record.get("host_functions", ())),
        children=tuple(_trajectory(child, folder) for child in record.get("children", ())),
        parent=record.get("parent", ""),
        outcomes=tuple(NamedReward(name, value) for name, value in record.get("outcomes", ())),
        grade=record.get("grade"),
        workspace=_stored(digest, folder) if digest is not None else None,
    )


def _stored(digest: str, folder: Path | None) -> StoredWorkspace:
    # The digest becomes a file name, so it must not hold a path.
    if not _DIGEST.fullmatch(digest):
        raise StoreError(f"its workspace {digest[:80]!r} is no digest of 64 hexadecimal digits")
    return StoredWorkspace(digest, folder)


def _segment_record(segment: Segment, policy_step: int) -> SegmentRecord:
    if isinstance(segment, Observed):
        return SegmentRecord(observed=segment.text, token_ids=list(segment.token_ids), cut=segment.cut)
    return SegmentRecord(sampled=[_line_record(line, policy_step) for line in segment.lines])


def _line_record(line: Line, policy_step: int) -> LineRecord:
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
            record["calls"] = [_call_record(call) for call in run.calls]
    if line.alternatives:
        record["alternatives"] = [_alternative_record(other, policy_step) for other in line.alternatives]
    # Most lines have the policy step of their trajectory, so only other values are stored.
    if line.policy_step != policy_step:
        record["policy_step"] = line.policy_step
    return record


def _alternative_record(other: Alternative, policy_step: int) -> AlternativeRecord:
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


def _call_record(call: HostCall) -> CallRecord:
    return CallRecord(
        name=call.name,
        arguments=call.arguments,
        answer=call.answer,
        error=call.error,
        elapsed_s=call.elapsed_s,
        child=call.child,
        trained=call.trained,
    )


def _segment(record: SegmentRecord, policy_step: int) -> Segment:
    if "sampled" not in record:
        return Observed(record["observed"], tuple(record["token_ids"]), record["cut"])
    return Sampled(tuple(_line(line, policy_step) for line in record["sampled"]))


def _line(record: LineRecord, policy_step: int) -> Line:
    run = record["execution"]
    calls = tuple(HostCall(**call) for call in record.get("calls", ()))
    return Line(
        token_ids=tuple(record["token_ids"]),
        logprobs=tuple(record["logprobs"]),
        text=record["text"],
        end=LineEnd(record["end"]),
        execution=Execution(LineStatus(run[0]), run[1], run[2], tuple(record["ran"]), calls) if run else None,
        rewards=tuple(NamedReward(name, value) for name, value in record["rewards"]),
        alternatives=tuple(_alternative(other, policy_step) for other in record.get("alternatives", ())),
        policy_step=record.get("policy_step", policy_step),
    )


def _alternative(record: AlternativeRecord, policy_step: int) -> Alternative:
    ids, logprobs, step = tuple(record["token_ids"]), tuple(record["logprobs"]), record.get("policy_step", policy_step)
    return Alternative(ids, logprobs, record["text"], LineEnd(record["end"]), record["advantage"], step)
