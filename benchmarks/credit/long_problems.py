"""Tasks of many lines in which one silent slip spoils the result, and demonstrations of a policy that slips.

    Let a = 49, b = a - 18, c = b + 36, d = c - a, e = d * 4, f = e - a and g = f - 37. Compute g + b.

Assignments print nothing, so the console does not show that one was wrong. A policy that knows the approach and slips
now and then has much to learn about single lines, which is the purpose of credit per line.
"""

import random
import re
from string import ascii_lowercase

from repl_rl.errors import ConfigError
from repl_rl.sft.demonstrations import ECHO, DemonstrationPlan
from repl_rl.tasks import Problem, Split, Task, get_split, make_task

FAMILY = "long"
FEWEST, MOST = 7, 9
"""Number of assignments of a task; the expression and the answer take two more lines."""
SLIPS = {" - ": 0.2, " * ": 0.55}
"""Probability of a wrong sign in an assignment, by its correct sign; the wrong sign is always `+`."""
OTHER_VARIABLE, OTHER_EXPRESSION, LEFT_OUT = 0.08, 0.12, 0.01
"""Probabilities of another variable in an assignment, another sign in the expression, a missing assignment."""
_LARGEST = 999
_DRAWS_PER_TASK = 200


def draw_long_problem(rng: random.Random) -> Problem:
    """Draw a chain of assignments, each of earlier variables and a small number."""
    names = ascii_lowercase[: rng.randint(FEWEST, MOST)]
    values = {"a": rng.randint(11, 60)}
    setup = [f"a = {values['a']}"]
    for name in names[1:]:
        # Draw again until the value is positive and small.
        while True:
            text, value = _step(rng, values)
            if 0 < value <= _LARGEST:
                break
        values[name] = value
        setup.append(f"{name} = {text}")
    last, other = names[-1], rng.choice(names[:-1])
    question = f"Let {', '.join(setup[:-1])} and {setup[-1]}. Compute {last} + {other}."
    return Problem(question, str(values[last] + values[other]), tuple(setup), f"{last} + {other}")


def _step(rng: random.Random, values: dict[str, int]) -> tuple[str, int]:
    newest = list(values)[-1]
    kind = rng.choice(("plus", "minus", "times", "less"))
    if kind == "times":
        factor = rng.randint(2, 4)
        return f"{newest} * {factor}", values[newest] * factor
    if kind == "less" and len(values) > 1:
        other = rng.choice(list(values)[:-1])
        return f"{newest} - {other}", values[newest] - values[other]
    number = rng.randint(11, 60)
    if kind == "plus":
        return f"{newest} + {number}", values[newest] + number
    return f"{newest} - {number}", values[newest] - number


def tasks(split: Split, count: int, seed: int) -> tuple[Task, ...]:
    """Return `count` (>= 1) different tasks of a split. Equal arguments give equal tasks.

    Raises:
        ConfigError: many draws gave no new question of the split.
    """
    rng = random.Random(f"{seed}/{split}/{FAMILY}")
    found: dict[str, Task] = {}
    while len(found) < count:
        task = make_task(FAMILY, sketched(rng, split))
        for _ in range(_DRAWS_PER_TASK):
            if task.id not in found:
                break
            task = make_task(FAMILY, sketched(rng, split))
        else:
            raise ConfigError("number of tasks", count, f"family {FAMILY!r} has too few different questions")
        found[task.id] = task
    return tuple(found.values())


def sketched(rng: random.Random, split: Split) -> Problem:
    """Draw one problem whose question belongs to `split`.

    Raises:
        ConfigError: many draws gave none.
    """
    for _ in range(_DRAWS_PER_TASK):
        one = draw_long_problem(rng)
        if get_split(one.question) is split:
            return one
    raise ConfigError("task family", FAMILY, f"it has too few questions in the split {split!s}")


def clean_plan(one: Problem) -> DemonstrationPlan:
    """Return a plan without slips."""
    lines = (*one.setup, one.expression, f"submit_final_answer({ECHO})")
    return DemonstrationPlan(tuple(f"{line}\n" for line in lines))


def slipping_plan(one: Problem, rng: random.Random) -> DemonstrationPlan:
    """Return a plan with silent slips, drawn independently per line. The first assignment is always right."""
    setup = [one.setup[0]]
    for line in one.setup[1:]:
        if rng.random() >= LEFT_OUT:
            setup.append(_slipped(line, rng))
    swap = rng.random() < OTHER_EXPRESSION
    expression = one.expression.replace(" + ", " - ") if swap else one.expression
    lines = (*setup, expression, f"submit_final_answer({ECHO})")
    return DemonstrationPlan(tuple(f"{line}\n" for line in lines))


def _slipped(line: str, rng: random.Random) -> str:
    name, _, text = line.partition(" = ")
    # A slip replaces the sign, the variable, or both.
    for sign, chance in SLIPS.items():
        if sign in text:
            text = text.replace(sign, " + ") if rng.random() < chance else text
            break
    if rng.random() < OTHER_VARIABLE:
        used = re.findall(r"[a-z]", text)
        others = [other for other in ascii_lowercase[: ascii_lowercase.index(name)] if other not in used]
        if others:
            text = text.replace(used[0], rng.choice(others), 1)
    return f"{name} = {text}"
