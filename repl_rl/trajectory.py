"""All data types of a rollout's record, with their invariants.

A `Trajectory` is a prompt followed by alternating segments. A `Sampled` segment is made of lines; a line
owns its token ids and one log probability (natural logarithm, nats) for each. An `Observed` segment is text
that the console printed; it has no log probability, so none can be wrong. The loss mask is a question about
these types and is stored nowhere.

Suffixes name shapes: `_T` has an entry a completion token, `_L` an entry a line, `_G` an entry a rollout.
The invariants I1 to I12 are listed in docs/specification.md.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from repl_rl.errors import InvariantError

SCHEMA_VERSION = 2


class LineStatus(StrEnum):
    """How the console took a line. The list is closed."""

    INCOMPLETE = "incomplete"
    OK = "ok"
    SYNTAX_ERROR = "syntax_error"
    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    EXITED = "exited"
    KILLED = "killed"
    ANSWERED = "answered"
    SANDBOX_FAULT = "sandbox_fault"

    @property
    def is_error(self) -> bool:
        """True when the policy's own code went wrong. A `sandbox_fault` is ours, so it is not an error here."""
        return self in _ERRORS


_ERRORS = frozenset(
    {
        LineStatus.SYNTAX_ERROR,
        LineStatus.EXCEPTION,
        LineStatus.TIMEOUT,
        LineStatus.MEMORY_LIMIT,
        LineStatus.OUTPUT_LIMIT,
        LineStatus.KILLED,
    }
)


class LineEnd(StrEnum):
    """What closed a line's token record."""

    NEWLINE = "newline"
    """Its last token contains a newline."""
    MATCH = "match"
    """A sampler's watch asked to stop after its last token."""
    EOS = "eos"
    """Its last token is an end token of the vocabulary."""
    LENGTH = "length"
    """Cut in the middle by a token budget; nothing can follow it."""


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
    """Given up: see `RolloutLimits.give_up_after`."""
    WALL_CLOCK = "wall_clock"
    FAULT = "fault"
    """Our failure: see `Trajectory.failure`."""


def _refuse(field: str, value: object, remedy: str) -> None:
    raise InvariantError(f"{field} is {value!r}; {remedy}")


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward that a sampler gave to one line, in reward units (dimensionless, finite)."""

    name: str
    value: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            _refuse(f"reward {self.name!r}", self.value, "a reward is a finite number")


@dataclass(frozen=True, slots=True)
class Execution:
    """What the console made of a line."""

    status: LineStatus
    elapsed_s: float
    answer: str | None = None
    """What `submit_final_answer(...)` was given on this line; None: it was not called."""

    def __post_init__(self) -> None:
        if (self.answer is not None) != (self.status is LineStatus.ANSWERED):
            _refuse("Execution.answer", self.answer, f"status {self.status!s} and an answer must agree")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the policy: its tokens, a log probability (nats, <= 0) for each, and what became of it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    """The tokens decoded, newline included: a caption, never re-encoded."""
    end: LineEnd
    execution: Execution | None = None
    """None: no console was asked to run it."""
    rewards: tuple[NamedReward, ...] = ()

    def __post_init__(self) -> None:
        if not self.token_ids:
            _refuse("Line.token_ids", self.token_ids, "a line has at least one sampled token")
        if len(self.logprobs) != len(self.token_ids):
            n = f"{len(self.logprobs)} for {len(self.token_ids)} tokens"
            _refuse("Line.logprobs", n, "give exactly one log probability per sampled token")
        for logprob in self.logprobs:
            if not -math.inf < logprob <= 0.0:
                _refuse("Line.logprobs", logprob, "a log probability is finite and <= 0")
        if self.end is LineEnd.NEWLINE and "\n" not in self.text:
            _refuse("Line.text", self.text, "a line closed by a newline contains one")


@dataclass(frozen=True, slots=True)
class Sampled:
    """A run of the policy's own tokens, partitioned into lines."""

    lines: tuple[Line, ...]

    def __post_init__(self) -> None:
        if not self.lines:
            _refuse("Sampled.lines", self.lines, "a sampled segment has at least one line")
        for line in self.lines[:-1]:
            if line.end is LineEnd.LENGTH:
                _refuse("Sampled.lines", line.text, "a line cut by a budget can only be the last one")

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for line in self.lines for token in line.token_ids)


@dataclass(frozen=True, slots=True)
class Observed:
    """Text spliced into the prefill: console output and prompts. Masked, never trained. It may be empty."""

    text: str
    token_ids: tuple[int, ...]


Segment = Sampled | Observed


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a rollout starts from: its ids are sent, its text is shown."""

    text: str
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.token_ids:
            _refuse("Prompt.token_ids", self.token_ids, "a prompt has at least one token")


@dataclass(frozen=True, slots=True)
class Failure:
    """Our failure in this rollout: the class of the `RolloutFailure` and its message."""

    kind: str
    message: str


@dataclass(frozen=True)
class Trajectory:
    """The record of one rollout. Frozen: whatever is derived from it is computed once."""

    id: str
    task_id: str
    prompt: Prompt
    segments: tuple[Segment, ...]
    stop: Stop
    policy_step: int
    """Optimizer steps that the sampling policy had seen; 0 is the starting policy."""
    seed: int
    wall_s: float
    outcome: float | None = None
    """The judge's outcome reward; None: not graded (a fault, or a rollout without a judge)."""
    failure: Failure | None = None
    """Set exactly when `stop` is `fault`."""

    def __post_init__(self) -> None:
        self._check_segments()
        if self.policy_step < 0:
            _refuse("Trajectory.policy_step", self.policy_step, "count optimizer steps from 0")
        if (self.failure is not None) != (self.stop is Stop.FAULT):
            _refuse("Trajectory.failure", self.failure, f"a failure goes with stop='fault', stop is {self.stop!s}")
        if self.outcome is not None and not math.isfinite(self.outcome):
            _refuse("Trajectory.outcome", self.outcome, "an outcome reward is a finite number")
        if self.failure is not None and self.outcome is not None:
            _refuse("Trajectory.outcome", self.outcome, "a rollout that failed on our side is never rewarded")
        if self.stop is Stop.EOS and (not self.lines or self.lines[-1].end is not LineEnd.EOS):
            _refuse("Trajectory.stop", self.stop, "the end token belongs to the last line; its end is 'eos'")

    def _check_segments(self) -> None:
        previous: Segment | None = None
        for segment in self.segments:
            if previous is not None and type(segment) is type(previous):
                _refuse("Trajectory.segments", type(segment).__name__, "sampled and observed segments alternate")
            if isinstance(segment, Observed):
                if previous is None:
                    _refuse("Trajectory.segments", segment.text, "text before the first line belongs to the prompt")
                if isinstance(previous, Sampled) and previous.lines[-1].end is LineEnd.LENGTH:
                    _refuse("Trajectory.segments", segment.text, "only a closed line is followed by an observation")
            previous = segment

    @cached_property
    def lines(self) -> tuple[Line, ...]:
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
        return sum(len(line.token_ids) for line in self.lines)

    @property
    def observed_tokens(self) -> int:
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


def spread(values_L: Sequence[float], trajectory: Trajectory, observed: float = 0.0) -> tuple[float, ...]:
    """Widen one value a line to one value a completion token, shape (T,).

    The only place where line values meet tokens. Tokens of an observation get `observed`.

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


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of one task from one prompt; the baseline of an advantage."""

    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        if len(self.trajectories) < 2:
            n = len(self.trajectories)
            _refuse("Group.trajectories", f"{n} long", "a group needs at least 2 rollouts to have an advantage")
        first = self.trajectories[0]
        for other in self.trajectories[1:]:
            if other.task_id != first.task_id:
                _refuse("Group.trajectories", other.task_id, f"a group shares one task, here {first.task_id!r}")
            if other.prompt.token_ids != first.prompt.token_ids:
                _refuse("Group.trajectories", other.prompt.text, "a group shares one prompt")
