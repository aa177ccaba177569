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
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSampler, RolloutSettings
from repl_rl.rollout.retry import FaultRetries
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
    """Share with a mistake other than an immediate guess, such as a syntax error. Only some of them recover."""
    surprise: float = 0.0
    """Share whose code has other numbers and words than the question. The code is context; only the submission of its
    output is learned."""

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


def plan_demonstration(problem: Problem, mix: DemonstrationMix, rng: random.Random) -> DemonstrationPlan:
    """Draw one demonstration of `problem` for the line console."""
    # One draw chooses the kind by the shares of the mix.
    kind = rng.random()
    if kind < mix.guess:
        return DemonstrationPlan((_format_guess(problem),))
    if kind < mix.guess + mix.mistake:
        return rng.choices(_MISTAKES, _MISTAKE_WEIGHTS)[0](problem, rng)
    if kind < mix.guess + mix.mistake + mix.surprise:
        return _plan_surprise(problem, rng)
    return DemonstrationPlan(_plan_correct(problem, rng))


def _plan_correct(problem: Problem, rng: random.Random) -> tuple[str, ...]:
    """Return lines that compute the value, read it, and submit it."""
    # Some sums are computed in a loop, so that the policy learns blocks.
    if problem.expression.startswith("sum([") and rng.random() < 0.10:
        values = problem.expression.removeprefix("sum(").removesuffix(")")
        return ("total = 0\n", f"for n in {values}:\n", "    total += n\n\n", "total\n", _SUBMIT)
    return _plan_plain(problem)


def _plan_plain(problem: Problem) -> tuple[str, ...]:
    return (*_plan_setup(problem), f"{problem.expression}\n", _SUBMIT)


def _plan_setup(problem: Problem) -> tuple[str, ...]:
    return tuple(f"{line}\n" for line in problem.setup)


def _plan_surprise(problem: Problem, rng: random.Random) -> DemonstrationPlan:
    """Return a plan with other numbers and words, so that only the console shows the values, not the question."""
    computed = (alter_code(line, rng) for line in _plan_plain(problem)[:-1])
    return DemonstrationPlan((*computed, _SUBMIT), given_pieces=len(problem.setup) + 1)


def alter_code(code: str, rng: random.Random) -> str:
    """Return the same code with other numbers and other quoted words."""

    def choose_other(match: re.Match[str]) -> str:
        return "".join(rng.choice("123456789" if c.isdigit() else ascii_lowercase) for c in match[0])

    # A number after a minus sign stays, as in the slice `[::-1]`.
    return re.sub(r"(?<![-\d])\d+|(?<=')\w+(?=')", choose_other, code)


def guess_answer(problem: Problem) -> str:
    """Return an answer of the right type, as code, that is copied from the question without computing anything."""
    words = re.findall(_QUOTED, problem.question)
    if problem.answer.startswith("["):
        return str(re.findall(_LIST, problem.question)[-1])
    if problem.answer.isalpha() and words:
        return str(words[0])
    numbers = re.findall(_INTEGER, problem.question)
    return str(numbers[0]) if numbers else "0"


def make_wrong_formula(problem: Problem) -> str | None:
    """Return an expression that computes something else, or None if nothing in it can be swapped."""
    swap = {" + ": " - ", " - ": " + ", " * ": " + ", "max(": "min(", "sum(": "len(", "[::-1]": ".upper()"}
    for old, new in swap.items():
        if old in problem.expression:
            return problem.expression.replace(old, new, 1)
    return None


def make_missing_attribute(problem: Problem, rng: random.Random) -> str | None:
    """Return a call of a method that strings do not have, on the question's word, or None if it quotes no word."""
    if "'" not in problem.question:
        return None
    text = problem.question.split("'")[-2 if problem.question.startswith("Count") else 1]
    return f"'{text}'.{rng.choice(('sum', 'reverse', 'len'))}()"


def _format_guess(problem: Problem) -> str:
    return f"submit_final_answer({guess_answer(problem)})\n"


def _plan_after_failed_line(
    lines: tuple[str, ...], remaining: tuple[str, ...], problem: Problem, rng: random.Random
) -> DemonstrationPlan:
    """Draw what follows a line that the console refused: recovery, a guess, the same line again, or giving up."""
    # Not every demonstration recovers, because a cold start needs imperfect behavior to improve on.
    choice = rng.random()
    if choice < 0.35:
        return DemonstrationPlan((*lines, *remaining))
    if choice < 0.80:
        return DemonstrationPlan((*lines, _format_guess(problem)))
    if choice < 0.92:
        return DemonstrationPlan((*lines, lines[-1], _format_guess(problem)))
    return DemonstrationPlan(lines, end_token=True)


def _plan_undefined_name(problem: Problem, rng: random.Random) -> DemonstrationPlan:
    """Return a plan that uses a name before it is defined."""
    line = f"{problem.expression}\n" if problem.setup else "result\n"
    return _plan_after_failed_line((line,), _plan_plain(problem), problem, rng)


def _plan_bad_syntax(problem: Problem, rng: random.Random) -> DemonstrationPlan:
    """Return a plan with one closing bracket too many."""
    setup, remaining = _plan_setup(problem), (f"{problem.expression}\n", _SUBMIT)
    return _plan_after_failed_line((*setup, f"{problem.expression})\n"), remaining, problem, rng)


def _plan_missing_attribute(problem: Problem, rng: random.Random) -> DemonstrationPlan:
    """Return a plan that calls a method that strings do not have, or one with bad syntax if no word is quoted."""
    line = make_missing_attribute(problem, rng)
    if line is None:
        return _plan_bad_syntax(problem, rng)
    return _plan_after_failed_line((f"{line}\n",), _plan_plain(problem), problem, rng)


def _plan_ignored_value(problem: Problem, _: random.Random) -> DemonstrationPlan:
    """Return a plan that computes the value and submits a guess."""
    return DemonstrationPlan((*_plan_plain(problem)[:-1], _format_guess(problem)))


def _plan_wrong_formula(problem: Problem, rng: random.Random) -> DemonstrationPlan:
    """Return a plan that computes and submits another value."""
    formula = make_wrong_formula(problem)
    return (
        DemonstrationPlan((*_plan_setup(problem), f"{formula}\n", _SUBMIT))
        if formula
        else _plan_ignored_value(problem, rng)
    )


def _plan_late_bracket(problem: Problem, rng: random.Random) -> DemonstrationPlan:
    """Return a plan that forgets a closing bracket and types it in the next line."""
    if not problem.expression.endswith(")"):
        return _plan_undefined_name(problem, rng)
    return DemonstrationPlan((*_plan_setup(problem), f"{problem.expression[:-1]}\n", ")\n", _SUBMIT))


_MISTAKES: tuple[Callable[[Problem, random.Random], DemonstrationPlan], ...] = (
    _plan_undefined_name,
    _plan_bad_syntax,
    _plan_missing_attribute,
    _plan_ignored_value,
    _plan_wrong_formula,
    _plan_late_bracket,
)
_MISTAKE_WEIGHTS = (0.36, 0.33, 0.16, 0.05, 0.05, 0.05)


def plan_fenced_demonstration(problem: Problem, mix: DemonstrationMix, rng: random.Random) -> DemonstrationPlan:
    """Draw one demonstration of `problem` for `FencedCodeSampler`: fenced blocks of code, then a boxed answer."""
    kind = rng.random()
    if kind < mix.guess:
        return _plan_fenced_answer((), guess_answer(problem))
    if kind < mix.guess + mix.mistake:
        return _plan_fenced_mistake(problem, rng)
    blocks = _plan_fenced_blocks(problem, problem.expression)
    if kind < mix.guess + mix.mistake + mix.surprise:
        return _plan_fenced_answer([alter_code(block, rng) for block in blocks], ECHO, given_pieces=len(blocks))
    return _plan_fenced_answer(blocks, ECHO)


def _plan_fenced_answer(blocks: Sequence[str], answer: str, given_pieces: int = 0) -> DemonstrationPlan:
    """Return a plan with these blocks and a boxed answer, which has no quotes.

    The first `given_pieces` blocks are shown and not learned.
    """
    text = answer.removeprefix("'").removesuffix("'")
    return DemonstrationPlan((*blocks, f"\\boxed{{{text}}}"), end_token=True, given_pieces=given_pieces)


def _format_block(*lines: str) -> str:
    """Return a block of code up to its closing fence; later text comes from the sampler."""
    code = "\n".join(lines)
    return f"```python\n{code}\n```"


def _plan_fenced_blocks(problem: Problem, expression: str) -> tuple[str, ...]:
    """Return one block, or two if the next block depends on the value of a name."""
    if problem.setup and problem.setup[-1].isidentifier():
        *setup, name = problem.setup
        return _format_block(*setup, f"print({name})"), _format_block(f"print({expression})")
    # Only the console needs the empty line that closes a block of code.
    return (_format_block(*(line for line in problem.setup if line), f"print({expression})"),)


def _plan_fenced_mistake(problem: Problem, rng: random.Random) -> DemonstrationPlan:
    """Draw a plan with a mistake: a block that fails or prints nothing, or an answer that ignores the output."""
    blocks, wrong_formula = _plan_fenced_blocks(problem, problem.expression), make_wrong_formula(problem)
    kind = rng.random()
    if kind < 0.05:
        return _plan_fenced_answer(blocks, guess_answer(problem))
    if kind < 0.10 and wrong_formula is not None:
        return _plan_fenced_answer(_plan_fenced_blocks(problem, wrong_formula), ECHO)
    attribute = make_missing_attribute(problem, rng)
    undefined = f"print({problem.expression})" if problem.setup else "print(result)"
    # An undefined name, a syntax error, a value that is not printed, and a missing attribute.
    failing = [
        _format_block(undefined),
        _format_block(f"print({problem.expression}))"),
        _format_block(*problem.setup, problem.expression),
    ]
    failing += [_format_block(f"print({attribute})")] if attribute else []
    return _plan_after_failed_block(rng.choice(failing), blocks, problem, rng)


def _plan_after_failed_block(
    failed_block: str, blocks: Sequence[str], problem: Problem, rng: random.Random
) -> DemonstrationPlan:
    """Draw what follows a block that showed no value: recovery, a guess, the same block again, or giving up."""
    choice = rng.random()
    if choice < 0.35:
        return _plan_fenced_answer((failed_block, *blocks), ECHO)
    if choice < 0.80:
        return _plan_fenced_answer((failed_block,), guess_answer(problem))
    if choice < 0.92:
        return _plan_fenced_answer((failed_block, failed_block), guess_answer(problem))
    return DemonstrationPlan((failed_block,), end_token=True)


@dataclass(frozen=True, slots=True)
class DemonstrationProtocol:
    """Sampler protocol for which demonstrations can be written."""

    sampler: Callable[[], RolloutSampler]
    plan: Callable[[Problem, DemonstrationMix, random.Random], DemonstrationPlan]
    printed_pattern: re.Pattern[str]
    """Pattern that finds the printed text in an observation, as its one group."""
    by_line: bool
    """True if the policy writes one line per engine call; False if it writes one piece of the plan per call."""


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
    spec: DemonstrationSpec, sandbox: Sandbox, renderer: Renderer, counts: DemonstrationCounts, concurrency: int = 8
) -> AsyncIterator[Trajectory]:
    """Yield demonstrations of training questions, in order; `counts` counts those that deviated from their plan.

    No held-out question is among them. They have no outcome, because all are meant to be learned, including those with
    a mistake. Equal arguments give equal ids and masks with the same Python.

    Raises:
        ConfigError: a family does not exist.
    """
    rng = random.Random(f"{spec.seed}/transcripts")
    running: deque[asyncio.Task[Trajectory | None]] = deque()
    try:
        # Keep `concurrency` rollouts running, and yield them in the order in which they were drawn.
        for n in range(spec.count + concurrency):
            if n < spec.count:
                family = spec.families[n % len(spec.families)]
                problem = draw_problem(family, rng, Split.TRAIN)
                plan = PROTOCOLS[spec.protocol].plan(problem, spec.mix, rng)
                rollout = play_demonstration(make_task(family, problem), plan, spec, sandbox, renderer)
                running.append(asyncio.create_task(rollout))
            # At the end no new rollouts start; the remaining iterations drain the queue.
            if n < concurrency - 1 or not running:
                continue
            trajectory = await running.popleft()
            if trajectory is None:
                counts.rejected["went another way than planned"] += 1
                continue
            counts.complete += 1
            yield replace(
                trajectory, id=f"demonstration-{spec.seed}-{counts.accepted_count + counts.rejected.total() - 1}"
            )
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def play_demonstration(
    task: Task, plan: DemonstrationPlan, spec: DemonstrationSpec, sandbox: Sandbox, renderer: Renderer
) -> Trajectory | None:
    """Run one demonstration and return it without its outcome, or None if it did not end as planned."""
    protocol = PROTOCOLS[spec.protocol]
    policy = _PlanPolicy(plan, protocol, renderer)
    never = renderer.forbidden_ids
    engine = ScriptedEngine((), policy=policy, context_tokens=_CONTEXT_TOKENS, logprob=0.0, forbidden_ids=never)
    settings, hooks = RolloutSettings(spec.template), (FaultRetries(),)
    rollouts = Rollouts(engine, sandbox, renderer, protocol.sampler(), _LIMITS, settings, hooks)
    (trajectory,) = await rollouts.collect([task])
    # A wrong copy or an early end would teach something other than the plan.
    if policy.diverged or trajectory.stop is not (Stop.EOS if plan.end_token else Stop.ANSWERED):
        return None
    return _move_pieces_to_prompt(trajectory.without_outcome(), plan.given_pieces)


class _PlanPolicy:
    """Policy of a scripted engine that writes a plan and copies the last output."""

    def __init__(self, plan: DemonstrationPlan, protocol: DemonstrationProtocol, renderer: Renderer) -> None:
        self._pieces_left = list(plan.lines)
        self._unwritten_ids: Sequence[int] = ()
        """Ids to write after the console has executed the first line of their piece.

        Such a piece ends in a blank line that closes a block, and the vocabulary has no id for both newlines.
        """
        self._printed_pattern = protocol.printed_pattern
        self._by_line = protocol.by_line
        self._renderer = renderer
        self._seen_ids = 0
        self._echo = ""
        self.diverged = False
        """True if an output to copy was empty or longer than one line."""

    def __call__(self, ids: Sequence[int]) -> Sequence[int]:
        # Look only at the text since the last call, which ends in the newest observation.
        match = self._printed_pattern.search(self._renderer.decode(ids[self._seen_ids :])) if self._seen_ids else None
        self._echo = match[1] if match else ""
        written = self._get_next_ids()
        self._seen_ids = len(ids) + len(written)
        return written

    def _get_next_ids(self) -> Sequence[int]:
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
        count = ends[0] if ends else len(ids)
        self._unwritten_ids = ids[count:]
        return ids[:count]


def _move_pieces_to_prompt(trajectory: Trajectory, pieces: int) -> Trajectory:
    """Return the trajectory with its first pieces, and the observation after each, moved into the prompt."""
    if not pieces:
        return trajectory
    text, ids = trajectory.prompt.text, trajectory.prompt.token_ids
    for segment in trajectory.segments[: 2 * pieces]:
        texts = (segment.text,) if isinstance(segment, Observed) else (line.text for line in segment.lines)
        text, ids = text + "".join(texts), (*ids, *segment.token_ids)
    return replace(trajectory, prompt=Prompt(text, ids), segments=trajectory.segments[2 * pieces :])
