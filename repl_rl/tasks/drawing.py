"""What a seeded family draws: a `Sketch`, and the little things that questions are made of."""

import random
from collections.abc import Callable
from dataclasses import dataclass

CONSONANTS = "bcdfghklmnprstvz"
VOWELS = "aeiou"


@dataclass(frozen=True, slots=True)
class Sketch:
    """One drawn problem. Running `setup`, then `expression`, in a console echoes the answer."""

    question: str
    answer: str
    """As `str()` shows it: no quotes around a word."""
    setup: tuple[str, ...]
    """Lines to write first; a bare name among them is a look at a value."""
    expression: str


Family = Callable[[random.Random], Sketch]


def word(rng: random.Random, low: int, high: int) -> str:
    """A pronounceable word that is in no dictionary, of `low` to `high` letters."""
    return "".join(rng.choice(VOWELS if i % 2 else CONSONANTS) for i in range(rng.randint(low, high)))
