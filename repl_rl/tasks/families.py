"""Families of the bundled policy. Each draws a `Sketch`: a question, its answer, and the lines that find it.

The cold start demonstrates the lines; they are never part of a `Task`. The problems that these families draw are fixed,
because the bundled policy was trained on them. New families are in `graded`.
"""

import random
from types import MappingProxyType

from repl_rl.tasks.drawing import CONSONANTS, VOWELS, Family, Sketch, word

_NAMES = (("a", "b", "c"), ("x", "y", "z"), ("m", "n", "k"), ("p", "q", "r"))


def _formula(rng: random.Random, a: tuple[str, int], b: tuple[str, int], c: tuple[str, int]) -> tuple[str, int]:
    """Draw a formula of two or three operands, each given as (text, value). Return it with its value."""
    (x, u), (y, v), (z, w) = a, b, c
    return rng.choice(
        (
            (f"{x} + {y}", u + v),
            (f"{x} - {y}", u - v),
            (f"{x} * {y}", u * v),
            (f"{x} * {y} + {z}", u * v + w),
            (f"{x} * {y} - {z}", u * v - w),
            (f"{x} + {y} - {z}", u + v - w),
        )
    )


def _number(rng: random.Random, low: int, high: int) -> tuple[str, int]:
    value = rng.randint(low, high)
    return str(value), value


def _arithmetic(rng: random.Random) -> Sketch:
    text, value = _formula(rng, _number(rng, 10, 99), _number(rng, 2, 30), _number(rng, 2, 99))
    return Sketch(f"Compute {text}.", str(value), (), text)


def _variables(rng: random.Random) -> Sketch:
    (x, y, _), u, v = rng.choice(_NAMES), rng.randint(10, 99), rng.randint(2, 30)
    text, value = _formula(rng, (x, u), (y, v), _number(rng, 2, 30))
    return Sketch(f"Let {x} = {u} and {y} = {v}. Compute {text}.", str(value), (f"{x} = {u}", f"{y} = {v}"), text)


def _reverse(rng: random.Random) -> Sketch:
    text = word(rng, 4, 6)
    return Sketch(f"Reverse the word '{text}'.", text[::-1], (), f"'{text}'[::-1]")


def _count(rng: random.Random) -> Sketch:
    text = word(rng, 5, 7)
    letter = rng.choice(text)
    return Sketch(
        f"Count the letter '{letter}' in '{text}'.", str(text.count(letter)), (), f"'{text}'.count('{letter}')"
    )


def _lists(rng: random.Random) -> Sketch:
    values = rng.sample(range(2, 99), 3)
    name, function = rng.choice((("sum", sum), ("max", max), ("sorted", sorted)))
    request = {"sum": "Compute the sum of", "max": "Find the max of", "sorted": "Sort the list"}[name]
    return Sketch(f"{request} {values}.", str(function(values)), (), f"{name}({values})")


def _chain(rng: random.Random) -> Sketch:
    x, y, z = rng.choice(_NAMES)
    first, add, factor = rng.randint(2, 40), rng.randint(2, 30), rng.randint(2, 9)
    second = first + add
    third = second * factor
    formulas = ((f"{z} + {x}", third + first), (f"{z} - {y}", third - second), (f"{z} - {x}", third - first))
    text, value = rng.choice(formulas)
    setup = (f"{x} = {first}", f"{y} = {x} + {add}", f"{z} = {y} * {factor}")
    return Sketch(f"Let {setup[0]}, {setup[1]} and {setup[2]}. Compute {text}.", str(value), setup, text)


def _branch(rng: random.Random) -> Sketch:
    x = rng.choice(_NAMES)[0]
    u, v, bound = rng.randint(5, 45), rng.randint(5, 45), rng.choice((30, 40, 50, 60))
    add, factor = rng.randint(2, 30), rng.randint(2, 9)
    above = u + v > bound
    return Sketch(
        f"Let {x} = {u} + {v}. If {x} > {bound} compute {x} + {add}, else compute {x} * {factor}.",
        str(u + v + add if above else (u + v) * factor),
        (f"{x} = {u} + {v}", x),
        f"{x} + {add}" if above else f"{x} * {factor}",
    )


def _join(rng: random.Random) -> Sketch:
    first, second = word(rng, 2, 4), word(rng, 2, 4)
    question = f"Join '{first}' and '{second}' in upper case."
    return Sketch(question, (first + second).upper(), (f"s = '{first}' + '{second}'",), "s.upper()")


def _replace(rng: random.Random) -> Sketch:
    text = word(rng, 4, 6)
    old, new = rng.choice(text), rng.choice(CONSONANTS + VOWELS)
    question = f"In '{text}' replace '{old}' by '{new}', then reverse it."
    setup = (f"s = '{text}'.replace('{old}', '{new}')",)
    return Sketch(question, text.replace(old, new)[::-1], setup, "s[::-1]")


def _length(rng: random.Random) -> Sketch:
    text, factor, add = word(rng, 4, 7), rng.randint(2, 9), rng.randint(2, 40)
    question = f"Take the length of '{text}' times {factor} plus {add}."
    return Sketch(question, str(len(text) * factor + add), (f"n = len('{text}')",), f"n * {factor} + {add}")


EASY = ("arithmetic", "variables", "reverse", "count", "lists")
HARD = ("chain", "branch", "join", "replace", "length")
FAMILIES: MappingProxyType[str, Family] = MappingProxyType(
    {
        "arithmetic": _arithmetic,
        "variables": _variables,
        "reverse": _reverse,
        "count": _count,
        "lists": _lists,
        "chain": _chain,
        "branch": _branch,
        "join": _join,
        "replace": _replace,
        "length": _length,
    }
)
