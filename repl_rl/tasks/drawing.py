"""Problems that a seeded family draws, as `Sketch`, and parts of their questions."""

import random
from collections.abc import Callable
from dataclasses import dataclass

CONSONANTS = "bcdfghklmnprstvz"
VOWELS = "aeiou"


@dataclass(frozen=True, slots=True)
class Sketch:
    """A drawn problem. Running `setup` and then `expression` in a console prints the answer."""

    question: str
    answer: str
    """Answer in the form of `str()`: no quotes around a word."""
    setup: tuple[str, ...]
    """Lines to write first. A bare name among them shows a value."""
    expression: str


Family = Callable[[random.Random], Sketch]


def word(rng: random.Random, low: int, high: int) -> str:
    """Draw a pronounceable invented word of `low` to `high` letters."""
    return "".join(rng.choice(VOWELS if i % 2 else CONSONANTS) for i in range(rng.randint(low, high)))
