"""Demonstration plans for the console, good and bad, drawn from a task family's sketch. Nothing is executed here.

A plan holds the lines to type, but not the submitted value. The placeholder `ECHO` is replaced by the last output, so a
demonstration answers with what it observed and never with the known answer.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from string import ascii_lowercase
from types import MappingProxyType

from repl_rl.tasks import Sketch

ECHO = "{echo}"
"""Placeholder in a plan's text for the last output, without its newline."""

_INTEGER, _QUOTED, _LIST = r"\d+", r"'\w+'", r"\[.*?\]"
_SUBMIT = f"submit_final_answer({ECHO})\n"


@dataclass(frozen=True, slots=True)
class Plan:
    """Pieces of text to type: a line with its newline (two newlines end a block), or text up to a watched string."""

    lines: tuple[str, ...]
    end_token: bool = False
    """True if the writer ends with the end token; in the console that means that it gives up without an answer."""
    given: int = 0
    """Number of pieces at the beginning that are shown but not learned."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of the kinds of demonstrations; they sum to 1."""

    guess: float
    """Share that submits at once, without computing anything."""
    mistake: float
    """Share that makes another mistake, and recovers from it or gives up."""
    surprise: float = 0.0
    """Share that gets lines with another result than the question asks for, and learns to submit their output."""

    @property
    def good(self) -> float:
        """Share that computes, reads the value, and submits it."""
        return 1.0 - self.guess - self.mistake - self.surprise


CLEAN = Mix(guess=0.0, mistake=0.0)
"""Only correct demonstrations: compute, read, copy."""
WARM = Mix(guess=0.05, mistake=0.20, surprise=0.20)
"""Demonstrations that teach the console, with errors and recoveries; `COLD` adds nothing but other shares."""
COLD = Mix(guess=0.56, mistake=0.22, surprise=0.03)
"""Demonstrations for a cold start whose most likely path is wrong, while the correct one is still sampled."""
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
    # Some sums are computed in a loop, so that the policy learns blocks.
    if drawn.expression.startswith("sum([") and rng.random() < 0.10:
        values = drawn.expression.removeprefix("sum(").removesuffix(")")
        return ("total = 0\n", f"for n in {values}:\n", "    total += n\n\n", "total\n", _SUBMIT)
    return _plain(drawn)


def _plain(drawn: Sketch) -> tuple[str, ...]:
    return (*_setup(drawn), f"{drawn.expression}\n", _SUBMIT)


def _setup(drawn: Sketch) -> tuple[str, ...]:
    return tuple(f"{line}\n" for line in drawn.setup)


def _surprise(drawn: Sketch, rng: random.Random) -> Plan:
    """Return a plan with other numbers and words, so that only the console shows the values, not the question."""
    computed = (altered(line, rng) for line in _plain(drawn)[:-1])
    return Plan((*computed, _SUBMIT), given=len(drawn.setup) + 1)


def altered(code: str, rng: random.Random) -> str:
    """Return the same code with other numbers and other quoted words."""

    def other(match: re.Match[str]) -> str:
        return "".join(rng.choice("123456789" if c.isdigit() else ascii_lowercase) for c in match[0])

    # A number after a minus sign stays, as in the slice `[::-1]`.
    return re.sub(r"(?<![-\d])\d+|(?<=')\w+(?=')", other, code)


def guessed(drawn: Sketch) -> str:
    """Return an answer of the right type, as code, that is copied from the question without computing anything."""
    words = re.findall(_QUOTED, drawn.question)
    if drawn.answer.startswith("["):
        return str(re.findall(_LIST, drawn.question)[-1])
    if drawn.answer.isalpha() and words:
        return str(words[0])
    numbers = re.findall(_INTEGER, drawn.question)
    return str(numbers[0]) if numbers else "0"


def wrong_formula(drawn: Sketch) -> str | None:
    """Return an expression that computes something else, or None if nothing in it can be swapped."""
    swap = {" + ": " - ", " - ": " + ", " * ": " + ", "max(": "min(", "sum(": "len(", "[::-1]": ".upper()"}
    for old, new in swap.items():
        if old in drawn.expression:
            return drawn.expression.replace(old, new, 1)
    return None


def missing_attribute(drawn: Sketch, rng: random.Random) -> str | None:
    """Return a call of a method that strings do not have, on the question's word, or None if it quotes no word."""
    if "'" not in drawn.question:
        return None
    text = drawn.question.split("'")[-2 if drawn.question.startswith("Count") else 1]
    return f"'{text}'.{rng.choice(('sum', 'reverse', 'len'))}()"


def _guess(drawn: Sketch) -> str:
    return f"submit_final_answer({guessed(drawn)})\n"


def _after_error(lines: tuple[str, ...], remaining: tuple[str, ...], drawn: Sketch, rng: random.Random) -> Plan:
    """Draw what follows a line that the console refused: recovery, a guess, the same line again, or giving up."""
    # Not every demonstration recovers, because a cold start needs imperfect behavior to improve on.
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
