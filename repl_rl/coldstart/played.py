"""Plays plans as rollouts: a sampler drives, with the plan's writer in the place of the policy.

So the record of a demonstration is what a rollout of that sampler records: the same ids, the same masks.
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
    """A way of working that can be demonstrated."""

    sampler: Callable[[], RolloutSampler]
    plan: Callable[[Sketch, Mix, random.Random], Plan]
    printed: re.Pattern[str]
    """Finds in an observation, as its one group, what was printed."""
    by_line: bool
    """Each line is a chunk of its own; otherwise a piece of the plan is."""


PROTOCOLS = MappingProxyType(
    {
        "line": Protocol(ReplSampler, plan, re.compile(r"\A(.*?)\n?(?:>>>|\.\.\.) ?\Z", re.DOTALL), True),
        "fenced": Protocol(FencedCodeSampler, fenced_plan, re.compile(r"```output\n(.*?)\n?```\n\Z", re.DOTALL), False),
    }
)


@dataclass(frozen=True, slots=True)
class Course:
    """Which demonstrations are wanted."""

    families: tuple[str, ...]
    """They take turns."""
    mix: Mix
    count: int
    """How many are drawn (>= 1)."""
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
    """Demonstrations of training questions, in order; `tally` counts those that went another way than planned.

    No held-out question is ever among them. They have no outcome: all are meant to be learned, those that show a
    mistake too. Equal arguments give equal ids and masks where the Python is the same.

    Raises:
        ConfigError: there is no such family.
    """
    rng = random.Random(f"{course.seed}/transcripts")
    under_way: deque[asyncio.Task[Trajectory | None]] = deque()
    try:
        for n in range(course.count + concurrency):
            if n < course.count:
                family = course.families[n % len(course.families)]
                drawn = sketch(family, rng, Split.TRAIN)
                planned = PROTOCOLS[course.protocol].plan(drawn, course.mix, rng)
                playing = played(task_of(family, drawn), planned, course, sandbox, renderer)
                under_way.append(asyncio.create_task(playing))
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
    """One demonstration without its outcome; None where the rollout did not end as planned."""
    protocol = PROTOCOLS[course.protocol]
    writer = _Writer(planned, protocol, renderer)
    never = renderer.forbidden_ids
    engine = ScriptedEngine((), policy=writer, context_tokens=_CONTEXT_TOKENS, logprob=0.0, forbidden_ids=never)
    rollouts = Rollouts(engine, sandbox, renderer, protocol.sampler(), _LIMITS, course.template)
    (trajectory,) = await rollouts.collect([task])
    if writer.strayed or trajectory.stop is not (Stop.EOS if planned.end_token else Stop.ANSWERED):
        return None
    return _given(trajectory.ungraded(), planned.given)


class _Writer:
    """The policy of a scripted engine that writes a plan, and copies what it was shown last."""

    def __init__(self, planned: Plan, protocol: Protocol, renderer: Renderer) -> None:
        self._left = list(planned.lines)
        self._rest: Sequence[int] = ()
        """Ids of a piece that are written after the console has seen its first line: a blank line that closes a block,
        where the vocabulary has no id for both newlines."""
        self._printed = protocol.printed
        self._by_line = protocol.by_line
        self._renderer = renderer
        self._known = 0
        self._echo = ""
        self.strayed = False
        """It was to copy what was printed where no line, or more than one, had been printed."""

    def __call__(self, ids: Sequence[int]) -> Sequence[int]:
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
        """`piece` with the space after each prompt that the policy writes; a blank line closes a block as it is."""
        return re.sub(r"(?m)^(?=.)", " ", piece) if self._by_line and self._renderer.samples_space else piece

    def _up_to_a_line(self, ids: Sequence[int]) -> Sequence[int]:
        """`ids` up to the first that ends a line, where the engine stops; the others wait."""
        ends = [n for n, i in enumerate(ids, 1) if i in self._renderer.newline_ids] if self._by_line else []
        first = ends[0] if ends else len(ids)
        self._rest = ids[first:]
        return ids[:first]


def _given(trajectory: Trajectory, pieces: int) -> Trajectory:
    """The same with its first pieces, and what was shown after each, as part of the prompt."""
    if not pieces:
        return trajectory
    text, ids = trajectory.prompt.text, trajectory.prompt.token_ids
    for segment in trajectory.segments[: 2 * pieces]:
        written = (segment.text,) if isinstance(segment, Observed) else (line.text for line in segment.lines)
        text, ids = text + "".join(written), (*ids, *segment.token_ids)
    return replace(trajectory, prompt=Prompt(text, ids), segments=trajectory.segments[2 * pieces :])
