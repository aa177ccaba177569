"""Generated tasks: seeded families of problems, and the generator that draws tasks from them.

A family draws a `Problem`: a question, its answer, and console lines that find the answer. The cold start demonstrates
the lines; they are never part of a `Task`. There are two groups of families:

- `FAMILIES`: ten families of the bundled policy. Their problems are fixed, because the policy was trained on them.
- `GRADED`: eight topics at three levels of difficulty, such as `dates/2`. New families belong here.
"""

import ast
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from itertools import pairwise
from types import MappingProxyType

from repl_rl.errors import ConfigError
from repl_rl.tasks.task import Split, Task, fingerprint_question, get_split, parse_split

CONSONANTS = "bcdfghklmnprstvz"
VOWELS = "aeiou"
LEVELS = (1, 2, 3)
"""Levels of difficulty of each topic."""
_VARIABLE_NAMES = (("a", "b", "c"), ("x", "y", "z"), ("m", "n", "k"), ("p", "q", "r"))
_PRODUCTS = ("apples", "pears", "plums", "figs", "limes", "grapes", "nuts", "dates", "kiwis", "melons")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_DRAWS_PER_TASK = 200
"""Largest number of draws in search of one suitable question."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A drawn problem. Running `setup` and then `expression` in a console prints the answer."""

    question: str
    answer: str
    """Answer in the form of `str()`: no quotes around a word."""
    setup: tuple[str, ...]
    """Lines to write first. A bare name among them shows a value."""
    expression: str


DrawProblem = Callable[[random.Random], Problem]


def draw_word(rng: random.Random, low: int, high: int) -> str:
    """Draw a pronounceable invented word of `low` to `high` letters."""
    return "".join(rng.choice(VOWELS if i % 2 else CONSONANTS) for i in range(rng.randint(low, high)))


# Families of the bundled policy


def _draw_formula(rng: random.Random, a: tuple[str, int], b: tuple[str, int], c: tuple[str, int]) -> tuple[str, int]:
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


def _draw_operand(rng: random.Random, low: int, high: int) -> tuple[str, int]:
    value = rng.randint(low, high)
    return str(value), value


def _draw_arithmetic(rng: random.Random) -> Problem:
    text, value = _draw_formula(rng, _draw_operand(rng, 10, 99), _draw_operand(rng, 2, 30), _draw_operand(rng, 2, 99))
    return Problem(f"Compute {text}.", str(value), (), text)


def _draw_variables(rng: random.Random) -> Problem:
    (x, y, _), u, v = rng.choice(_VARIABLE_NAMES), rng.randint(10, 99), rng.randint(2, 30)
    text, value = _draw_formula(rng, (x, u), (y, v), _draw_operand(rng, 2, 30))
    return Problem(f"Let {x} = {u} and {y} = {v}. Compute {text}.", str(value), (f"{x} = {u}", f"{y} = {v}"), text)


def _draw_reverse(rng: random.Random) -> Problem:
    text = draw_word(rng, 4, 6)
    return Problem(f"Reverse the word '{text}'.", text[::-1], (), f"'{text}'[::-1]")


def _draw_count(rng: random.Random) -> Problem:
    text = draw_word(rng, 5, 7)
    letter = rng.choice(text)
    return Problem(
        f"Count the letter '{letter}' in '{text}'.", str(text.count(letter)), (), f"'{text}'.count('{letter}')"
    )


def _draw_lists(rng: random.Random) -> Problem:
    values = rng.sample(range(2, 99), 3)
    name, function = rng.choice((("sum", sum), ("max", max), ("sorted", sorted)))
    request = {"sum": "Compute the sum of", "max": "Find the max of", "sorted": "Sort the list"}[name]
    return Problem(f"{request} {values}.", str(function(values)), (), f"{name}({values})")


def _draw_chain(rng: random.Random) -> Problem:
    x, y, z = rng.choice(_VARIABLE_NAMES)
    first, add, factor = rng.randint(2, 40), rng.randint(2, 30), rng.randint(2, 9)
    second = first + add
    third = second * factor
    formulas = ((f"{z} + {x}", third + first), (f"{z} - {y}", third - second), (f"{z} - {x}", third - first))
    text, value = rng.choice(formulas)
    setup = (f"{x} = {first}", f"{y} = {x} + {add}", f"{z} = {y} * {factor}")
    return Problem(f"Let {setup[0]}, {setup[1]} and {setup[2]}. Compute {text}.", str(value), setup, text)


def _draw_branch(rng: random.Random) -> Problem:
    x = rng.choice(_VARIABLE_NAMES)[0]
    u, v, bound = rng.randint(5, 45), rng.randint(5, 45), rng.choice((30, 40, 50, 60))
    add, factor = rng.randint(2, 30), rng.randint(2, 9)
    above = u + v > bound
    return Problem(
        f"Let {x} = {u} + {v}. If {x} > {bound} compute {x} + {add}, else compute {x} * {factor}.",
        str(u + v + add if above else (u + v) * factor),
        (f"{x} = {u} + {v}", x),
        f"{x} + {add}" if above else f"{x} * {factor}",
    )


def _draw_join(rng: random.Random) -> Problem:
    first, second = draw_word(rng, 2, 4), draw_word(rng, 2, 4)
    question = f"Join '{first}' and '{second}' in upper case."
    return Problem(question, (first + second).upper(), (f"s = '{first}' + '{second}'",), "s.upper()")


def _draw_replace(rng: random.Random) -> Problem:
    text = draw_word(rng, 4, 6)
    old, new = rng.choice(text), rng.choice(CONSONANTS + VOWELS)
    question = f"In '{text}' replace '{old}' by '{new}', then reverse it."
    setup = (f"s = '{text}'.replace('{old}', '{new}')",)
    return Problem(question, text.replace(old, new)[::-1], setup, "s[::-1]")


def _draw_length(rng: random.Random) -> Problem:
    text, factor, add = draw_word(rng, 4, 7), rng.randint(2, 9), rng.randint(2, 40)
    question = f"Take the length of '{text}' times {factor} plus {add}."
    return Problem(question, str(len(text) * factor + add), (f"n = len('{text}')",), f"n * {factor} + {add}")


EASY = ("arithmetic", "variables", "reverse", "count", "lists")
HARD = ("chain", "branch", "join", "replace", "length")
FAMILIES: MappingProxyType[str, DrawProblem] = MappingProxyType(
    {
        "arithmetic": _draw_arithmetic,
        "variables": _draw_variables,
        "reverse": _draw_reverse,
        "count": _draw_count,
        "lists": _draw_lists,
        "chain": _draw_chain,
        "branch": _draw_branch,
        "join": _draw_join,
        "replace": _draw_replace,
        "length": _draw_length,
    }
)


# Topics at three levels of difficulty


def _draw_numbers(level: int, rng: random.Random) -> Problem:
    a, b, c, d = rng.randint(12, 999), rng.randint(12, 999), rng.randint(2, 99), rng.randint(2, 99)
    if level == 1:
        text, value = rng.choice(((f"{a} * {c}", a * c), (f"{a} - {b}", a - b), (f"{a} + {b} + {c}", a + b + c)))
        return Problem(f"What is {text}?", str(value), (), text)
    if level == 2:
        text, value = rng.choice(
            ((f"({a} + {b}) * {c} - {d}", (a + b) * c - d), (f"{a} * {c} - {b} * {d}", a * c - b * d))
        )
        return Problem(f"Work out {text}.", str(value), (), text)
    power = rng.randint(3, 9)
    question = f"What remains when {a} to the power of {power}, plus {b}, is divided by {c}?"
    return Problem(question, str((a**power + b) % c), (f"n = {a} ** {power} + {b}",), f"n % {c}")


def _draw_strings(level: int, rng: random.Random) -> Problem:
    text = draw_word(rng, 5, 9)
    if level == 1:
        # One string method or slice.
        form, value, code = rng.choice(
            (
                ("in upper case", text.upper(), f"'{text}'.upper()"),
                ("backwards", text[::-1], f"'{text}'[::-1]"),
                ("without its first letter", text[1:], f"'{text}'[1:]"),
            )
        )
        return Problem(f"Write '{text}' {form}.", value, (), code)
    if level == 2:
        question = f"Which word do the letters of '{text}' make in alphabetical order?"
        return Problem(question, "".join(sorted(text)), (), f"''.join(sorted('{text}'))")
    # Level 3 has several words, so that a comprehension is needed.
    words = [text, draw_word(rng, 3, 7), draw_word(rng, 4, 8)]
    question = f"Write each word of '{' '.join(words)}' backwards, in the same order, with hyphens between them."
    setup = (f"words = '{' '.join(words)}'.split()",)
    return Problem(question, "-".join(w[::-1] for w in words), setup, "'-'.join(w[::-1] for w in words)")


def _draw_sequences(level: int, rng: random.Random) -> Problem:
    first, step, n = rng.randint(1, 60), rng.randint(2, 40), rng.randint(12, 60)
    if level == 1:
        terms = [first + step * i for i in range(4)]
        question = f"Which number comes next: {', '.join(map(str, terms))}?"
        return Problem(question, str(first + step * 4), (), f"{terms[-1]} + ({terms[-1]} - {terms[-2]})")
    if level == 2:
        question = (
            f"A sequence begins with {first} and grows by {step} each time. What do its first {n} terms add up to?"
        )
        value = sum(first + step * i for i in range(n))
        return Problem(question, str(value), (), f"sum({first} + {step} * i for i in range({n}))")
    # A Fibonacci sequence with other first terms.
    a, b, count = first, step, rng.randint(6, 25)
    for _ in range(count - 2):
        a, b = b, a + b
    question = (
        f"A sequence begins with {first}, {step}, and each further term is the sum of the two before it. "
        f"What is term number {count}?"
    )
    setup = (f"a, b = {first}, {step}", f"for _ in range({count - 2}): a, b = b, a + b", "")
    return Problem(question, str(b), setup, "b")


def _draw_dates(level: int, rng: random.Random) -> Problem:
    start = date(2000, 1, 1) + timedelta(days=rng.randrange(11_000))
    days, y, m, d = rng.randint(20, 700), start.year, start.month, start.day
    # Each sketch begins with this import.
    import_line = "from datetime import date, timedelta"
    if level == 1:
        question = f"Which date is {days} days after {start}? Answer like 2024-02-29."
        code = f"str(date({y}, {m}, {d}) + timedelta(days={days}))"
        return Problem(question, str(start + timedelta(days=days)), (import_line,), code)
    end = start + timedelta(days=days)
    if level == 2:
        question = f"How many days lie between {start} and {end}, the later day included and the earlier one not?"
        setup = (import_line, f"span = date({end.year}, {end.month}, {end.day}) - date({y}, {m}, {d})")
        return Problem(question, str(days), setup, "span.days")
    name = rng.choice(_DAYS)
    value = sum((start + timedelta(days=i)).weekday() == _DAYS.index(name) for i in range(days + 1))
    question = f"How many {name}s are there from {start} to {end}, both included?"
    setup = (import_line, f"days = [date({y}, {m}, {d}) + timedelta(days=i) for i in range({days + 1})]")
    return Problem(question, str(value), setup, f"sum(day.weekday() == {_DAYS.index(name)} for day in days)")


def _draw_counting(level: int, rng: random.Random) -> Problem:
    top, k, m = rng.randint(60, 999), rng.randint(3, 19), rng.randint(3, 19)
    if level == 1:
        question = f"How many numbers from 1 to {top} can be divided by {k}?"
        return Problem(question, str(top // k), (), f"sum(n % {k} == 0 for n in range(1, {top + 1}))")
    if level == 2:
        code = f"sum(sum(map(int, str(n))) == {k} for n in range(1, {top + 1}))"
        value = sum(sum(map(int, str(n))) == k for n in range(1, top + 1))
        return Problem(f"How many numbers from 1 to {top} have digits that add up to {k}?", str(value), (), code)
    # All pairs are checked, so there are fewer numbers.
    top = top % 60 + 10
    pairs = [(a, b) for a in range(1, top + 1) for b in range(a + 1, top + 1)]
    question = f"How many pairs a < b of numbers from 1 to {top} have a + b divisible by {k} and a * b not by {m}?"
    setup = (f"pairs = [(a, b) for a in range(1, {top + 1}) for b in range(a + 1, {top + 1})]",)
    value = sum((a + b) % k == 0 and a * b % m != 0 for a, b in pairs)
    return Problem(question, str(value), setup, f"sum((a + b) % {k} == 0 and a * b % {m} != 0 for a, b in pairs)")


def _draw_algebra(level: int, rng: random.Random) -> Problem:
    setup: tuple[str, ...]
    # The solutions are drawn first, so that they are integers.
    x, y, a, b = rng.randint(-30, 30), rng.randint(-30, 30), rng.randint(2, 12), rng.randint(2, 40)
    if level == 1:
        question = f"Solve {a}*x + {b} = {a * x + b} for x."
        setup = ("from sympy import Eq, solve, symbols", "x = symbols('x')")
        return Problem(question, str(x), setup, f"solve(Eq({a}*x + {b}, {a * x + b}), x)[0]")
    if level == 2:
        low, high = x, x + rng.randint(1, 40)
        question = f"What is the larger solution of x**2 + {-(low + high)}*x + {low * high} = 0?"
        setup = ("from sympy import solve, symbols", "x = symbols('x')")
        return Problem(question, str(high), setup, f"max(solve(x**2 + {-(low + high)}*x + {low * high}, x))")
    c = a + rng.randint(1, 9)
    first, second = a * x + b * y, c * x - b * y
    question = f"Solve {a}*x + {b}*y = {first} and {c}*x - {b}*y = {second}. What is x*y?"
    setup = (
        "from sympy import solve, symbols",
        "x, y = symbols('x y')",
        f"found = solve([{a}*x + {b}*y - {first}, {c}*x - {b}*y - {second}], [x, y])",
    )
    return Problem(question, str(x * y), setup, "found[x] * found[y]")


def _draw_tables(level: int, rng: random.Random) -> Problem:
    names = rng.sample(_PRODUCTS, 4 + level)
    rows = [(name, rng.randint(2, 90), rng.randint(2, 60)) for name in names]
    listing = "; ".join(f"{name} {price} {stock}" for name, price, stock in rows)
    table = f"In the table of name, price and stock ({listing})"
    setup = (f"rows = {rows}",)
    if level == 1:
        name, _, stock = rng.choice(rows)
        code = f"[stock for name, price, stock in rows if name == '{name}'][0]"
        return Problem(f"{table}, what is the stock of {name}?", str(stock), setup, code)
    if level == 2:
        # A tie goes to the first row, both in `max` and in the question.
        name, _, _ = max(rows, key=lambda row: row[1] * row[2])
        question = f"{table}, which name has the largest price times stock, the first one if several have?"
        return Problem(question, name, setup, "max(rows, key=lambda row: row[1] * row[2])[0]")
    bound = rng.randint(20, 60)
    value = sum(price * stock for _, price, stock in rows if price > bound)
    question = f"{table}, what do price times stock add up to over the rows whose price is above {bound}?"
    code = f"sum(price * stock for name, price, stock in rows if price > {bound})"
    return Problem(question, str(value), setup, code)


@dataclass(frozen=True, slots=True)
class _Bug:
    """A function with a mistake, and its correction."""

    purpose: str
    broken: str
    fixed: str
    arguments: Callable[[random.Random], str]
    """Function that draws the source of an argument."""
    function: Callable[..., object]
    """Reference implementation of the fixed function."""


def _draw_list_argument(rng: random.Random) -> str:
    return str([rng.randint(-20, 60) for _ in range(rng.randint(5, 8))])


def _draw_integer_argument(rng: random.Random) -> str:
    return str(rng.randint(6, 5000))


def _draw_text_argument(rng: random.Random) -> str:
    return f"'{draw_word(rng, 5, 9)}'"


_BUGS: dict[int, tuple[_Bug, ...]] = {
    1: (
        _Bug(
            "add up the numbers from 1 to n, n included",
            "def f(n): return sum(range(1, n))",
            "def f(n): return sum(range(1, n + 1))",
            _draw_integer_argument,
            lambda n: sum(range(1, n + 1)),
        ),
        _Bug(
            "keep the even numbers of a list",
            "def f(xs): return [x for x in xs if x % 2]",
            "def f(xs): return [x for x in xs if x % 2 == 0]",
            _draw_list_argument,
            lambda xs: [x for x in xs if x % 2 == 0],
        ),
    ),
    2: (
        _Bug(
            "give the largest distance of two neighbours in a list",
            "def f(xs): return max(b - a for a, b in zip(xs, xs[1:]))",
            "def f(xs): return max(abs(b - a) for a, b in zip(xs, xs[1:]))",
            _draw_list_argument,
            lambda xs: max(abs(b - a) for a, b in pairwise(xs)),
        ),
        _Bug(
            "add up the squares of a list",
            "def f(xs): return sum(x ^ 2 for x in xs)",
            "def f(xs): return sum(x ** 2 for x in xs)",
            _draw_list_argument,
            lambda xs: sum(x**2 for x in xs),
        ),
        _Bug(
            "count the vowels of a word",
            "def f(s): return sum(s.count(c) for c in 'aeiou' if c in s[1:])",
            "def f(s): return sum(s.count(c) for c in 'aeiou')",
            lambda rng: f"'{rng.choice('aeiou')}{draw_word(rng, 4, 8)}'",
            lambda s: sum(s.count(c) for c in "aeiou"),
        ),
    ),
    3: (
        _Bug(
            "give the median of a list, the mean of the two in the middle where their number is even",
            "def f(xs): return (xs[len(xs) // 2] + xs[(len(xs) - 1) // 2]) / 2",
            "def f(xs): return (sorted(xs)[len(xs) // 2] + sorted(xs)[(len(xs) - 1) // 2]) / 2",
            _draw_list_argument,
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
            _draw_text_argument,
            lambda s: "".join(c.upper() if i % 2 == 0 else c for i, c in enumerate(s)),
        ),
    ),
}


def draw_debugging_problem(level: int, rng: random.Random) -> Problem:
    """Draw a function with a mistake, its purpose, and a call of it. A higher level hides the mistake better."""
    bug = rng.choice(_BUGS[level])
    argument = bug.arguments(rng)
    question = f"`{bug.broken}` should {bug.purpose}, but does not always. Mend it. What is f({argument}) then?"
    value = bug.function(ast.literal_eval(argument))
    return Problem(question, str(value), (bug.fixed, ""), f"f({argument})")


TOPICS: MappingProxyType[str, Callable[[int, random.Random], Problem]] = MappingProxyType(
    {
        "numbers": _draw_numbers,
        "strings": _draw_strings,
        "sequences": _draw_sequences,
        "dates": _draw_dates,
        "counting": _draw_counting,
        "algebra": _draw_algebra,
        "tables": _draw_tables,
        "debugging": draw_debugging_problem,
    }
)
GRADED: MappingProxyType[str, DrawProblem] = MappingProxyType(
    {f"{topic}/{level}": partial(draw, level) for topic, draw in TOPICS.items() for level in LEVELS}
)
"""Families by topic and level, such as `dates/2`."""

# Generator of tasks

_KNOWN: MappingProxyType[str, DrawProblem] = MappingProxyType({**FAMILIES, **GRADED})
BUILTIN: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {
        "quickstart": (*EASY, *HARD),
        "easy": EASY,
        "hard": HARD,
        "graded": tuple(GRADED),
        **{f"graded/{level}": tuple(f"{topic}/{level}" for topic in TOPICS) for level in LEVELS},
        **{topic: tuple(f"{topic}/{level}" for level in LEVELS) for topic in TOPICS},
        **{name: (name,) for name in _KNOWN},
    }
)
"""Families of each name after `builtin:`."""


def get_families(source: str) -> tuple[str, ...]:
    """Return the families of `builtin:NAME`.

    Raises:
        ConfigError: no such name exists.
    """
    kind, _, name = source.partition(":")
    if kind != "builtin" or name not in BUILTIN:
        names = [name for name in BUILTIN if "/" not in name]
        remedy = f"choose among {', '.join(names)}; graded and {', '.join(TOPICS)} also with a level: dates/2"
        raise ConfigError("built-in tasks", name if kind == "builtin" else source, remedy)
    return BUILTIN[name]


def draw_problem(family: str, rng: random.Random, split: Split = Split.ALL) -> Problem:
    """Draw one problem of `family` whose question is in `split`.

    Raises:
        ConfigError: the family does not exist, or none of many draws is in the split.
    """
    if family not in _KNOWN:
        raise ConfigError("task family", family, f"choose among {', '.join(_KNOWN)}")
    for _ in range(_DRAWS_PER_TASK):
        problem = _KNOWN[family](rng)
        if split is Split.ALL or get_split(problem.question) is split:
            return problem
    raise ConfigError(
        "task family", family, f"none of {_DRAWS_PER_TASK} drawn questions is in the split {split!s}; choose another"
    )


def generate(families: Sequence[str], split: Split | str, count: int, seed: int) -> tuple[Task, ...]:
    """Generate `count` (>= 1) different tasks in equal shares of the families, interleaved. Equal arguments give equal
    tasks.

    Raises:
        ConfigError: a family or the split is unknown, `count` is below 1, or the families have too few questions.
    """
    if count < 1 or not families:
        raise ConfigError("number of tasks", count if families else 0, "ask for at least 1 task of at least 1 family")
    parsed_split = parse_split(split)
    # With one generator per family, a family's problems do not depend on the other families.
    rngs = {family: random.Random(f"{seed}/{parsed_split}/{family}") for family in families}
    tasks: dict[str, Task] = {}
    for index in range(count):
        family = families[index % len(families)]
        # Draw until a question is new.
        for _ in range(_DRAWS_PER_TASK):
            problem = draw_problem(family, rngs[family], parsed_split)
            if problem.question not in tasks:
                break
        else:
            raise ConfigError("number of tasks", count, f"family {family!r} has too few different questions")
        tasks[problem.question] = make_task(family, problem)
    return tuple(tasks.values())


def make_task(family: str, problem: Problem) -> Task:
    """Return the task for a problem of `family`. Equal questions of a family have equal ids."""
    name = f"{family.replace('/', '-')}-{fingerprint_question(problem.question)[:12]}"
    return Task(id=name, question=problem.question, answer=problem.answer, family=family)
