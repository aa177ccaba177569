"""Demonstrations of generated tasks: plans, good and bad, and the rollouts that execute them.

A plan is drawn from a task family's sketch. It holds the lines or fenced blocks to type, but not the submitted value.
The placeholder `ECHO` is replaced by the last output, so a demonstration answers with what it observed and never with
the known answer.

The parts in order: plans for the line console, plans for `FencedCodeSampler`, rollouts. In a rollout the sampler runs
with the plan's writer in place of the policy. It is recorded like any rollout of that sampler, with the same ids and
the same masks.
"""

import asyncio
import random
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from string import ascii_lowercase
from types import MappingProxyType

from repl_rl.engine import ScriptedEngine
from repl_rl.errors import ConfigError
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSampler
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.samplers.fenced_code_sampler import FencedCodeSampler
from repl_rl.sandbox.base import Sandbox
from repl_rl.sft.demonstrations_from_doctests import DemonstrationCounts
from repl_rl.tasks import Problem, Split, Task, draw_problem, make_task
from repl_rl.trajectory.trajectory import Observed, Prompt, Stop, Trajectory

ECHO = "{echo}"
"""Placeholder in a plan's text for the last output, without its newline."""

_INTEGER, _QUOTED, _LIST = r"\d+", r"'\w+'", r"\[.*?\]"
_SUBMIT = f"submit_final_answer({ECHO})\n"
_LIMITS = RolloutLimits(max_lines=64, max_line_tokens=512, max_observation_tokens=512)
_CONTEXT_TOKENS = 1 << 20
"""Context of the scripted engine, which no demonstration fills."""


@dataclass(frozen=True, slots=True)
class DemonstrationPlan:
    """Pieces of text to type: a line with its newline (two newlines end a block), or text up to a watched string."""

    lines: tuple[str, ...]
    end_token: bool = False
    """True if the writer ends with the end token; in the console that means that it gives up without an answer."""
    given_pieces: int = 0
    """Number of pieces at the beginning that are shown but not learned."""


@dataclass(frozen=True, slots=True)
class DemonstrationMix:
    """Shares of the kinds of demonstrations; they sum to 1."""

    guess: float
    """Share that submits at once, without computing anything."""
    mistake: float
    """Share that makes another mistake, and recovers from it or gives up."""
    surprise: float = 0.0
    """Share that gets lines with another result than the question asks for, and learns to submit their output."""

    @property
    def correct(self) -> float:
        """Share that computes, reads the value, and submits it."""
        return 1.0 - self.guess - self.mistake - self.surprise


CLEAN = DemonstrationMix(guess=0.0, mistake=0.0)
"""Only correct demonstrations: compute, read, copy."""
WARM = DemonstrationMix(guess=0.05, mistake=0.20, surprise=0.20)
"""Demonstrations that teach the console, with errors and recoveries; `COLD` adds nothing but other shares."""
COLD = DemonstrationMix(guess=0.56, mistake=0.22, surprise=0.03)
"""Demonstrations for a cold start whose most likely path is wrong, while the correct one is still sampled."""
MIXES = MappingProxyType({"clean": CLEAN, "warm": WARM, "cold": COLD})


def plan_demonstration(drawn: Problem, mix: DemonstrationMix, rng: random.Random) -> DemonstrationPlan:
    """Draw one demonstration of `drawn` for the line console."""
    # One draw chooses the kind by the shares of the mix.
    kind = rng.random()
    if kind < mix.guess:
        return DemonstrationPlan((_format_guess(drawn),))
    if kind < mix.guess + mix.mistake:
        return rng.choices(_MISTAKES, _MISTAKE_WEIGHTS)[0](drawn, rng)
    if kind < mix.guess + mix.mistake + mix.surprise:
        return _plan_surprise(drawn, rng)
    return DemonstrationPlan(_plan_correct(drawn, rng))


def _plan_correct(drawn: Problem, rng: random.Random) -> tuple[str, ...]:
    """Return lines that compute the value, read it, and submit it."""
    # Some sums are computed in a loop, so that the policy learns blocks.
    if drawn.expression.startswith("sum([") and rng.random() < 0.10:
        values = drawn.expression.removeprefix("sum(").removesuffix(")")
        return ("total = 0\n", f"for n in {values}:\n", "    total += n\n\n", "total\n", _SUBMIT)
    return _plan_plain(drawn)


def _plan_plain(drawn: Problem) -> tuple[str, ...]:
    return (*_plan_setup(drawn), f"{drawn.expression}\n", _SUBMIT)


def _plan_setup(drawn: Problem) -> tuple[str, ...]:
    return tuple(f"{line}\n" for line in drawn.setup)


def _plan_surprise(drawn: Problem, rng: random.Random) -> DemonstrationPlan:
    """Return a plan with other numbers and words, so that only the console shows the values, not the question."""
    computed = (alter_code(line, rng) for line in _plan_plain(drawn)[:-1])
    return DemonstrationPlan((*computed, _SUBMIT), given_pieces=len(drawn.setup) + 1)


def alter_code(code: str, rng: random.Random) -> str:
    """Return the same code with other numbers and other quoted words."""

    def choose_other(match: re.Match[str]) -> str:
        return "".join(rng.choice("123456789" if c.isdigit() else ascii_lowercase) for c in match[0])

    # A number after a minus sign stays, as in the slice `[::-1]`.
    return re.sub(r"(?<![-\d])\d+|(?<=')\w+(?=')", choose_other, code)


def guess_answer(drawn: Problem) -> str:
    """Return an answer of the right type, as code, that is copied from the question without computing anything."""
    words = re.findall(_QUOTED, drawn.question)
    if drawn.answer.startswith("["):
        return str(re.findall(_LIST, drawn.question)[-1])
    if drawn.answer.isalpha() and words:
        return str(words[0])
    numbers = re.findall(_INTEGER, drawn.question)
    return str(numbers[0]) if numbers else "0"


def make_wrong_formula(drawn: Problem) -> str | None:
    """Return an expression that computes something else, or None if nothing in it can be swapped."""
    swap = {" + ": " - ", " - ": " + ", " * ": " + ", "max(": "min(", "sum(": "len(", "[::-1]": ".upper()"}
    for old, new in swap.items():
        if old in drawn.expression:
            return drawn.expression.replace(old, new, 1)
    return None


def make_missing_attribute(drawn: Problem, rng: random.Random) -> str | None:
    """Return a call of a method that strings do not have, on the question's word, or None if it quotes no word."""
    if "'" not in drawn.question:
        return None
    text = drawn.question.split("'")[-2 if drawn.question.startswith("Count") else 1]
    return f"'{text}'.{rng.choice(('sum', 'reverse', 'len'))}()"


def _format_guess(drawn: Problem) -> str:
    return f"submit_final_answer({guess_answer(drawn)})\n"


def _plan_after_failed_line(
    lines: tuple[str, ...], remaining: tuple[str, ...], drawn: Problem, rng: random.Random
) -> DemonstrationPlan:
    """Draw what follows a line that the console refused: recovery, a guess, the same line again, or giving up."""
    # Not every demonstration recovers, because a cold start needs imperfect behavior to improve on.
    choice = rng.random()
    if choice < 0.35:
        return DemonstrationPlan((*lines, *remaining))
    if choice < 0.80:
        return DemonstrationPlan((*lines, _format_guess(drawn)))
    if choice < 0.92:
        return DemonstrationPlan((*lines, lines[-1], _format_guess(drawn)))
    return DemonstrationPlan(lines, end_token=True)


def _plan_undefined_name(drawn: Problem, rng: random.Random) -> DemonstrationPlan:
    """Return a plan that uses a name before it is defined."""
    line = f"{drawn.expression}\n" if drawn.setup else "result\n"
    return _plan_after_failed_line((line,), _plan_plain(drawn), drawn, rng)


def _plan_bad_syntax(drawn: Problem, rng: random.Random) -> DemonstrationPlan:
    """Return a plan with one closing bracket too many."""
    setup, after = _plan_setup(drawn), (f"{drawn.expression}\n", _SUBMIT)
    return _plan_after_failed_line((*setup, f"{drawn.expression})\n"), after, drawn, rng)


def _plan_missing_attribute(drawn: Problem, rng: random.Random) -> DemonstrationPlan:
    """Return a plan that calls a method that strings do not have, or one with bad syntax if no word is quoted."""
    line = make_missing_attribute(drawn, rng)
    if line is None:
        return _plan_bad_syntax(drawn, rng)
    return _plan_after_failed_line((f"{line}\n",), _plan_plain(drawn), drawn, rng)


def _plan_ignored_value(drawn: Problem, _: random.Random) -> DemonstrationPlan:
    """Return a plan that computes the value and submits a guess."""
    return DemonstrationPlan((*_plan_plain(drawn)[:-1], _format_guess(drawn)))


def _plan_wrong_formula(drawn: Problem, rng: random.Random) -> DemonstrationPlan:
    """Return a plan that computes and submits another value."""
    wrong = make_wrong_formula(drawn)
    return DemonstrationPlan((*_plan_setup(drawn), f"{wrong}\n", _SUBMIT)) if wrong else _plan_ignored_value(drawn, rng)


def _plan_late_bracket(drawn: Problem, rng: random.Random) -> DemonstrationPlan:
    """Return a plan that forgets a closing bracket and types it in the next line."""
    if not drawn.expression.endswith(")"):
        return _plan_undefined_name(drawn, rng)
    return DemonstrationPlan((*_plan_setup(drawn), f"{drawn.expression[:-1]}\n", ")\n", _SUBMIT))


_MISTAKES: tuple[Callable[[Problem, random.Random], DemonstrationPlan], ...] = (
    _plan_undefined_name,
    _plan_bad_syntax,
    _plan_missing_attribute,
    _plan_ignored_value,
    _plan_wrong_formula,
    _plan_late_bracket,
)
_MISTAKE_WEIGHTS = (0.36, 0.33, 0.16, 0.05, 0.05, 0.05)


def plan_fenced_demonstration(drawn: Problem, mix: DemonstrationMix, rng: random.Random) -> DemonstrationPlan:
    """Draw one demonstration of `drawn` for `FencedCodeSampler`: fenced blocks of code, then a boxed answer."""
    kind = rng.random()
    if kind < mix.guess:
        return _plan_fenced_answer((), guess_answer(drawn))
    if kind < mix.guess + mix.mistake:
        return _plan_fenced_mistake(drawn, rng)
    good = _plan_fenced_blocks(drawn, drawn.expression)
    if kind < mix.guess + mix.mistake + mix.surprise:
        return _plan_fenced_answer([alter_code(block, rng) for block in good], ECHO, given=len(good))
    return _plan_fenced_answer(good, ECHO)


def _plan_fenced_answer(blocks: Sequence[str], answer: str, given: int = 0) -> DemonstrationPlan:
    """Return a plan with these blocks and a boxed answer, which has no quotes. The first `given` blocks are shown."""
    text = answer.removeprefix("'").removesuffix("'")
    return DemonstrationPlan((*blocks, f"\\boxed{{{text}}}"), end_token=True, given_pieces=given)


def _format_block(*lines: str) -> str:
    """Return a block of code up to its closing fence; later text comes from the sampler."""
    code = "\n".join(lines)
    return f"```python\n{code}\n```"


def _plan_fenced_blocks(drawn: Problem, expression: str) -> tuple[str, ...]:
    """Return one block, or two if the next block depends on the value of a name."""
    if drawn.setup and drawn.setup[-1].isidentifier():
        *setup, name = drawn.setup
        return _format_block(*setup, f"print({name})"), _format_block(f"print({expression})")
    # Only the console needs the empty line that closes a block of code.
    return (_format_block(*(line for line in drawn.setup if line), f"print({expression})"),)


def _plan_fenced_mistake(drawn: Problem, rng: random.Random) -> DemonstrationPlan:
    """Draw a plan with a mistake: a block that fails or prints nothing, or an answer that ignores the output."""
    good, wrong = _plan_fenced_blocks(drawn, drawn.expression), make_wrong_formula(drawn)
    kind = rng.random()
    if kind < 0.05:
        return _plan_fenced_answer(good, guess_answer(drawn))
    if kind < 0.10 and wrong is not None:
        return _plan_fenced_answer(_plan_fenced_blocks(drawn, wrong), ECHO)
    attribute = make_missing_attribute(drawn, rng)
    undefined = f"print({drawn.expression})" if drawn.setup else "print(result)"
    # An undefined name, a syntax error, a value that is not printed, and a missing attribute.
    failing = [
        _format_block(undefined),
        _format_block(f"print({drawn.expression}))"),
        _format_block(*drawn.setup, drawn.expression),
    ]
    failing += [_format_block(f"print({attribute})")] if attribute else []
    return _plan_after_failed_block(rng.choice(failing), good, drawn, rng)


def _plan_after_failed_block(failed: str, good: Sequence[str], drawn: Problem, rng: random.Random) -> DemonstrationPlan:
    """Draw what follows a block that showed no value: recovery, a guess, the same block again, or giving up."""
    choice = rng.random()
    if choice < 0.35:
        return _plan_fenced_answer((failed, *good), ECHO)
    if choice < 0.80:
        return _plan_fenced_answer((failed,), guess_answer(drawn))
    if choice < 0.92:
        return _plan_fenced_answer((failed, failed), guess_answer(drawn))
    return DemonstrationPlan((failed,), end_token=True)


@dataclass(frozen=True, slots=True)
class DemonstrationProtocol:
    """Sampler protocol for which demonstrations can be written."""

    sampler: Callable[[], RolloutSampler]
    plan: Callable[[Problem, DemonstrationMix, random.Random], DemonstrationPlan]
    printed_pattern: re.Pattern[str]
    """Pattern that finds the printed text in an observation, as its one group."""
    by_line: bool
    """True if each line is one chunk; False if each piece of the plan is."""


PROTOCOLS = MappingProxyType(
    {
        "line": DemonstrationProtocol(
            ReplSampler, plan_demonstration, re.compile(r"\A(.*?)\n?(?:>>>|\.\.\.) ?\Z", re.DOTALL), True
        ),
        "fenced": DemonstrationProtocol(
            FencedCodeSampler, plan_fenced_demonstration, re.compile(r"```output\n(.*?)\n?```\n\Z", re.DOTALL), False
        ),
    }
)


@dataclass(frozen=True, slots=True)
class DemonstrationSpec:
    """Settings of a set of demonstrations."""

    families: tuple[str, ...]
    """Task families, used alternately."""
    mix: DemonstrationMix
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


async def generate_demonstrations(
    course: DemonstrationSpec, sandbox: Sandbox, renderer: Renderer, tally: DemonstrationCounts, concurrency: int = 8
) -> AsyncIterator[Trajectory]:
    """Yield demonstrations of training questions, in order; `tally` counts those that deviated from their plan.

    No held-out question is among them. They have no outcome, because all are meant to be learned, including those with
    a mistake. Equal arguments give equal ids and masks with the same Python.

    Raises:
        ConfigError: a family does not exist.
    """
    rng = random.Random(f"{course.seed}/transcripts")
    running: deque[asyncio.Task[Trajectory | None]] = deque()
    try:
        # Keep `concurrency` rollouts running, and yield them in the order in which they were drawn.
        for n in range(course.count + concurrency):
            if n < course.count:
                family = course.families[n % len(course.families)]
                drawn = draw_problem(family, rng, Split.TRAIN)
                planned = PROTOCOLS[course.protocol].plan(drawn, course.mix, rng)
                playing = play_demonstration(make_task(family, drawn), planned, course, sandbox, renderer)
                running.append(asyncio.create_task(playing))
            # At the end no new rollouts start; the remaining iterations drain the queue.
            if n < concurrency - 1 or not running:
                continue
            trajectory = await running.popleft()
            if trajectory is None:
                tally.rejected["went another way than planned"] += 1
                continue
            tally.complete += 1
            yield replace(
                trajectory, id=f"demonstration-{course.seed}-{tally.accepted_count + tally.rejected.total() - 1}"
            )
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def play_demonstration(
    task: Task, planned: DemonstrationPlan, course: DemonstrationSpec, sandbox: Sandbox, renderer: Renderer
) -> Trajectory | None:
    """Run one demonstration and return it without its outcome, or None if it did not end as planned."""
    protocol = PROTOCOLS[course.protocol]
    writer = _PlanPolicy(planned, protocol, renderer)
    never = renderer.forbidden_ids
    engine = ScriptedEngine((), policy=writer, context_tokens=_CONTEXT_TOKENS, logprob=0.0, forbidden_ids=never)
    rollouts = Rollouts(engine, sandbox, renderer, protocol.sampler(), _LIMITS, course.template)
    (trajectory,) = await rollouts.collect([task])
    # A wrong copy or an early end would teach something other than the plan.
    if writer.diverged or trajectory.stop is not (Stop.EOS if planned.end_token else Stop.ANSWERED):
        return None
    return _move_pieces_to_prompt(trajectory.without_outcome(), planned.given_pieces)


class _PlanPolicy:
    """Policy of a scripted engine that writes a plan and copies the last output."""

    def __init__(self, planned: DemonstrationPlan, protocol: DemonstrationProtocol, renderer: Renderer) -> None:
        self._pieces_left = list(planned.lines)
        self._unwritten_ids: Sequence[int] = ()
        """Ids to write after the console has executed the first line of their piece.

        Such a piece ends in a blank line that closes a block, and the vocabulary has no id for both newlines.
        """
        self._printed = protocol.printed_pattern
        self._by_line = protocol.by_line
        self._renderer = renderer
        self._known = 0
        self._echo = ""
        self.diverged = False
        """True if an output to copy was empty or longer than one line."""

    def __call__(self, ids: Sequence[int]) -> Sequence[int]:
        # Look only at the text since the last call, which ends in the newest observation.
        found = self._printed.search(self._renderer.decode(ids[self._known :])) if self._known else None
        self._echo = found[1] if found else ""
        written = self._next_ids()
        self._known = len(ids) + len(written)
        return written

    def _next_ids(self) -> Sequence[int]:
        if self._unwritten_ids:
            return self._take_line_ids(self._unwritten_ids)
        if not self._pieces_left:
            return (self._renderer.end_id,)
        piece = self._pieces_left.pop(0)
        self.diverged |= ECHO in piece and (not self._echo or "\n" in self._echo)
        return self._take_line_ids(
            self._renderer.encode_as_sampled(self._add_prompt_space(piece.replace(ECHO, self._echo)))
        )

    def _add_prompt_space(self, piece: str) -> str:
        """Return `piece` with the space after each prompt that the policy writes; a blank line gets no space."""
        return re.sub(r"(?m)^(?=.)", " ", piece) if self._by_line and self._renderer.samples_space else piece

    def _take_line_ids(self, ids: Sequence[int]) -> Sequence[int]:
        """Return `ids` up to the first that ends a line, where the engine stops, and store the rest."""
        # A chunk of the line protocol ends at a newline token, as the engine's chunks do.
        ends = [n for n, i in enumerate(ids, 1) if i in self._renderer.newline_ids] if self._by_line else []
        first = ends[0] if ends else len(ids)
        self._unwritten_ids = ids[first:]
        return ids[:first]


def _move_pieces_to_prompt(trajectory: Trajectory, pieces: int) -> Trajectory:
    """Return the trajectory with its first pieces, and the observation after each, moved into the prompt."""
    if not pieces:
        return trajectory
    text, ids = trajectory.prompt.text, trajectory.prompt.token_ids
    for segment in trajectory.segments[: 2 * pieces]:
        written = (segment.text,) if isinstance(segment, Observed) else (line.text for line in segment.lines)
        text, ids = text + "".join(written), (*ids, *segment.token_ids)
    return replace(trajectory, prompt=Prompt(text, ids), segments=trajectory.segments[2 * pieces :])
