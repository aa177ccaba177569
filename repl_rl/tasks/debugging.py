"""The topic `debugging`: a function with a mistake. The level, 1 to 3, is how well the mistake is hidden."""

import ast
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from repl_rl.tasks.drawing import Sketch, word


@dataclass(frozen=True, slots=True)
class _Bug:
    purpose: str
    broken: str
    mended: str
    arguments: Callable[[random.Random], str]
    function: Callable[..., object]
    """Reference implementation of the fixed function."""


def _list(rng: random.Random) -> str:
    return str([rng.randint(-20, 60) for _ in range(rng.randint(5, 8))])


def _whole(rng: random.Random) -> str:
    return str(rng.randint(6, 5000))


def _text(rng: random.Random) -> str:
    return f"'{word(rng, 5, 9)}'"


_BUGS: dict[int, tuple[_Bug, ...]] = {
    1: (
        _Bug(
            "add up the numbers from 1 to n, n included",
            "def f(n): return sum(range(1, n))",
            "def f(n): return sum(range(1, n + 1))",
            _whole,
            lambda n: sum(range(1, n + 1)),
        ),
        _Bug(
            "keep the even numbers of a list",
            "def f(xs): return [x for x in xs if x % 2]",
            "def f(xs): return [x for x in xs if x % 2 == 0]",
            _list,
            lambda xs: [x for x in xs if x % 2 == 0],
        ),
    ),
    2: (
        _Bug(
            "give the largest distance of two neighbours in a list",
            "def f(xs): return max(b - a for a, b in zip(xs, xs[1:]))",
            "def f(xs): return max(abs(b - a) for a, b in zip(xs, xs[1:]))",
            _list,
            lambda xs: max(abs(b - a) for a, b in pairwise(xs)),
        ),
        _Bug(
            "add up the squares of a list",
            "def f(xs): return sum(x ^ 2 for x in xs)",
            "def f(xs): return sum(x ** 2 for x in xs)",
            _list,
            lambda xs: sum(x**2 for x in xs),
        ),
        _Bug(
            "count the vowels of a word",
            "def f(s): return sum(s.count(c) for c in 'aeiou' if c in s[1:])",
            "def f(s): return sum(s.count(c) for c in 'aeiou')",
            lambda rng: f"'{rng.choice('aeiou')}{word(rng, 4, 8)}'",
            lambda s: sum(s.count(c) for c in "aeiou"),
        ),
    ),
    3: (
        _Bug(
            "give the median of a list, the mean of the two in the middle where their number is even",
            "def f(xs): return (xs[len(xs) // 2] + xs[(len(xs) - 1) // 2]) / 2",
            "def f(xs): return (sorted(xs)[len(xs) // 2] + sorted(xs)[(len(xs) - 1) // 2]) / 2",
            _list,
            lambda xs: (sorted(xs)[len(xs) // 2] + sorted(xs)[(len(xs) - 1) // 2]) / 2,
        ),
        _Bug(
            "say how many different numbers occur more than once in a list",
            "def f(xs): return sum(xs.count(x) > 1 for x in xs)",
            "def f(xs): return sum(xs.count(x) > 1 for x in set(xs))",
            lambda rng: str([rng.randint(1, 6) for _ in range(rng.randint(7, 11))]),
            lambda xs: sum(xs.count(x) > 1 for x in set(xs)),
        ),
        _Bug(
            "write every second letter of a word in upper case, beginning with the first",
            "def f(s): return ''.join(c.upper() if s.index(c) % 2 == 0 else c for c in s)",
            "def f(s): return ''.join(c.upper() if i % 2 == 0 else c for i, c in enumerate(s))",
            _text,
            lambda s: "".join(c.upper() if i % 2 == 0 else c for i, c in enumerate(s)),
        ),
    ),
}


def debugging(level: int, rng: random.Random) -> Sketch:
    """Draw a function with a mistake, its purpose, and a call of it."""
    bug = rng.choice(_BUGS[level])
    argument = bug.arguments(rng)
    question = f"`{bug.broken}` should {bug.purpose}, but does not always. Mend it. What is f({argument}) then?"
    value = bug.function(ast.literal_eval(argument))
    return Sketch(question, str(value), (bug.mended, ""), f"f({argument})")
