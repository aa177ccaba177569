"""Wrong states that can be written down in one expression: each is refused, or allowed for a reason.

Every refusal names the field or the thing, its value and the remedy. What is allowed stands in docs/specification.md.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import pytest

from repl_rl.credit.advantage_estimators import GroupRewards, LineRewards, RolloutRewards
from repl_rl.engine import Chunk, ChunkEnd, Sampling
from repl_rl.errors import ReplRLError
from repl_rl.sandbox.base import LineResult
from repl_rl.tasks import FollowUp, Task
from repl_rl.trajectory.trajectory import (
    Execution,
    Failure,
    FailureKind,
    Line,
    LineEnd,
    LineStatus,
    Observed,
    Prompt,
    Sampled,
    Segment,
    Stop,
    Trajectory,
)

T = TypeVar("T")
OK = Execution(LineStatus.OK, 0.0, ran=("x",))
FAULT = Execution(LineStatus.SANDBOX_FAULT, 0.0, ran=("x",))
ANSWER = Execution(LineStatus.ANSWERED, 0.0, "3")
LOST = Failure(FailureKind.SANDBOX_FAULT, "lost")


def line(execution: Execution | None = OK, end: LineEnd = LineEnd.NEWLINE) -> Line:
    return Line((1, 2), (-0.5, -0.5), "x\n", end, execution)


def trajectory(*segments: Segment, stop: Stop = Stop.FINISHED, failure: Failure | None = None) -> Trajectory:
    return Trajectory("t", "task", Prompt("p", (9,)), segments, stop, 0, 0, 0.0, failure=failure)


def listed(*values: T) -> tuple[T, ...]:
    """A list that claims to be a tuple, as code without types would give it."""
    return cast("tuple[T, ...]", list(values))


SHOWN = Observed("3\n", (7,))

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a rewarded rollout whose console failed": (
        lambda: replace(trajectory(Sampled((line(FAULT),))), outcome=1.0),
        "Trajectory.failure is None; a rollout with a line that failed on our side has stop='fault'",
    ),
    "a failure of ours shown as program output": (
        lambda: trajectory(Sampled((line(FAULT),)), SHOWN, stop=Stop.FAULT, failure=LOST),
        r"Trajectory.segments is '3\n'; a failure of ours is never shown as program output",
    ),
    "answered without an answer": (
        lambda: trajectory(Sampled((line(),)), stop=Stop.ANSWERED),
        "Trajectory.stop is <Stop.ANSWERED: 'answered'>; no line has an answer",
    ),
    "a line after the answer": (
        lambda: trajectory(Sampled((line(ANSWER), line())), stop=Stop.ANSWERED),
        r"Trajectory.segments is 'x\n'; the line that answers is the last one",
    ),
    "a line too long that was not cut": (
        lambda: trajectory(Sampled((line(),)), stop=Stop.LINE_TOO_LONG),
        "Trajectory.stop is <Stop.LINE_TOO_LONG: 'line_too_long'>; the last line is the one that was cut",
    ),
    "a rollout that took less than no time": (
        lambda: replace(trajectory(), wall_s=-1.0),
        "Trajectory.wall_s is -1.0; give a finite number of seconds",
    ),
    "a trajectory without a name": (lambda: replace(trajectory(), id=""), "Trajectory.id is ''; give an id"),
    "segments in a list": (
        lambda: replace(trajectory(), segments=listed(Sampled((line(),)))),
        "Trajectory.segments is [Sampled(",
    ),
    "lines in a list": (lambda: Sampled(listed(line())), "give a tuple, not a value of type list"),
    "ids in a list": (
        lambda: Line(listed(1), (-0.5,), "x\n", LineEnd.NEWLINE),
        "Line.token_ids is [1]; give a tuple",
    ),
    "log probabilities in a list": (
        lambda: Line((1,), listed(-0.5), "x\n", LineEnd.NEWLINE),
        "Line.logprobs is [-0.5]; give a tuple",
    ),
    "observed ids in a list": (
        lambda: Observed("3", listed(7)),
        "Observed.token_ids is [7]; give a tuple",
    ),
    "a padding id among sampled ones": (
        lambda: Line((1, -100), (-0.5, -0.5), "x\n", LineEnd.NEWLINE),
        "Line.token_ids is -100; a token id is 0 or more",
    ),
    "shown text without tokens": (lambda: Observed("text", ()), "Observed.token_ids is (); text without tokens"),
    "an empty text that was cut": (lambda: Observed("", (), cut=True), "Observed.token_ids is ()"),
    "an execution that took less than no time": (
        lambda: Execution(LineStatus.OK, -0.1),
        "Execution.elapsed_s is -0.1; give a finite number of seconds",
    ),
    "a physical line that is two": (
        lambda: Execution(LineStatus.OK, 0.0, ran=("x\ny",)),
        r"Execution.ran is 'x\ny'; give physical lines, each without its newline",
    ),
    "what ran as a text": (
        lambda: Execution(LineStatus.OK, 0.0, ran="x"),  # type: ignore[arg-type]
        "Execution.ran is 'x'; give a tuple, not a value of type str",
    ),
    "a failure of a kind that nobody knows": (
        lambda: Failure("SandboxFault", "lost"),  # type: ignore[arg-type]
        "Failure.kind is 'SandboxFault'; choose a FailureKind",
    ),
    "a console that answered nothing": (
        lambda: LineResult("", False, LineStatus.ANSWERED, None, 0.0),
        "LineResult.answer is None; status answered and an answer must agree",
    ),
    "a console that took less than no time": (
        lambda: LineResult("", False, LineStatus.OK, None, -1.0),
        "LineResult.elapsed_s is -1.0; give a finite number of seconds",
    ),
    "a chunk whose log probability is no number": (
        lambda: Chunk((1,), (math.nan,), ChunkEnd.STOP_ID, 0),
        "log probability nan; it is finite and <= 0",
    ),
    "a chunk with a probability above 1": (
        lambda: Chunk((1,), (3.0,), ChunkEnd.STOP_ID, 0),
        "log probability 3.0; it is finite and <= 0",
    ),
    "a chunk of unequal lists": (
        lambda: Chunk((1, 2), (-0.5,), ChunkEnd.STOP_ID, 0),
        "2 ids with 1 log probabilities; a chunk has at least one id and one log probability for each",
    ),
    "a chunk of lists": (
        lambda: Chunk(listed(1), (-0.5,), ChunkEnd.STOP_ID, 0),
        "Chunk.token_ids is [1]; give a tuple",
    ),
    "a negative temperature": (lambda: Sampling(temperature=-1), "temperature is -1; give a finite number, 0 or more"),
    "an infinite temperature": (lambda: Sampling(temperature=math.inf), "temperature is inf; give a finite number"),
    "a task without anything": (lambda: Task("", "", ""), "task.id is ''; it may not be empty"),
    "a task without a question": (lambda: Task("t", " ", "3"), "task.question is ' '; it may not be empty"),
    "follow-ups in a list": (
        lambda: Task("t", "q", "3", follow_ups=listed(FollowUp("q", "3"))),
        "task.follow_ups is [FollowUp(",
    ),
    "a follow-up without a question": (lambda: FollowUp("", "3"), "follow-up.question is ''; it may not be empty"),
    "a group whose outcome is no number": (
        lambda: GroupRewards.from_rows((math.nan, 1.0), ((), ())),
        "an outcome is nan; give a finite number, or None",
    ),
    "a group of unequal lists": (
        lambda: GroupRewards.from_rows((1.0,), ((), ())),
        "1 outcomes and 2 rows of line rewards; give one of each per rollout",
    ),
    "a line of less than no token": (
        lambda: LineRewards(0.0, tokens=-1),
        "a line has -1 tokens; give their number, or 0",
    ),
    "earnings of lines in a list": (
        lambda: RolloutRewards(1.0, listed(LineRewards(0.0))),
        "RolloutRewards.lines is a list; build it with a tuple",
    ),
    "a group of which some lines have a state": (
        lambda: GroupRewards((RolloutRewards(1.0, (LineRewards(0.0, state="a"), LineRewards(0.0))),)),
        "the state is None for some lines, and not for others; give one to each line of a group, or to none",
    ),
}

ALLOWED: dict[str, Callable[[], object]] = {
    "an answer in a rollout that ended otherwise": lambda: trajectory(Sampled((line(ANSWER),)), stop=Stop.MAX_LINES),
    "an answer on a line that was cut": lambda: trajectory(
        Sampled((line(ANSWER, LineEnd.LENGTH),)), stop=Stop.LINE_TOO_LONG
    ),
    "an outcome without a line": lambda: replace(trajectory(), outcome=0.0),
    "an executed line that no console was given": lambda: line(Execution(LineStatus.OK, 0.0)),
    "tokens without text": lambda: Observed("", (7,)),
    "a task without a reference answer": lambda: Task("t", "q", ""),
    "a console that asks on and says that all is well": lambda: LineResult("", True, LineStatus.OK, None, 0.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_state_is_refused_with_what_it_is_its_value_and_the_remedy(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ReplRLError) as refused:
        make()
    assert message in str(refused.value)
    assert "; " in str(refused.value), "what is wrong; what to do"


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed_can_be_written_down_and_the_specification_says_why(name: str) -> None:
    assert ALLOWED[name]() is not None
    page = (Path(__file__).parents[2] / "docs" / "specification.md").read_text()
    assert f"| {name} |" in page
