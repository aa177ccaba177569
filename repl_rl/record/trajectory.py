"""All data types of a rollout's record, with their invariants; some come from `repl_rl.record.line` and `.failure`.

A `Trajectory` is a prompt followed by alternating segments. A `Sampled` segment is made of lines, which own the sampled
tokens. An `Observed` segment is text that the console printed; it has no log probability, so none can be wrong. The
loss mask is a question about these types and is stored nowhere.

Suffixes name shapes: `_T` has an entry a completion token, `_L` an entry a line, `_G` an entry a rollout.
The invariants I1 to I12 are listed in docs/specification.md.
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
    """Who decided that a rollout is over."""

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
    """Given up by its sampler: it would have come to nothing."""
    WALL_CLOCK = "wall_clock"
    FAULT = "fault"
    """Dropped: see `Trajectory.failure`."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A run of the policy's own tokens, partitioned into lines."""

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
        """Those of its lines, one after the other."""
        return tuple(token for line in self.lines for token in line.token_ids)


@dataclass(frozen=True, slots=True)
class Observed:
    """Text spliced into the prefill: console output and prompts. Masked, never trained. It may be empty."""

    text: str
    token_ids: tuple[int, ...]
    cut: bool = False
    """Its middle gave way to a visible marker: it was longer than an observation, or a console's output, may be."""

    def __post_init__(self) -> None:
        refuse_unless_ids("Observed.token_ids", self.token_ids)
        if not self.token_ids and (self.text or self.cut):
            refuse("Observed.token_ids", self.token_ids, f"text without tokens is never shown: {self.text[:40]!r}")


Segment = Sampled | Observed


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a rollout starts from: its ids are sent, its text is shown."""

    text: str
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        refuse_unless_ids("Prompt.token_ids", self.token_ids)
        if not self.token_ids:
            refuse("Prompt.token_ids", self.token_ids, "a prompt has at least one token")

    @property
    def key(self) -> str:
        """A short name, equal for equal ids: what a group compares, also across processes."""
        return hashlib.blake2b(repr(self.token_ids).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Trajectory:
    """The record of one rollout. Frozen: whatever is derived from it is computed once."""

    id: str
    task_id: str
    prompt: Prompt
    segments: tuple[Segment, ...]
    """What was sampled and what was observed, in turns."""
    stop: Stop
    policy_step: int
    """Optimizer steps behind the policy that it is for: that learns from it, or is evaluated; 0 is the starting policy.
    Each line names the one that wrote it."""
    seed: int
    """Of its draws, where the engine seeds sessions."""
    wall_s: float
    """Wall clock, seconds."""
    outcome: float | None = None
    """The outcome reward, on whatever scale it was given; None: nobody graded it."""
    failure: Failure | None = None
    """Set exactly when `stop` is `fault`."""
    host_functions: tuple[str, ...] = ()
    """Functions of the host that its lines could call."""
    children: tuple["Trajectory", ...] = ()
    """What was sampled for its calls of host functions: queries of a model, and rollouts within this one."""
    parent: str = ""
    """Id of the trajectory whose call this one was sampled for; "": it stands for itself."""
    outcomes: tuple[NamedReward, ...] = ()
    """What the outcome is the sum of, by who gave it: judges, the sampler; (): it is one judge's alone."""
    grade: float | None = None
    """Beside several parts: what the task's first judge gave the answer, unweighted; None: it was not asked."""
    workspace: Setup | None = None
    """What its console began with; None: it was empty."""

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
        if self.grade is not None and not (self.outcomes and math.isfinite(self.grade)):
            refuse("Trajectory.grade", self.grade, "a grade is a finite number, beside an outcome in parts")

    def _check_segments(self) -> None:
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
        if self.stop is Stop.ANSWERED and self.answer is None:
            refuse("Trajectory.stop", self.stop, "no line has an answer; give its execution one, or another stop")
        if self.stop is Stop.EOS and (last is None or last.end is not LineEnd.EOS):
            refuse("Trajectory.stop", self.stop, "the end token belongs to the last line; its end is 'eos'")
        if self.stop is Stop.LINE_TOO_LONG and (last is None or last.end is not LineEnd.LENGTH):
            refuse("Trajectory.stop", self.stop, "the last line is the one that was cut; its end is 'length'")

    def renamed(self, id: str, children: Sequence["Trajectory"] = ()) -> "Trajectory":
        """Under another id, and with `children` of another record before its own."""
        own = tuple(replace(child, parent=id) for child in (*children, *self.children))
        return replace(self, id=id, children=own)

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """All that the policy wrote, shape (L,)."""
        return tuple(line for segment in self.segments if isinstance(segment, Sampled) for line in segment.lines)

    @cached_property
    def completion_ids(self) -> tuple[int, ...]:
        """Ids after the prompt, shape (T,)."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @cached_property
    def loss_mask(self) -> tuple[bool, ...]:
        """True where the policy sampled the token, shape (T,). Derived from the segment types."""
        return tuple(isinstance(segment, Sampled) for segment in self.segments for _ in segment.token_ids)

    @property
    def solved(self) -> bool:
        """The answer is right: the grade is at least 1, or the outcome where there is no grade."""
        return ((self.outcome if self.grade is None else self.grade) or 0.0) >= 1.0

    def ungraded(self) -> "Trajectory":
        """The same without an outcome."""
        return replace(self, outcome=None, outcomes=(), grade=None)

    @property
    def prompt_key(self) -> str:
        """The key of its prompt."""
        return self.prompt.key

    @property
    def answer(self) -> str | None:
        """The answer that was submitted; None: none was."""
        return next((e.answer for e in self.executions if e.answer is not None), None)

    @property
    def executions(self) -> Iterator[Execution]:
        """What the console made of the lines that it was asked to run, in order."""
        return (line.execution for line in self.lines if line.execution is not None)

    @property
    def trainable(self) -> bool:
        """False when nothing may be learned from it: our failure, or no sampled token."""
        return self.failure is None and bool(self.lines)

    @property
    def sampled_tokens(self) -> int:
        """How many of its completion tokens the policy wrote."""
        return sum(len(line.token_ids) for line in self.lines)

    @property
    def observed_tokens(self) -> int:
        """How many of its completion tokens were spliced in."""
        return len(self.completion_ids) - self.sampled_tokens

    def logprobs_T(self, observed: float = 0.0) -> tuple[float, ...]:
        """Sampled log probabilities (nats), shape (T,). `observed` is a placeholder that must be masked."""
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
    """Widen one value a line to one value a completion token, shape (T,). Tokens of an observation get `observed`.

    Raises:
        InvariantError: the number of values is not the number of lines.
    """
    if len(values_L) != len(trajectory.lines):
        raise InvariantError(
            f"trajectory {trajectory.id} got {len(values_L)} values for {len(trajectory.lines)} lines; "
            "give exactly one value per line"
        )
    values = iter(values_L)
    widened: list[float] = []
    for segment in trajectory.segments:
        if isinstance(segment, Observed):
            widened.extend([observed] * len(segment.token_ids))
        else:
            for line in segment.lines:
                widened.extend([next(values)] * len(line.token_ids))
    return tuple(widened)
