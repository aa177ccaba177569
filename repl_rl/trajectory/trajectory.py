"""Record of a rollout: lines, segments, the trajectory, its outcome and its group, with their invariants.

A `Trajectory` is a prompt followed by alternating segments. A `Sampled` segment consists of lines, which own the
sampled tokens and one log probability per token (natural logarithm, nats). An `Observed` segment is text that the
console printed. It has no log probability, so none can be wrong. The loss mask follows from these types and is stored
nowhere.

Suffixes name shapes: `_T` has one entry per completion token, `_L` one per line, `_G` one per rollout. The invariants
I1 to I17 are listed in docs/specification.md.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Generic, Protocol, TypeVar

from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ConfigError, InvariantError, SandboxFault, UserCodeError


class LineStatus(StrEnum):
    """Result of a line in the console. Backends and samplers cannot add values."""

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
        """True if the policy's own code failed. A `sandbox_fault` is our failure, so it is not an error here."""
        return self in _ERRORS


# An enumeration cannot hold a set of its members, so the set is defined after it.
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
    """Reason for which the sampling of a line ended."""

    NEWLINE = "newline"
    """Its last token contains a newline."""
    MATCH = "match"
    """The sampler's stop condition (the watch) matched after the last token of the line."""
    EOS = "eos"
    """Its last token is an end token of the vocabulary."""
    LENGTH = "length"
    """A token budget cut the line in the middle; nothing can follow it."""


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward that a sampler gave to one line, in reward units (dimensionless, finite)."""

    name: str
    value: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise_invariant_error(f"reward {self.name!r}", self.value, "a reward is a finite number")


UNANSWERED = "the line ended before the answer"
"""Error of a call of a host function that has neither an answer nor another error yet."""


@dataclass(frozen=True, slots=True)
class HostCall:
    """A line's call of a host function, and the reply to the console."""

    name: str
    arguments: str
    """JSON: `{"args": [...], "kwargs": {...}}`, as the console sent them."""
    answer: str | None
    """JSON. None means that the call ended in an error."""
    error: str | None = None
    """Message of the `HostError`. None means that the call has an answer."""
    elapsed_s: float = 0.0
    """Wall clock time on the host, seconds."""
    child: str = ""
    """Id of the trajectory that was sampled for the call, see `Trajectory.children`; "" if none was."""
    trained: bool = False
    """True if the child's sampled tokens are trained, with the advantage of this line."""

    def __post_init__(self) -> None:
        check_duration("HostCall.elapsed_s", self.elapsed_s)
        if (self.answer is None) == (self.error is None):
            raise_invariant_error("HostCall.answer", self.answer, "a call has an answer or an error, and not both")
        if self.trained and not self.child:
            raise_invariant_error("HostCall.trained", True, "only what was sampled can be trained; name the child")


@dataclass(frozen=True, slots=True)
class Execution:
    """Result of running a line in the console."""

    status: LineStatus
    elapsed_s: float
    answer: str | None = None
    """Argument of `submit_final_answer(...)` on this line, or None if it was not called."""
    ran: tuple[str, ...] = ()
    """Physical lines that the console received, in order, without newlines. () means that no console ran anything, as
    for a tool call, or for an answer in text."""
    calls: tuple[HostCall, ...] = ()
    """Calls of host functions by the line, in the order in which they reached the host."""

    def __post_init__(self) -> None:
        check_duration("Execution.elapsed_s", self.elapsed_s)
        check_tuple("Execution.ran", self.ran)
        check_tuple("Execution.calls", self.calls)
        # The record keeps physical lines, so that a replay can run them again.
        for physical in self.ran:
            if "\n" in physical:
                raise_invariant_error("Execution.ran", physical, "give physical lines, each without its newline")
        if (self.answer is not None) != (self.status is LineStatus.ANSWERED):
            raise_invariant_error("Execution.answer", self.answer, f"status {self.status!s} and an answer must agree")


@dataclass(frozen=True, slots=True)
class Alternative:
    """A continuation that the policy wrote in place of a line and the sampler did not choose. It was never executed."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    end: LineEnd
    advantage: float | None = None
    """Advantage that its tokens are trained with, set by its sampler. None means that they are not trained."""
    policy_step: int = 0
    """Number of optimizer steps applied to the policy before it wrote this continuation."""

    def __post_init__(self) -> None:
        check_policy_step("Alternative.policy_step", self.policy_step)
        _check_sampled("Alternative", self.token_ids, self.logprobs, self.text, self.end)
        if self.advantage is not None and not math.isfinite(self.advantage):
            raise_invariant_error("Alternative.advantage", self.advantage, "an advantage is a finite number, or None")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the policy, the unit of credit: its tokens, their log probabilities, its result and its rewards."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log probability of each token, nats, <= 0."""
    text: str
    """Decoded text of `token_ids`, newline included. It is never encoded again to get token ids."""
    end: LineEnd
    execution: Execution | None = None
    """Result in the console. None means that no console was asked to run it."""
    rewards: tuple[NamedReward, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    """Rejected continuations at this position, in order, if the sampler requested several and chose this line."""
    policy_step: int = 0
    """Number of optimizer steps applied to the policy before it wrote this line. Weights can change between two lines
    of a rollout."""

    def __post_init__(self) -> None:
        check_policy_step("Line.policy_step", self.policy_step)
        _check_sampled("Line", self.token_ids, self.logprobs, self.text, self.end)
        check_tuple("Line.rewards", self.rewards)
        check_tuple("Line.alternatives", self.alternatives)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Start of a rollout. The engine receives `token_ids`; `text` is only for display."""

    text: str
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        check_token_ids("Prompt.token_ids", self.token_ids)
        if not self.token_ids:
            raise_invariant_error("Prompt.token_ids", self.token_ids, "a prompt has at least one token")

    @property
    def key(self) -> str:
        """Hash of the token ids. All rollouts of a group must have the same key, also across processes."""
        return hashlib.blake2b(repr(self.token_ids).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Sampled:
    """A run of tokens that the policy sampled, partitioned into lines."""

    lines: tuple[Line, ...]

    def __post_init__(self) -> None:
        check_tuple("Sampled.lines", self.lines)
        if not self.lines:
            raise_invariant_error("Sampled.lines", self.lines, "a sampled segment has at least one line")
        # Nothing can follow a line that a budget cut.
        for line in self.lines[:-1]:
            if line.end is LineEnd.LENGTH:
                raise_invariant_error("Sampled.lines", line.text, "a line cut by a budget can only be the last one")

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
        check_token_ids("Observed.token_ids", self.token_ids)
        if not self.token_ids and (self.text or self.cut):
            raise_invariant_error(
                "Observed.token_ids", self.token_ids, f"text without tokens is never shown: {self.text[:40]!r}"
            )


Segment = Sampled | Observed


@keeps_old_names
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
    EARLY_STOPPED = "doomed"
    """Early stopping: the sampler no longer expected success."""
    WALL_CLOCK = "wall_clock"
    FAULT = "fault"
    """Dropped: see `Trajectory.failure`."""


class FailureKind(StrEnum):
    """Source of a failure. The list is closed."""

    SANDBOX_FAULT = "sandbox_fault"
    """Our console failed."""
    USER_ERROR = "user_error"
    """A sampler or a judge of the user raised or misbehaved."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The task's prompt fills the context."""
    OTHER = "other"
    """Any other `RolloutFailure`."""

    @property
    def is_user_failure(self) -> bool:
        """True if the sampler or the task is to blame, and no part of ours."""
        return self in (FailureKind.USER_ERROR, FailureKind.PROMPT_TOO_LONG)


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason for which a rollout was dropped. Such a rollout is never rewarded and never trained on."""

    kind: FailureKind
    message: str

    def __post_init__(self) -> None:
        if type(self.kind) is not FailureKind:
            raise_invariant_error("Failure.kind", self.kind, f"choose a FailureKind: {', '.join(FailureKind)}")

    @classmethod
    def from_error(cls, error: Exception) -> "Failure":
        """Return the failure of a rollout that `error` ended."""
        kinds = ((SandboxFault, FailureKind.SANDBOX_FAULT), (UserCodeError, FailureKind.USER_ERROR))
        kind = next((kind for cause, kind in kinds if isinstance(error, cause)), FailureKind.OTHER)
        return cls(kind, str(error))


class WorkspaceContent(Protocol):
    """Initial content of a console under its digest: a task's workspace, or one that was stored with a run."""

    @property
    def digest(self) -> str:
        """SHA-256 of `content`, 64 lowercase hexadecimal digits."""

    @property
    def content(self) -> bytes:
        """The JSON that `repl_rl.tasks.Workspace` writes.

        Raises:
            StoreError: the stored content is missing or damaged.
        """

    def __hash__(self) -> int:
        """Return a hash that is equal for equal digests."""


@keeps_old_names
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
    """Number of optimizer steps applied to the policy that is trained on the rollout, or evaluated with it. 0 means the
    starting policy. `Line.policy_step` is the number for the policy that wrote a line."""
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
    """Parts that add up to `outcome`, from judges and the sampler. () means that `outcome` is one judge's value."""
    grade: float | None = None
    """Unweighted value of the task's first judge, set only if `outcome` consists of parts. None means that the judge
    did not run, or, without parts, that `outcome` itself is the grade."""
    workspace: WorkspaceContent | None = None
    """Initial content of its console. None means an empty console."""

    def __post_init__(self) -> None:
        check_duration("Trajectory.wall_s", self.wall_s)
        check_tuple("Trajectory.segments", self.segments)
        # The order of the segments comes first, because the other checks use them.
        self._check_segments()
        self._check_lines()
        if not self.id:
            raise_invariant_error("Trajectory.id", self.id, "give an id; the store finds the record by it")
        check_policy_step("Trajectory.policy_step", self.policy_step)
        if (self.failure is not None) != (self.stop is Stop.FAULT):
            raise_invariant_error(
                "Trajectory.failure", self.failure, f"a failure goes with stop='fault', stop is {self.stop!s}"
            )
        # Each child names this trajectory as its parent.
        for child in self.children:
            if child.parent != self.id:
                raise_invariant_error(
                    "Trajectory.children", child.id, f"its parent is {child.parent!r}; give it {self.id!r}"
                )
        if self.failure is not None and self.outcome is not None:
            raise_invariant_error(
                "Trajectory.outcome", self.outcome, "a rollout that failed on our side is never rewarded"
            )
        check_sum("Trajectory.outcome", self.outcome, self.outcomes)
        # A grade exists only next to an outcome of several parts.
        if self.grade is not None and not (self.outcomes and math.isfinite(self.grade)):
            raise_invariant_error(
                "Trajectory.grade", self.grade, "a grade is a finite number, next to an outcome in parts"
            )

    def _check_segments(self) -> None:
        """Check that segments alternate, that the first one is sampled, and that an observation follows a closed
        line."""
        previous: Segment | None = None
        for segment in self.segments:
            if previous is not None and type(segment) is type(previous):
                raise_invariant_error(
                    "Trajectory.segments", type(segment).__name__, "sampled and observed segments alternate"
                )
            if isinstance(segment, Observed):
                if not isinstance(previous, Sampled):
                    raise_invariant_error(
                        "Trajectory.segments", segment.text, "text before the first line belongs to the prompt"
                    )
                elif previous.lines[-1].end is LineEnd.LENGTH:
                    raise_invariant_error(
                        "Trajectory.segments", segment.text, "only a closed line is followed by an observation"
                    )
                elif _has_sandbox_fault(previous.lines[-1]):
                    raise_invariant_error(
                        "Trajectory.segments", segment.text, "a failure of ours is never shown as program output"
                    )
            previous = segment

    def _check_lines(self) -> None:
        """Check that the failure, the answer and the stop agree with the lines."""
        last = self.lines[-1] if self.lines else None
        # A failure of ours drops the rollout, and nothing follows an answer.
        for line in self.lines:
            if _has_sandbox_fault(line) and self.failure is None:
                remedy = "a rollout with a line that failed on our side has stop='fault' and a failure"
                raise_invariant_error("Trajectory.failure", self.failure, remedy)
            if line.execution is not None and line.execution.answer is not None and line is not last:
                raise_invariant_error("Trajectory.segments", line.text, "the line that answers is the last one")
        # The stop has to agree with the last line.
        if self.stop is Stop.ANSWERED and self.answer is None:
            raise_invariant_error(
                "Trajectory.stop", self.stop, "no line has an answer; give its execution one, or another stop"
            )
        if self.stop is Stop.EOS and (last is None or last.end is not LineEnd.EOS):
            raise_invariant_error(
                "Trajectory.stop", self.stop, "the end token belongs to the last line; its end is 'eos'"
            )
        if self.stop is Stop.LINE_TOO_LONG and (last is None or last.end is not LineEnd.LENGTH):
            raise_invariant_error(
                "Trajectory.stop", self.stop, "the last line is the one that was cut; its end is 'length'"
            )

    def with_id(self, id: str, children: Sequence["Trajectory"] = ()) -> "Trajectory":
        """Return a copy with another id. `children` are put before the children of this rollout."""
        # Children name their parent, so they change as well.
        renamed_children = tuple(replace(child, parent=id) for child in (*children, *self.children))
        return replace(self, id=id, children=renamed_children)

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

    def without_outcome(self) -> "Trajectory":
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


def _has_sandbox_fault(line: Line) -> bool:
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
    expanded: list[float] = []
    for segment in trajectory.segments:
        if isinstance(segment, Observed):
            expanded.extend([observed] * len(segment.token_ids))
        else:
            for line in segment.lines:
                expanded.extend([next(values)] * len(line.token_ids))
    return tuple(expanded)


JUDGE = "judge"
"""Name of a single judge's part, if other parts are added later."""


@dataclass(frozen=True, slots=True)
class OutcomeClaims:
    """Claims of a sampler about the outcome, on the sampler's scale."""

    value: NamedReward | None = None
    """Outcome that replaces the judges' value. None keeps the judges' value."""
    added: tuple[NamedReward, ...] = ()
    """Rewards that are added to `value`, or to the judges' value if `value` is None."""

    def with_claim(self, value: float, name: str, add: bool) -> "OutcomeClaims":
        """Return the claims with one more. Of several that set the outcome, the last one counts.

        Raises:
            ConfigError: the value is not finite, or the name is empty.
        """
        if not math.isfinite(value):
            raise ConfigError(f"episode.set_outcome(name={name!r})", value, "give a finite number")
        if not name.strip():
            raise ConfigError("episode.set_outcome(), name", name, "give a name that says what it is for")
        reward = NamedReward(name, float(value))
        return replace(self, added=(*self.added, reward)) if add else replace(self, value=reward)

    def combine_with_judges(self, judge_parts: Sequence[NamedReward]) -> tuple[NamedReward, ...]:
        """Return the parts that add up to the outcome, given the values of the judges."""
        return (*(judge_parts if self.value is None else (self.value,)), *self.added)


def set_outcome_parts(trajectory: Trajectory, parts: Sequence[NamedReward], grade: float | None) -> Trajectory:
    """Return the rollout with the sum of `parts`, at least one, as its outcome."""
    total = math.fsum(part.value for part in parts)
    return replace(trajectory, outcome=total, outcomes=tuple(parts), grade=grade)


def compute_mean_parts(rollouts: Sequence[Iterable[NamedReward]]) -> dict[str, float]:
    """Return the mean over rollouts of the rewards under each name. If a rollout has a name twice, the sum counts."""
    totals: dict[str, float] = {}
    for rewards in rollouts:
        for reward in rewards:
            totals[reward.name] = totals.get(reward.name, 0.0) + reward.value
    return {name: total / len(rollouts) for name, total in totals.items()}


def add_outcome_part(trajectory: Trajectory, part: NamedReward) -> Trajectory:
    """Return the rollout with one more part in its outcome. An ungraded rollout gets that part alone."""
    if trajectory.outcomes or trajectory.outcome is None:
        return set_outcome_parts(trajectory, (*trajectory.outcomes, part), trajectory.grade)
    # A single judge's outcome becomes a part, and stays the grade.
    outcome = trajectory.outcome
    return set_outcome_parts(trajectory, (NamedReward(JUDGE, outcome), part), outcome)


class GroupMember(Protocol):
    """Member of a group: a `Trajectory`, or a summary of one from another process."""

    @property
    def task_id(self) -> str: ...

    @property
    def prompt_key(self) -> str: ...


M = TypeVar("M", bound=GroupMember)


@dataclass(frozen=True, slots=True)
class Group(Generic[M]):
    """Rollouts of one task from one prompt, which share the baseline of an advantage."""

    members: tuple[M, ...]

    def __post_init__(self) -> None:
        if len(self.members) < 2:
            raise_invariant_error(
                "Group.members", f"{len(self.members)} long", "a group needs at least 2 rollouts for an advantage"
            )
        # Only rollouts of one task from equal prompts may share a baseline.
        first = self.members[0]
        for index, member in enumerate(self.members):
            if member.task_id != first.task_id:
                raise_invariant_error(
                    "Group.members", member.task_id, f"a group shares one task, here {first.task_id!r}"
                )
            if member.prompt_key != first.prompt_key:
                description = f"rollout {index} of task {first.task_id!r}"
                raise_invariant_error(
                    "Group.members", description, "it starts from another prompt; a group shares one prompt"
                )


def raise_invariant_error(field: str, value: object, remedy: str) -> None:
    """Raise an `InvariantError` that names the field, its value and the remedy."""
    raise InvariantError(f"{field} is {value!r}; {remedy}")


def check_tuple(field: str, value: object) -> None:
    """Refuse a list in place of a tuple. A list could be changed later, and equal records would compare unequal."""
    if not isinstance(value, tuple):
        raise_invariant_error(field, value, f"give a tuple, not a value of type {type(value).__name__}")


def check_token_ids(field: str, value: tuple[int, ...]) -> None:
    """Refuse a value that is not a tuple of token ids. An empty tuple passes."""
    check_tuple(field, value)
    if value and min(value) < 0:
        raise_invariant_error(field, min(value), "a token id is 0 or more; padding has no place in a record")


def check_duration(field: str, value: float) -> None:
    """Refuse a value that is not a number of seconds."""
    if not 0.0 <= value < math.inf:
        raise_invariant_error(field, value, "give a finite number of seconds, 0 or more")


def check_policy_step(field: str, value: int) -> None:
    """Refuse a value that is not a number of optimizer steps."""
    if value < 0:
        raise_invariant_error(field, value, "count optimizer steps from 0")


def _check_sampled(
    owner: str, token_ids: tuple[int, ...], logprobs: tuple[float, ...], text: str, end: LineEnd
) -> None:
    """Validate sampled tokens: at least one, with one finite log probability each."""
    check_token_ids(f"{owner}.token_ids", token_ids)
    check_tuple(f"{owner}.logprobs", logprobs)
    if not token_ids:
        raise_invariant_error(f"{owner}.token_ids", token_ids, "a line has at least one sampled token")
    if len(logprobs) != len(token_ids):
        counts = f"{len(logprobs)} for {len(token_ids)} tokens"
        raise_invariant_error(f"{owner}.logprobs", counts, "give exactly one log probability per sampled token")
    for logprob in logprobs:
        if not -math.inf < logprob <= 0.0:
            raise_invariant_error(f"{owner}.logprobs", logprob, "a log probability is finite and <= 0")
    if end is LineEnd.NEWLINE and "\n" not in text:
        raise_invariant_error(f"{owner}.text", text, "a line closed by a newline contains one")


def check_sum(field: str, value: float | None, parts: tuple[NamedReward, ...]) -> None:
    """Refuse a value that is neither None nor finite, or that is not the sum of its parts, if it has any."""
    if value is not None and not math.isfinite(value):
        raise_invariant_error(field, value, "an outcome reward is a finite number")
    check_tuple(f"{field}s", parts)
    if parts and value != math.fsum(part.value for part in parts):
        raise_invariant_error(field, value, f"it is the sum of its parts {parts}")
