"""A line, the unit of credit: its tokens, how the console took it, what closed it, and the rewards it was given.

A line owns its token ids and one log probability (natural logarithm, nats) for each. `repl_rl.record.trajectory` builds
rollouts of them, and exports every name of this module.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from repl_rl.errors import InvariantError


def refuse(field: str, value: object, remedy: str) -> None:
    """Raise an `InvariantError` that names the field, its value and the remedy."""
    raise InvariantError(f"{field} is {value!r}; {remedy}")


def refuse_unless_tuple(field: str, value: object) -> None:
    """Refuse a list in the place of a tuple: it could be changed later, and equal records would compare unequal."""
    if not isinstance(value, tuple):
        refuse(field, value, f"give a tuple, this is a {type(value).__name__}")


def refuse_unless_ids(field: str, value: tuple[int, ...]) -> None:
    """Refuse what is no tuple of token ids; it may be empty."""
    refuse_unless_tuple(field, value)
    if value and min(value) < 0:
        refuse(field, min(value), "a token id is 0 or more; padding has no place in a record")


def refuse_unless_duration(field: str, value: float) -> None:
    """Refuse what is no number of seconds."""
    if not 0.0 <= value < math.inf:
        refuse(field, value, "give a finite number of seconds, 0 or more")


def refuse_unless_step(field: str, value: int) -> None:
    """Refuse what counts no optimizer steps."""
    if value < 0:
        refuse(field, value, "count optimizer steps from 0")


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
    """A call of a function of the host that a line made, and what the console was told."""

    name: str
    arguments: str
    """JSON: `{"args": [...], "kwargs": {...}}`, as the console sent them."""
    answer: str | None
    """JSON; None: there is an error."""
    error: str | None = None
    """What `HostError` said; None: there is an answer."""
    elapsed_s: float = 0.0
    """Wall clock on the host, seconds."""
    child: str = ""
    """Id of the trajectory that was sampled for it, see `Trajectory.children`; "": none was."""
    trained: bool = False
    """The child's sampled tokens are trained, with the advantage of this line."""

    def __post_init__(self) -> None:
        refuse_unless_duration("HostCall.elapsed_s", self.elapsed_s)
        if (self.answer is None) == (self.error is None):
            refuse("HostCall.answer", self.answer, "a call has an answer or an error, and not both")
        if self.trained and not self.child:
            refuse("HostCall.trained", True, "only what was sampled can be trained; name the child")


@dataclass(frozen=True, slots=True)
class Execution:
    """What the console made of a line."""

    status: LineStatus
    elapsed_s: float
    answer: str | None = None
    """What `submit_final_answer(...)` was given on this line; None: it was not called."""
    ran: tuple[str, ...] = ()
    """The physical lines that the console was given, in order, without newlines; (): no console ran anything, as for a
    tool call, or for an answer that was written in text."""
    calls: tuple[HostCall, ...] = ()
    """Calls of host functions that it made, in the order in which they reached the host."""

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
    """What the policy wrote at the place of a line, and its sampler did not go on from. It was never executed."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    end: LineEnd
    advantage: float | None = None
    """What its tokens are trained with, as its sampler said; None: they are not."""
    policy_step: int = 0
    """Optimizer steps behind the policy that wrote it."""

    def __post_init__(self) -> None:
        refuse_unless_step("Alternative.policy_step", self.policy_step)
        _refuse_unless_sampled("Alternative", self.token_ids, self.logprobs, self.text, self.end)
        if self.advantage is not None and not math.isfinite(self.advantage):
            refuse("Alternative.advantage", self.advantage, "an advantage is a finite number, or None")


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
    alternatives: tuple[Alternative, ...] = ()
    """What else was written here, in order, where a sampler asked for several lines and chose this one."""
    policy_step: int = 0
    """Optimizer steps behind the policy that wrote it: weights can change between two lines of a rollout."""

    def __post_init__(self) -> None:
        refuse_unless_step("Line.policy_step", self.policy_step)
        _refuse_unless_sampled("Line", self.token_ids, self.logprobs, self.text, self.end)
        refuse_unless_tuple("Line.rewards", self.rewards)
        refuse_unless_tuple("Line.alternatives", self.alternatives)


def _refuse_unless_sampled(
    what: str, token_ids: tuple[int, ...], logprobs: tuple[float, ...], text: str, end: LineEnd
) -> None:
    """Refuse what no policy wrote: one finite log probability for each token, at least one."""
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
    """Refuse what is neither None nor a finite number, and whatever is not the sum of its parts, where it has some."""
    if value is not None and not math.isfinite(value):
        refuse(field, value, "an outcome reward is a finite number")
    refuse_unless_tuple(f"{field}s", parts)
    if parts and value != math.fsum(part.value for part in parts):
        refuse(field, value, f"it is the sum of its parts {parts}")
