"""Plans of console rollouts, good and bad, drawn from a task family's sketch. Pure: nothing is executed here.

A plan says what the writer types. What it submits is not in the plan: `ECHO` stands for whatever was printed last, so a
demonstration answers with what was observed and never with what is known.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from string import ascii_lowercase
from types import MappingProxyType

from repl_rl.tasks import Sketch

ECHO = "{echo}"
"""In a plan's text: what was printed last, without its newline."""

_INTEGER, _QUOTED, _LIST = r"\d+", r"'\w+'", r"\[.*?\]"
_SUBMIT = f"submit_final_answer({ECHO})\n"


@dataclass(frozen=True, slots=True)
class Plan:
    """What the writer types, piece by piece: a line with its newline (two close a block), or text up to a watch."""

    lines: tuple[str, ...]
    end_token: bool = False
    """The writer ends with the end token: in the console without an answer, so it gives up."""
    given: int = 0
    """So many pieces at the beginning are shown but not learned."""


@dataclass(frozen=True, slots=True)
class Mix:
    """How often each kind of demonstration occurs; the shares sum to 1."""

    guess: float
    """Submits at once, without computing anything."""
    mistake: float
    """Makes another mistake, and recovers from it or gives up."""
    surprise: float = 0.0
    """Is given lines that compute something else than the question asks, and learns to submit what they showed."""

    @property
    def good(self) -> float:
        """Computes, looks at the value, submits it."""
        return 1.0 - self.guess - self.mistake - self.surprise


CLEAN = Mix(guess=0.0, mistake=0.0)
"""Computing, reading, copying, and nothing else."""
WARM = Mix(guess=0.05, mistake=0.20, surprise=0.20)
"""Teaches the console itself, errors and recoveries included, so that nothing is new in `COLD` but the shares."""
COLD = Mix(guess=0.56, mistake=0.22, surprise=0.03)
"""Makes a cold start whose most likely path is wrong, while the good one is still sampled."""
MIXES = MappingProxyType({"clean": CLEAN, "warm": WARM, "cold": COLD})


def plan(drawn: Sketch, mix: Mix, rng: random.Random) -> Plan:
    """Draw one demonstration of `drawn`."""
    kind = rng.random()
    if kind < mix.guess:
        return Plan((_guess(drawn),))
    if kind < mix.guess + mix.mistake:
        return rng.choices(_MISTAKES, _MISTAKE_WEIGHTS)[0](drawn, rng)
    if kind < mix.guess + mix.mistake + mix.surprise:
        return _surprise(drawn, rng)
    return Plan(_good(drawn, rng))


def _good(drawn: Sketch, rng: random.Random) -> tuple[str, ...]:
    if drawn.expression.startswith("sum([") and rng.random() < 0.10:
        values = drawn.expression.removeprefix("sum(").removesuffix(")")
        return ("total = 0\n", f"for n in {values}:\n", "    total += n\n\n", "total\n", _SUBMIT)
    return _plain(drawn)


def _plain(drawn: Sketch) -> tuple[str, ...]:
    return (*_setup(drawn), f"{drawn.expression}\n", _SUBMIT)


def _setup(drawn: Sketch) -> tuple[str, ...]:
    return tuple(f"{line}\n" for line in drawn.setup)


def _surprise(drawn: Sketch, rng: random.Random) -> Plan:
    """Lines with other numbers and words: only the console tells what they give, the question does not."""
    computed = (altered(line, rng) for line in _plain(drawn)[:-1])
    return Plan((*computed, _SUBMIT), given=len(drawn.setup) + 1)


def altered(code: str, rng: random.Random) -> str:
    """The same code with other numbers and other quoted words."""

    def other(match: re.Match[str]) -> str:
        return "".join(rng.choice("123456789" if c.isdigit() else ascii_lowercase) for c in match[0])

    return re.sub(r"(?<![-\d])\d+|(?<=')\w+(?=')", other, code)


def guessed(drawn: Sketch) -> str:
    """An answer of the right shape, as code, that is taken from the question as it stands: nothing was computed."""
    words = re.findall(_QUOTED, drawn.question)
    if drawn.answer.startswith("["):
        return str(re.findall(_LIST, drawn.question)[-1])
    if drawn.answer.isalpha() and words:
        return str(words[0])
    numbers = re.findall(_INTEGER, drawn.question)
    return str(numbers[0]) if numbers else "0"


def wrong_formula(drawn: Sketch) -> str | None:
    """An expression that computes something else; None: this one has nothing to swap."""
    swap = {" + ": " - ", " - ": " + ", " * ": " + ", "max(": "min(", "sum(": "len(", "[::-1]": ".upper()"}
    for old, new in swap.items():
        if old in drawn.expression:
            return drawn.expression.replace(old, new, 1)
    return None


def missing_attribute(drawn: Sketch, rng: random.Random) -> str | None:
    """A method that strings do not have, called on the question's word; None: it quotes no word."""
    if "'" not in drawn.question:
        return None
    text = drawn.question.split("'")[-2 if drawn.question.startswith("Count") else 1]
    return f"'{text}'.{rng.choice(('sum', 'reverse', 'len'))}()"


def _guess(drawn: Sketch) -> str:
    return f"submit_final_answer({guessed(drawn)})\n"


def _after_error(lines: tuple[str, ...], remaining: tuple[str, ...], drawn: Sketch, rng: random.Random) -> Plan:
    """What follows a line that the console refused: recovery, a guess, the same line again, or giving up."""
    choice = rng.random()
    if choice < 0.35:
        return Plan((*lines, *remaining))
    if choice < 0.80:
        return Plan((*lines, _guess(drawn)))
    if choice < 0.92:
        return Plan((*lines, lines[-1], _guess(drawn)))
    return Plan(lines, end_token=True)


def _undefined_name(drawn: Sketch, rng: random.Random) -> Plan:
    line = f"{drawn.expression}\n" if drawn.setup else "result\n"
    return _after_error((line,), _plain(drawn), drawn, rng)


def _bad_syntax(drawn: Sketch, rng: random.Random) -> Plan:
    setup, after = _setup(drawn), (f"{drawn.expression}\n", _SUBMIT)
    return _after_error((*setup, f"{drawn.expression})\n"), after, drawn, rng)


def _missing_attribute(drawn: Sketch, rng: random.Random) -> Plan:
    line = missing_attribute(drawn, rng)
    return _after_error((f"{line}\n",), _plain(drawn), drawn, rng) if line else _bad_syntax(drawn, rng)


def _ignored_value(drawn: Sketch, _: random.Random) -> Plan:
    return Plan((*_plain(drawn)[:-1], _guess(drawn)))


def _wrong_formula(drawn: Sketch, rng: random.Random) -> Plan:
    wrong = wrong_formula(drawn)
    return Plan((*_setup(drawn), f"{wrong}\n", _SUBMIT)) if wrong else _ignored_value(drawn, rng)


def _late_bracket(drawn: Sketch, rng: random.Random) -> Plan:
    if not drawn.expression.endswith(")"):
        return _undefined_name(drawn, rng)
    return Plan((*_setup(drawn), f"{drawn.expression[:-1]}\n", ")\n", _SUBMIT))


_MISTAKES: tuple[Callable[[Sketch, random.Random], Plan], ...] = (
    _undefined_name,
    _bad_syntax,
    _missing_attribute,
    _ignored_value,
    _wrong_formula,
    _late_bracket,
)
_MISTAKE_WEIGHTS = (0.36, 0.33, 0.16, 0.05, 0.05, 0.05)
