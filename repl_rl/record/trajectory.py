"""Data types of a rollout's record, with their invariants. Some come from `repl_rl.record.line` and `.failure`.

A `Trajectory` is a prompt followed by alternating segments. A `Sampled` segment consists of lines, which own the
sampled tokens. An `Observed` segment is text that the console printed. It has no log probability, so none can be wrong.
The loss mask follows from these types and is stored nowhere.

Suffixes name shapes: `_T` has one entry per completion token, `_L` one per line, `_G` one per rollout. The invariants
I1 to I17 are listed in docs/specification.md.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from repl_rl.errors import InvariantError
from repl_rl.record.failure import Failure, FailureKind
from repl_rl.record.line import (
    Alternative,
    Execution,
    HostCall,
    Line,
    LineEnd,
    LineStatus,
    NamedReward,
    refuse,
    refuse_unless_duration,
    refuse_unless_ids,
    refuse_unless_step,
    refuse_unless_sum,
    refuse_unless_tuple,
)  # fmt: skip
from repl_rl.record.setup import Setup

__all__ = [
    "Alternative", "Execution", "Failure", "FailureKind", "HostCall", "Line", "LineEnd", "LineStatus", 
    "NamedReward", "Observed", "Prompt", "Sampled", "Segment", "Stop", "Trajectory", "spread",
]  # fmt: skip


class Stop(StrEnum):
    """Reason for the end of a rollout."""

    ANSWERED = "answered"
    EOS = "eos"
    FINISHED = "finished"
    """The sampler called `episode.finish()`."""
    MAX_LINES = "max_lines"
    MAX_TOKENS = "max_tokens"
    LINE_TOO_LONG = "line_too_long"
    EXITED = "exited"
    """The console ended: `exit()`, or a limit that ends the rollout."""
    DOOMED = "doomed"
    """Early stopping: the sampler no longer expected success."""
    WALL_CLOCK = "wall_clock"
    FAULT = "fault"
    """Dropped: see `Trajectory.failure`."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A run of tokens that the policy sampled, partitioned into lines."""

    lines: tuple[Line, ...]

    def __post_init__(self) -> None:
        refuse_unless_tuple("Sampled.lines", self.lines)
        if not self.lines:
            refuse("Sampled.lines", self.lines, "a sampled segment has at least one line")
        for line in self.lines[:-1]:
            if line.end is LineEnd.LENGTH:
                refuse("Sampled.lines", line.text, "a line cut by a budget can only be the last one")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of its lines, in order."""
        return tuple(token for line in self.lines for token in line.token_ids)


@dataclass(frozen=True, slots=True)
class Observed:
    """Text inserted into the sequence: console output and prompts. It is masked, never trained, and may be empty."""

    text: str
    token_ids: tuple[int, ...]
    cut: bool = False
    """True if a visible marker replaces its middle, because an observation or a console's output was too long."""

    def __post_init__(self) -> None:
        refuse_unless_ids("Observed.token_ids", self.token_ids)
        if not self.token_ids and (self.text or self.cut):
            refuse("Observed.token_ids", self.token_ids, f"text without tokens is never shown: {self.text[:40]!r}")


Segment = Sampled | Observed


@dataclass(frozen=True, slots=True)
class Prompt:
    """Start of a rollout. Its ids are sent, and its text is shown."""

    text: str
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        refuse_unless_ids("Prompt.token_ids", self.token_ids)
        if not self.token_ids:
            refuse("Prompt.token_ids", self.token_ids, "a prompt has at least one token")

    @property
    def key(self) -> str:
        """Short name, equal for equal ids. Groups compare it, also across processes."""
        return hashlib.blake2b(repr(self.token_ids).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Trajectory:
    """The record of one rollout. It is frozen, so each derived value is computed once."""

    id: str
    task_id: str
    prompt: Prompt
    segments: tuple[Segment, ...]
    """Sampled and observed segments, alternately."""
    stop: Stop
    policy_step: int
    """Optimizer steps behind the policy that learns from the rollout, or is evaluated; 0 is the starting policy. Each
    line names the one that wrote it."""
    seed: int
    """Seed of its draws, if the engine seeds sessions."""
    wall_s: float
    """Wall clock time, seconds."""
    outcome: float | None = None
    """Outcome reward, on the scale on which it was given. None means not graded."""
    failure: Failure | None = None
    """Failure that dropped the rollout. It is set exactly when `stop` is `fault`."""
    host_functions: tuple[str, ...] = ()
    """Host functions that its lines could call."""
    children: tuple["Trajectory", ...] = ()
    """Trajectories that were sampled for its calls of host functions: queries of a model, and nested rollouts."""
    parent: str = ""
    """Id of the trajectory whose call this one was sampled for; "" for an independent rollout."""
    outcomes: tuple[NamedReward, ...] = ()
    """Parts of the outcome by source: judges, the sampler. () means that it is a single judge's value."""
    grade: float | None = None
    """Unweighted value of the task's first judge, next to an outcome of several parts. None means that the judge did
    not run."""
    workspace: Setup | None = None
    """Initial content of its console. None means an empty console."""

    def __post_init__(self) -> None:
        refuse_unless_duration("Trajectory.wall_s", self.wall_s)
        refuse_unless_tuple("Trajectory.segments", self.segments)
        self._check_segments()
        self._check_lines()
        if not self.id:
            refuse("Trajectory.id", self.id, "name it: it is stored and found by its id")
        refuse_unless_step("Trajectory.policy_step", self.policy_step)
        if (self.failure is not None) != (self.stop is Stop.FAULT):
            refuse("Trajectory.failure", self.failure, f"a failure goes with stop='fault', stop is {self.stop!s}")
        for child in self.children:
            if child.parent != self.id:
                refuse("Trajectory.children", child.id, f"its parent is {child.parent!r}; give it {self.id!r}")
        if self.failure is not None and self.outcome is not None:
            refuse("Trajectory.outcome", self.outcome, "a rollout that failed on our side is never rewarded")
        refuse_unless_sum("Trajectory.outcome", self.outcome, self.outcomes)
        # A grade exists only next to an outcome of several parts.
        if self.grade is not None and not (self.outcomes and math.isfinite(self.grade)):
            refuse("Trajectory.grade", self.grade, "a grade is a finite number, beside an outcome in parts")

    def _check_segments(self) -> None:
        # Segments alternate, and the first one is sampled.
        previous: Segment | None = None
        for segment in self.segments:
            if previous is not None and type(segment) is type(previous):
                refuse("Trajectory.segments", type(segment).__name__, "sampled and observed segments alternate")
            if isinstance(segment, Observed):
                if not isinstance(previous, Sampled):
                    refuse("Trajectory.segments", segment.text, "text before the first line belongs to the prompt")
                elif previous.lines[-1].end is LineEnd.LENGTH:
                    refuse("Trajectory.segments", segment.text, "only a closed line is followed by an observation")
                elif _faulted(previous.lines[-1]):
                    refuse("Trajectory.segments", segment.text, "a failure of ours is never shown as program output")
            previous = segment

    def _check_lines(self) -> None:
        last = self.lines[-1] if self.lines else None
        for line in self.lines:
            if _faulted(line) and self.failure is None:
                remedy = "a rollout with a line that failed on our side has stop='fault' and a failure"
                refuse("Trajectory.failure", self.failure, remedy)
            if line.execution is not None and line.execution.answer is not None and line is not last:
                refuse("Trajectory.segments", line.text, "the line that answers is the last one")
        # The stop has to agree with the last line.
        if self.stop is Stop.ANSWERED and self.answer is None:
            refuse("Trajectory.stop", self.stop, "no line has an answer; give its execution one, or another stop")
        if self.stop is Stop.EOS and (last is None or last.end is not LineEnd.EOS):
            refuse("Trajectory.stop", self.stop, "the end token belongs to the last line; its end is 'eos'")
        if self.stop is Stop.LINE_TOO_LONG and (last is None or last.end is not LineEnd.LENGTH):
            refuse("Trajectory.stop", self.stop, "the last line is the one that was cut; its end is 'length'")

    def renamed(self, id: str, children: Sequence["Trajectory"] = ()) -> "Trajectory":
        """Return the rollout under another id, with `children` of another record before its own."""
        own = tuple(replace(child, parent=id) for child in (*children, *self.children))
        return replace(self, id=id, children=own)

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """All lines that the policy wrote, shape (L,)."""
        return tuple(line for segment in self.segments if isinstance(segment, Sampled) for line in segment.lines)

    @cached_property
    def completion_ids(self) -> tuple[int, ...]:
        """Ids after the prompt, shape (T,)."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @cached_property
    def loss_mask(self) -> tuple[bool, ...]:
        """True for each token that the policy sampled, shape (T,). Derived from the segment types."""
        return tuple(isinstance(segment, Sampled) for segment in self.segments for _ in segment.token_ids)

    @property
    def solved(self) -> bool:
        """True if the answer is right: the grade, or without one the outcome, is at least 1."""
        return ((self.outcome if self.grade is None else self.grade) or 0.0) >= 1.0

    def ungraded(self) -> "Trajectory":
        """Return the rollout without an outcome."""
        return replace(self, outcome=None, outcomes=(), grade=None)

    @property
    def prompt_key(self) -> str:
        """Key of its prompt."""
        return self.prompt.key

    @property
    def answer(self) -> str | None:
        """The submitted answer, or None."""
        return next((e.answer for e in self.executions if e.answer is not None), None)

    @property
    def executions(self) -> Iterator[Execution]:
        """Executions of the lines that the console ran, in order."""
        return (line.execution for line in self.lines if line.execution is not None)

    @property
    def trainable(self) -> bool:
        """True if the rollout may be trained on: no failure of ours, and at least one sampled token."""
        return self.failure is None and bool(self.lines)

    @property
    def sampled_tokens(self) -> int:
        """Number of completion tokens that the policy wrote."""
        return sum(len(line.token_ids) for line in self.lines)

    @property
    def observed_tokens(self) -> int:
        """Number of completion tokens that were inserted."""
        return len(self.completion_ids) - self.sampled_tokens

    def logprobs_T(self, observed: float = 0.0) -> tuple[float, ...]:
        """Return sampled log probabilities (nats), shape (T,). `observed` is a placeholder that must be masked."""
        return tuple(
            value
            for segment in self.segments
            for value in (
                (p for line in segment.lines for p in line.logprobs)
                if isinstance(segment, Sampled)
                else (observed for _ in segment.token_ids)
            )
        )


def _faulted(line: Line) -> bool:
    return line.execution is not None and line.execution.status is LineStatus.SANDBOX_FAULT


def spread(values_L: Sequence[float], trajectory: Trajectory, observed: float = 0.0) -> tuple[float, ...]:
    """Expand one value per line to one value per completion token, shape (T,). Observed tokens get `observed`.

    Raises:
        InvariantError: the number of values is not the number of lines.
    """
    if len(values_L) != len(trajectory.lines):
        raise InvariantError(
            f"trajectory {trajectory.id} got {len(values_L)} values for {len(trajectory.lines)} lines; "
            "give exactly one value per line"
        )
    # Values and lines are consumed in the same order.
    values = iter(values_L)
    widened: list[float] = []
    for segment in trajectory.segments:
        if isinstance(segment, Observed):
            widened.extend([observed] * len(segment.token_ids))
        else:
            for line in segment.lines:
                widened.extend([next(values)] * len(line.token_ids))
    return tuple(widened)
