"""A line, the unit of credit: its tokens, its end, its execution in the console, and its rewards.

A line owns its token ids and one log probability (natural logarithm, nats) per token. `repl_rl.record.trajectory`
builds rollouts from lines, and exports every name of this module.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from repl_rl.errors import InvariantError


def refuse(field: str, value: object, remedy: str) -> None:
    """Raise an `InvariantError` that names the field, its value and the remedy."""
    raise InvariantError(f"{field} is {value!r}; {remedy}")


def refuse_unless_tuple(field: str, value: object) -> None:
    """Refuse a list in place of a tuple. A list could be changed later, and equal records would compare unequal."""
    if not isinstance(value, tuple):
        refuse(field, value, f"give a tuple, this is a {type(value).__name__}")


def refuse_unless_ids(field: str, value: tuple[int, ...]) -> None:
    """Refuse a value that is not a tuple of token ids. An empty tuple passes."""
    refuse_unless_tuple(field, value)
    if value and min(value) < 0:
        refuse(field, min(value), "a token id is 0 or more; padding has no place in a record")


def refuse_unless_duration(field: str, value: float) -> None:
    """Refuse a value that is not a number of seconds."""
    if not 0.0 <= value < math.inf:
        refuse(field, value, "give a finite number of seconds, 0 or more")


def refuse_unless_step(field: str, value: int) -> None:
    """Refuse a value that is not a number of optimizer steps."""
    if value < 0:
        refuse(field, value, "count optimizer steps from 0")


class LineStatus(StrEnum):
    """Result of a line in the console. The list is closed."""

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
    """End of a line's token record."""

    NEWLINE = "newline"
    """Its last token contains a newline."""
    MATCH = "match"
    """A sampler's watch requested a stop after its last token."""
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
            refuse(f"reward {self.name!r}", self.value, "a reward is a finite number")


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
        refuse_unless_duration("HostCall.elapsed_s", self.elapsed_s)
        if (self.answer is None) == (self.error is None):
            refuse("HostCall.answer", self.answer, "a call has an answer or an error, and not both")
        if self.trained and not self.child:
            refuse("HostCall.trained", True, "only what was sampled can be trained; name the child")


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
        refuse_unless_duration("Execution.elapsed_s", self.elapsed_s)
        refuse_unless_tuple("Execution.ran", self.ran)
        refuse_unless_tuple("Execution.calls", self.calls)
        for physical in self.ran:
            if "\n" in physical:
                refuse("Execution.ran", physical, "give physical lines, each without its newline")
        if (self.answer is not None) != (self.status is LineStatus.ANSWERED):
            refuse("Execution.answer", self.answer, f"status {self.status!s} and an answer must agree")


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
    """Optimizer steps behind the policy that wrote it."""

    def __post_init__(self) -> None:
        refuse_unless_step("Alternative.policy_step", self.policy_step)
        _refuse_unless_sampled("Alternative", self.token_ids, self.logprobs, self.text, self.end)
        if self.advantage is not None and not math.isfinite(self.advantage):
            refuse("Alternative.advantage", self.advantage, "an advantage is a finite number, or None")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the policy: its tokens, a log probability (nats, <= 0) per token, and its result."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    """The decoded tokens, newline included. It is a caption and is never re-encoded."""
    end: LineEnd
    execution: Execution | None = None
    """Result in the console. None means that no console was asked to run it."""
    rewards: tuple[NamedReward, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    """Other lines that were written here, in order, if a sampler requested several and chose this one."""
    policy_step: int = 0
    """Optimizer steps behind the policy that wrote it. Weights can change between two lines of a rollout."""

    def __post_init__(self) -> None:
        refuse_unless_step("Line.policy_step", self.policy_step)
        _refuse_unless_sampled("Line", self.token_ids, self.logprobs, self.text, self.end)
        refuse_unless_tuple("Line.rewards", self.rewards)
        refuse_unless_tuple("Line.alternatives", self.alternatives)


def _refuse_unless_sampled(
    what: str, token_ids: tuple[int, ...], logprobs: tuple[float, ...], text: str, end: LineEnd
) -> None:
    """Validate sampled tokens: at least one, with one finite log probability each."""
    refuse_unless_ids(f"{what}.token_ids", token_ids)
    refuse_unless_tuple(f"{what}.logprobs", logprobs)
    if not token_ids:
        refuse(f"{what}.token_ids", token_ids, "a line has at least one sampled token")
    if len(logprobs) != len(token_ids):
        n = f"{len(logprobs)} for {len(token_ids)} tokens"
        refuse(f"{what}.logprobs", n, "give exactly one log probability per sampled token")
    for logprob in logprobs:
        if not -math.inf < logprob <= 0.0:
            refuse(f"{what}.logprobs", logprob, "a log probability is finite and <= 0")
    if end is LineEnd.NEWLINE and "\n" not in text:
        refuse(f"{what}.text", text, "a line closed by a newline contains one")


def refuse_unless_sum(field: str, value: float | None, parts: tuple[NamedReward, ...]) -> None:
    """Refuse a value that is neither None nor finite, or that is not the sum of its parts, if it has any."""
    if value is not None and not math.isfinite(value):
        refuse(field, value, "an outcome reward is a finite number")
    refuse_unless_tuple(f"{field}s", parts)
    if parts and value != math.fsum(part.value for part in parts):
        refuse(field, value, f"it is the sum of its parts {parts}")
