"""Demonstration rollouts: a sampler runs with a plan's writer in place of the policy.

A demonstration is recorded like any rollout of that sampler, with the same ids and the same masks.
"""

import asyncio
import random
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from repl_rl.coldstart.demonstrations import ECHO, Mix, Plan, plan
from repl_rl.coldstart.fenced import fenced_plan
from repl_rl.coldstart.verified import Tally
from repl_rl.engine import ScriptedEngine
from repl_rl.errors import ConfigError
from repl_rl.record.trajectory import Observed, Prompt, Stop, Trajectory
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSampler
from repl_rl.rollout.limits import RolloutLimits
from repl_rl.rollout.renderer import Renderer
from repl_rl.samplers.fenced import FencedCodeSampler
from repl_rl.sandbox.base import Sandbox
from repl_rl.tasks import Sketch, Split, Task, sketch, task_of

_LIMITS = RolloutLimits(max_lines=64, max_line_tokens=512, max_observation_tokens=512)
_CONTEXT_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Protocol:
    """Sampler protocol for which demonstrations can be written."""

    sampler: Callable[[], RolloutSampler]
    plan: Callable[[Sketch, Mix, random.Random], Plan]
    printed: re.Pattern[str]
    """Pattern that finds the printed text in an observation, as its one group."""
    by_line: bool
    """True if each line is one chunk; False if each piece of the plan is."""


PROTOCOLS = MappingProxyType(
    {
        "line": Protocol(ReplSampler, plan, re.compile(r"\A(.*?)\n?(?:>>>|\.\.\.) ?\Z", re.DOTALL), True),
        "fenced": Protocol(FencedCodeSampler, fenced_plan, re.compile(r"```output\n(.*?)\n?```\n\Z", re.DOTALL), False),
    }
)


@dataclass(frozen=True, slots=True)
class Course:
    """Settings of a set of demonstrations."""

    families: tuple[str, ...]
    """Task families, used alternately."""
    mix: Mix
    count: int
    """Number of demonstrations to draw (>= 1)."""
    seed: int = 0
    protocol: str = "line"
    """One of `PROTOCOLS`."""
    template: str = "bare"
    """Prompt template."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError("number of demonstrations", self.count, "ask for at least 1")
        if self.protocol not in PROTOCOLS:
            raise ConfigError("protocol", self.protocol, f"choose one of {', '.join(PROTOCOLS)}")


async def demonstrations(
    course: Course, sandbox: Sandbox, renderer: Renderer, tally: Tally, concurrency: int = 8
) -> AsyncIterator[Trajectory]:
    """Yield demonstrations of training questions, in order; `tally` counts those that deviated from their plan.

    No held-out question is among them. They have no outcome, because all are meant to be learned, including those with
    a mistake. Equal arguments give equal ids and masks with the same Python.

    Raises:
        ConfigError: a family does not exist.
    """
    rng = random.Random(f"{course.seed}/transcripts")
    under_way: deque[asyncio.Task[Trajectory | None]] = deque()
    try:
        # Keep `concurrency` rollouts running, and yield them in the order in which they were drawn.
        for n in range(course.count + concurrency):
            if n < course.count:
                family = course.families[n % len(course.families)]
                drawn = sketch(family, rng, Split.TRAIN)
                planned = PROTOCOLS[course.protocol].plan(drawn, course.mix, rng)
                playing = played(task_of(family, drawn), planned, course, sandbox, renderer)
                under_way.append(asyncio.create_task(playing))
            # At the end no new rollouts start; the remaining iterations drain the queue.
            if n < concurrency - 1 or not under_way:
                continue
            trajectory = await under_way.popleft()
            if trajectory is None:
                tally.dropped["went another way than planned"] += 1
                continue
            tally.whole += 1
            yield replace(trajectory, id=f"demonstration-{course.seed}-{tally.kept + tally.dropped.total() - 1}")
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


async def played(task: Task, planned: Plan, course: Course, sandbox: Sandbox, renderer: Renderer) -> Trajectory | None:
    """Run one demonstration and return it without its outcome, or None if it did not end as planned."""
    protocol = PROTOCOLS[course.protocol]
    writer = _Writer(planned, protocol, renderer)
    never = renderer.forbidden_ids
    engine = ScriptedEngine((), policy=writer, context_tokens=_CONTEXT_TOKENS, logprob=0.0, forbidden_ids=never)
    rollouts = Rollouts(engine, sandbox, renderer, protocol.sampler(), _LIMITS, course.template)
    (trajectory,) = await rollouts.collect([task])
    # A wrong copy or an early end would teach something other than the plan.
    if writer.strayed or trajectory.stop is not (Stop.EOS if planned.end_token else Stop.ANSWERED):
        return None
    return _given(trajectory.ungraded(), planned.given)


class _Writer:
    """Policy of a scripted engine that writes a plan and copies the last output."""

    def __init__(self, planned: Plan, protocol: Protocol, renderer: Renderer) -> None:
        self._left = list(planned.lines)
        self._rest: Sequence[int] = ()
        """Ids to write after the console has executed the first line of their piece.

        Such a piece ends in a blank line that closes a block, and the vocabulary has no id for both newlines.
        """
        self._printed = protocol.printed
        self._by_line = protocol.by_line
        self._renderer = renderer
        self._known = 0
        self._echo = ""
        self.strayed = False
        """True if an output to copy was empty or longer than one line."""

    def __call__(self, ids: Sequence[int]) -> Sequence[int]:
        # Look only at the text since the last call, which ends in the newest observation.
        found = self._printed.search(self._renderer.decode(ids[self._known :])) if self._known else None
        self._echo = found[1] if found else ""
        written = self._next()
        self._known = len(ids) + len(written)
        return written

    def _next(self) -> Sequence[int]:
        if self._rest:
            return self._up_to_a_line(self._rest)
        if not self._left:
            return (self._renderer.end_id,)
        piece = self._left.pop(0)
        self.strayed |= ECHO in piece and (not self._echo or "\n" in self._echo)
        return self._up_to_a_line(self._renderer.written(self._after_prompts(piece.replace(ECHO, self._echo))))

    def _after_prompts(self, piece: str) -> str:
        """Return `piece` with the space after each prompt that the policy writes; a blank line gets no space."""
        return re.sub(r"(?m)^(?=.)", " ", piece) if self._by_line and self._renderer.samples_space else piece

    def _up_to_a_line(self, ids: Sequence[int]) -> Sequence[int]:
        """Return `ids` up to the first that ends a line, where the engine stops, and store the rest."""
        # A chunk of the line protocol ends at a newline token, as the engine's chunks do.
        ends = [n for n, i in enumerate(ids, 1) if i in self._renderer.newline_ids] if self._by_line else []
        first = ends[0] if ends else len(ids)
        self._rest = ids[first:]
        return ids[:first]


def _given(trajectory: Trajectory, pieces: int) -> Trajectory:
    """Return the trajectory with its first pieces, and the observation after each, moved into the prompt."""
    if not pieces:
        return trajectory
    text, ids = trajectory.prompt.text, trajectory.prompt.token_ids
    for segment in trajectory.segments[: 2 * pieces]:
        written = (segment.text,) if isinstance(segment, Observed) else (line.text for line in segment.lines)
        text, ids = text + "".join(written), (*ids, *segment.token_ids)
    return replace(trajectory, prompt=Prompt(text, ids), segments=trajectory.segments[2 * pieces :])
