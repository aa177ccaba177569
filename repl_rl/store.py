"""Trajectories on disk: versioned, compressed JSON lines, one file a step, readable without torch or a tokenizer."""

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

from repl_rl.errors import InvariantError, StoreError
from repl_rl.trajectory import (
    SCHEMA_VERSION,
    Execution,
    Failure,
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


class LineRecord(TypedDict):
    text: str
    token_ids: list[int]
    logprobs: list[float]
    end: str
    execution: tuple[str, float, str | None] | None
    rewards: list[tuple[str, float]]


class SegmentRecord(TypedDict, total=False):
    sampled: list[LineRecord]
    observed: str
    token_ids: list[int]


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
    failure: tuple[str, str] | None


def write_step(folder: Path, step: int, trajectories: Sequence[Trajectory]) -> Path:
    """Write the trajectories of one step as `folder/NNNNNN.jsonl.gz`, all of them or none."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{step:06d}.jsonl.gz"
    torn = path.with_suffix(".tmp")
    with gzip.open(torn, "wt", compresslevel=3, encoding="utf-8") as file:
        for trajectory in trajectories:
            file.write(json.dumps(to_record(trajectory), ensure_ascii=True) + "\n")
    os.replace(torn, path)
    return path


def read(source: Path) -> Iterator[Trajectory]:
    """Trajectories of a step's file, or of all steps of a `trajectories/` folder in order.

    Raises:
        StoreError: the file is missing, torn, or of another schema version; names file and line.
    """
    if not source.exists():
        raise StoreError(f"no trajectories at {str(source)!r}; give a run's trajectories folder or one of its files")
    for path in sorted(source.glob("*.jsonl.gz")) if source.is_dir() else [source]:
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                for number, text in enumerate(file, 1):
                    yield _parse(text, f"{path}, line {number}")
        except (EOFError, OSError) as error:
            raise StoreError(f"{path} is torn or no gzip file ({error}); remove it to read the others") from error


def _parse(text: str, where: str) -> Trajectory:
    try:
        return from_record(json.loads(text))
    except StoreError as error:
        raise StoreError(f"{where}: {error}") from error
    except (KeyError, TypeError, ValueError, InvariantError) as error:
        raise StoreError(f"{where}: not a trajectory: {error!r}") from error


def to_record(trajectory: Trajectory) -> TrajectoryRecord:
    """The JSON form of a trajectory."""
    failure = trajectory.failure
    return TrajectoryRecord(
        schema_version=SCHEMA_VERSION,
        policy_step=trajectory.policy_step,
        id=trajectory.id,
        task_id=trajectory.task_id,
        prompt=(trajectory.prompt.text, list(trajectory.prompt.token_ids)),
        segments=[_segment_record(segment) for segment in trajectory.segments],
        stop=trajectory.stop.value,
        seed=trajectory.seed,
        wall_s=trajectory.wall_s,
        outcome=trajectory.outcome,
        failure=(failure.kind, failure.message) if failure else None,
    )


def from_record(record: TrajectoryRecord) -> Trajectory:
    """The inverse of `to_record`; every invariant is checked again.

    Raises:
        StoreError: the schema version or the policy step is missing or unknown (I10).
    """
    version = record.get("schema_version")
    if version != SCHEMA_VERSION or "policy_step" not in record:
        raise StoreError(
            f"schema_version is {version!r} and policy_step is {record.get('policy_step')!r}; "
            f"this release reads records of version {SCHEMA_VERSION} that name their policy step"
        )
    text, ids = record["prompt"]
    failure = record["failure"]
    return Trajectory(
        id=record["id"],
        task_id=record["task_id"],
        prompt=Prompt(text, tuple(ids)),
        segments=tuple(_segment(segment) for segment in record["segments"]),
        stop=Stop(record["stop"]),
        policy_step=record["policy_step"],
        seed=record["seed"],
        wall_s=record["wall_s"],
        outcome=record["outcome"],
        failure=Failure(*failure) if failure else None,
    )


def _segment_record(segment: Segment) -> SegmentRecord:
    if isinstance(segment, Observed):
        return SegmentRecord(observed=segment.text, token_ids=list(segment.token_ids))
    return SegmentRecord(sampled=[_line_record(line) for line in segment.lines])


def _line_record(line: Line) -> LineRecord:
    run = line.execution
    return LineRecord(
        text=line.text,
        token_ids=list(line.token_ids),
        logprobs=list(line.logprobs),
        end=line.end.value,
        execution=(run.status.value, run.elapsed_s, run.answer) if run else None,
        rewards=[(reward.name, reward.value) for reward in line.rewards],
    )


def _segment(record: SegmentRecord) -> Segment:
    if "sampled" not in record:
        return Observed(record["observed"], tuple(record["token_ids"]))
    return Sampled(tuple(_line(line) for line in record["sampled"]))


def _line(record: LineRecord) -> Line:
    run = record["execution"]
    return Line(
        token_ids=tuple(record["token_ids"]),
        logprobs=tuple(record["logprobs"]),
        text=record["text"],
        end=LineEnd(record["end"]),
        execution=Execution(LineStatus(run[0]), run[1], run[2]) if run else None,
        rewards=tuple(NamedReward(name, value) for name, value in record["rewards"]),
    )
