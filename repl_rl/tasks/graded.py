"""Eight topics at three levels of difficulty, such as `dates/2`. The lines of a sketch are one way to its answer."""

import random
from collections.abc import Callable
from datetime import date, timedelta
from functools import partial
from types import MappingProxyType

from repl_rl.tasks.debugging import debugging
from repl_rl.tasks.drawing import Family, Sketch, word

LEVELS = (1, 2, 3)
_ROWS = ("apples", "pears", "plums", "figs", "limes", "grapes", "nuts", "dates", "kiwis", "melons")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _numbers(level: int, rng: random.Random) -> Sketch:
    a, b, c, d = rng.randint(12, 999), rng.randint(12, 999), rng.randint(2, 99), rng.randint(2, 99)
    if level == 1:
        text, value = rng.choice(((f"{a} * {c}", a * c), (f"{a} - {b}", a - b), (f"{a} + {b} + {c}", a + b + c)))
        return Sketch(f"What is {text}?", str(value), (), text)
    if level == 2:
        text, value = rng.choice(
            ((f"({a} + {b}) * {c} - {d}", (a + b) * c - d), (f"{a} * {c} - {b} * {d}", a * c - b * d))
        )
        return Sketch(f"Work out {text}.", str(value), (), text)
    power = rng.randint(3, 9)
    question = f"What remains when {a} to the power of {power}, plus {b}, is divided by {c}?"
    return Sketch(question, str((a**power + b) % c), (f"n = {a} ** {power} + {b}",), f"n % {c}")


def _strings(level: int, rng: random.Random) -> Sketch:
    text = word(rng, 5, 9)
    if level == 1:
        what, value, code = rng.choice(
            (
                ("in upper case", text.upper(), f"'{text}'.upper()"),
                ("backwards", text[::-1], f"'{text}'[::-1]"),
                ("without its first letter", text[1:], f"'{text}'[1:]"),
            )
        )
        return Sketch(f"Write '{text}' {what}.", value, (), code)
    if level == 2:
        question = f"Which word do the letters of '{text}' make in alphabetical order?"
        return Sketch(question, "".join(sorted(text)), (), f"''.join(sorted('{text}'))")
    words = [text, word(rng, 3, 7), word(rng, 4, 8)]
    question = f"Write each word of '{' '.join(words)}' backwards, in the same order, with hyphens between them."
    setup = (f"words = '{' '.join(words)}'.split()",)
    return Sketch(question, "-".join(w[::-1] for w in words), setup, "'-'.join(w[::-1] for w in words)")


def _sequences(level: int, rng: random.Random) -> Sketch:
    first, step, n = rng.randint(1, 60), rng.randint(2, 40), rng.randint(12, 60)
    if level == 1:
        terms = [first + step * i for i in range(4)]
        question = f"Which number comes next: {', '.join(map(str, terms))}?"
        return Sketch(question, str(first + step * 4), (), f"{terms[-1]} + ({terms[-1]} - {terms[-2]})")
    if level == 2:
        question = (
            f"A sequence begins with {first} and grows by {step} each time. What do its first {n} terms add up to?"
        )
        value = sum(first + step * i for i in range(n))
        return Sketch(question, str(value), (), f"sum({first} + {step} * i for i in range({n}))")
    # A Fibonacci sequence with other first terms.
    a, b, count = first, step, rng.randint(6, 25)
    for _ in range(count - 2):
        a, b = b, a + b
    question = (
        f"A sequence begins with {first}, {step}, and each further term is the sum of the two before it. "
        f"What is term number {count}?"
    )
    setup = (f"a, b = {first}, {step}", f"for _ in range({count - 2}): a, b = b, a + b", "")
    return Sketch(question, str(b), setup, "b")


def _dates(level: int, rng: random.Random) -> Sketch:
    start = date(2000, 1, 1) + timedelta(days=rng.randrange(11_000))
    days, y, m, d = rng.randint(20, 700), start.year, start.month, start.day
    load = "from datetime import date, timedelta"
    if level == 1:
        question = f"Which date is {days} days after {start}? Answer like 2024-02-29."
        code = f"str(date({y}, {m}, {d}) + timedelta(days={days}))"
        return Sketch(question, str(start + timedelta(days=days)), (load,), code)
    end = start + timedelta(days=days)
    if level == 2:
        question = f"How many days lie between {start} and {end}, the later day included and the earlier one not?"
        setup = (load, f"span = date({end.year}, {end.month}, {end.day}) - date({y}, {m}, {d})")
        return Sketch(question, str(days), setup, "span.days")
    name = rng.choice(_DAYS)
    value = sum((start + timedelta(days=i)).weekday() == _DAYS.index(name) for i in range(days + 1))
    question = f"How many {name}s are there from {start} to {end}, both included?"
    setup = (load, f"days = [date({y}, {m}, {d}) + timedelta(days=i) for i in range({days + 1})]")
    return Sketch(question, str(value), setup, f"sum(day.weekday() == {_DAYS.index(name)} for day in days)")


def _counting(level: int, rng: random.Random) -> Sketch:
    top, k, m = rng.randint(60, 999), rng.randint(3, 19), rng.randint(3, 19)
    if level == 1:
        question = f"How many numbers from 1 to {top} can be divided by {k}?"
        return Sketch(question, str(top // k), (), f"sum(n % {k} == 0 for n in range(1, {top + 1}))")
    if level == 2:
        code = f"sum(sum(map(int, str(n))) == {k} for n in range(1, {top + 1}))"
        value = sum(sum(map(int, str(n))) == k for n in range(1, top + 1))
        return Sketch(f"How many numbers from 1 to {top} have digits that add up to {k}?", str(value), (), code)
    # All pairs are checked, so there are fewer numbers.
    top = top % 60 + 10
    pairs = [(a, b) for a in range(1, top + 1) for b in range(a + 1, top + 1)]
    question = f"How many pairs a < b of numbers from 1 to {top} have a + b divisible by {k} and a * b not by {m}?"
    setup = (f"pairs = [(a, b) for a in range(1, {top + 1}) for b in range(a + 1, {top + 1})]",)
    value = sum((a + b) % k == 0 and a * b % m != 0 for a, b in pairs)
    return Sketch(question, str(value), setup, f"sum((a + b) % {k} == 0 and a * b % {m} != 0 for a, b in pairs)")


def _algebra(level: int, rng: random.Random) -> Sketch:
    setup: tuple[str, ...]
    # The solutions are drawn first, so that they are integers.
    x, y, a, b = rng.randint(-30, 30), rng.randint(-30, 30), rng.randint(2, 12), rng.randint(2, 40)
    if level == 1:
        question = f"Solve {a}*x + {b} = {a * x + b} for x."
        setup = ("from sympy import Eq, solve, symbols", "x = symbols('x')")
        return Sketch(question, str(x), setup, f"solve(Eq({a}*x + {b}, {a * x + b}), x)[0]")
    if level == 2:
        low, high = x, x + rng.randint(1, 40)
        question = f"What is the larger solution of x**2 + {-(low + high)}*x + {low * high} = 0?"
        setup = ("from sympy import solve, symbols", "x = symbols('x')")
        return Sketch(question, str(high), setup, f"max(solve(x**2 + {-(low + high)}*x + {low * high}, x))")
    c = a + rng.randint(1, 9)
    first, second = a * x + b * y, c * x - b * y
    question = f"Solve {a}*x + {b}*y = {first} and {c}*x - {b}*y = {second}. What is x*y?"
    setup = (
        "from sympy import solve, symbols",
        "x, y = symbols('x y')",
        f"found = solve([{a}*x + {b}*y - {first}, {c}*x - {b}*y - {second}], [x, y])",
    )
    return Sketch(question, str(x * y), setup, "found[x] * found[y]")


def _tables(level: int, rng: random.Random) -> Sketch:
    names = rng.sample(_ROWS, 4 + level)
    rows = [(name, rng.randint(2, 90), rng.randint(2, 60)) for name in names]
    shown = "; ".join(f"{name} {price} {stock}" for name, price, stock in rows)
    table = f"In the table of name, price and stock ({shown})"
    setup = (f"rows = {rows}",)
    if level == 1:
        name, _, stock = rng.choice(rows)
        code = f"[stock for name, price, stock in rows if name == '{name}'][0]"
        return Sketch(f"{table}, what is the stock of {name}?", str(stock), setup, code)
    if level == 2:
        # A tie goes to the first row, both in `max` and in the question.
        name, _, _ = max(rows, key=lambda row: row[1] * row[2])
        question = f"{table}, which name has the largest price times stock, the first one if several have?"
        return Sketch(question, name, setup, "max(rows, key=lambda row: row[1] * row[2])[0]")
    bound = rng.randint(20, 60)
    value = sum(price * stock for _, price, stock in rows if price > bound)
    question = f"{table}, what do price times stock add up to over the rows whose price is above {bound}?"
    code = f"sum(price * stock for name, price, stock in rows if price > {bound})"
    return Sketch(question, str(value), setup, code)


TOPICS: MappingProxyType[str, Callable[[int, random.Random], Sketch]] = MappingProxyType(
    {
        "numbers": _numbers,
        "strings": _strings,
        "sequences": _sequences,
        "dates": _dates,
        "counting": _counting,
        "algebra": _algebra,
        "tables": _tables,
        "debugging": debugging,
    }
)
GRADED: MappingProxyType[str, Family] = MappingProxyType(
    {f"{topic}/{level}": partial(draw, level) for topic, draw in TOPICS.items() for level in LEVELS}
)
"""Families by topic and level, such as `dates/2`."""
