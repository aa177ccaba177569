"""Records of host function calls, and answers from such a record."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from repl_rl.record.clip import clip
from repl_rl.record.trajectory import HostCall, Trajectory
from repl_rl.rollout.host import HOST_ERROR_CHARS

UNDONE = "the line ended before the answer"
"""Error of a call that has neither an answer nor another error yet."""
SPENT = "and has no more of them"
"""Last words of the error of a call that exceeds the limit of a rollout."""


class Refused(Exception):
    """Refusal of a call. The console receives the message as its error."""


class Recall:
    """Answers to calls from a record, in any order. A call is found by its name and arguments."""

    def __init__(self, functions: Mapping[str, str]) -> None:
        self.functions = functions
        self.argument_bytes = 1 << 20
        self.strangers: list[str] = []
        """Calls that are not in the record."""
        self._expected: list[HostCall] = []
        self._known: list[HostCall] = []

    def expect(self, calls: Sequence[HostCall]) -> None:
        """Set the calls that the next lines are expected to make, in place of those expected before."""
        self._expected, self._known, self.strangers = list(calls), [], []

    @property
    def differs(self) -> str:
        """Difference between the calls made and those expected; empty if they agree."""
        # A recorded call that never received an answer may be missing now.
        missing = [f"{call.name}({call.arguments})" for call in self._expected if call.error != UNDONE]
        told = [f"not called: {clip(each, 80)}" for each in missing]
        return "; ".join([*(f"called: {clip(each, 80)}" for each in self.strangers), *told])

    async def answer(self, call: bytes) -> bytes:
        """See `Host.answer`."""
        try:
            asked = read_call(call)
        except Refused:
            asked = unread(call)
        # Each recorded call answers one call.
        for known in self._expected:
            if (known.name, known.arguments) == (asked.name, asked.arguments):
                self._expected.remove(known)
                self._known.append(known)
                return reply_of(known)
        for known in (*self._known, *self._expected):
            # Of the calls beyond a limit only the first is recorded, so it answers those after it.
            if known.name in (asked.name, "") and (known.error or "").endswith(SPENT):
                return reply_of(known)
        self.strangers.append(f"{asked.name}({asked.arguments})")
        return reply_of(replace(asked, error=f"{asked.name}() is answered from a record, which has no such call"))


def unread(call: bytes) -> HostCall:
    """Return the record of a call that is not parsed, or cannot be."""
    return HostCall("", clip(call[: 2 * HOST_ERROR_CHARS].decode("utf-8", "replace"), HOST_ERROR_CHARS), None, UNDONE)


def read_call(call: bytes) -> HostCall:
    """Parse a call to the record of a call that has no answer yet.

    Raises:
        Refused: the bytes are no call.
    """
    try:
        told = json.loads(call, parse_constant=_refuse_constant)
        name, args, kwargs = told["name"], told["args"], told["kwargs"]
        if not (isinstance(name, str) and isinstance(args, list) and isinstance(kwargs, dict) and len(name) < 256):
            raise TypeError("a field has the wrong type")
        arguments = json.dumps({"args": args, "kwargs": kwargs}, sort_keys=True)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(f"this is no call: {error}") from error
    return HostCall(name, arguments, None, UNDONE)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON value")


def reply_of(call: HostCall) -> bytes:
    """Return the reply that the console receives."""
    # A recorded answer is JSON already.
    if call.answer is not None:
        return b'{"answer": ' + call.answer.encode() + b"}"
    return json.dumps({"error": call.error}).encode()


def called(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return metrics of a batch: calls per rollout, share of failed calls, and tokens sampled for calls."""
    calls = [call for t in trajectories for run in t.executions for call in run.calls]
    children = [child for t in trajectories for child in t.children]
    return {
        "host_calls": len(calls) / max(len(trajectories), 1),
        "host_error_rate": sum(call.error is not None for call in calls) / max(len(calls), 1),
        "child_tokens": float(sum(map(_tokens, children))),
    }


def _tokens(trajectory: Trajectory) -> int:
    return trajectory.sampled_tokens + sum(map(_tokens, trajectory.children))
