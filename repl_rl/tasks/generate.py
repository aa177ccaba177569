"""Generator of tasks from the seeded families: any number of them, in either split."""

import random
from collections.abc import Sequence
from types import MappingProxyType

from repl_rl.errors import ConfigError
from repl_rl.tasks.drawing import Family, Sketch
from repl_rl.tasks.families import EASY, FAMILIES, HARD
from repl_rl.tasks.graded import GRADED, LEVELS, TOPICS
from repl_rl.tasks.model import Split, Task, fingerprint, parse_split, split_of

_DRAWS_PER_TASK = 200
_KNOWN: MappingProxyType[str, Family] = MappingProxyType({**FAMILIES, **GRADED})
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


def families_of(source: str) -> tuple[str, ...]:
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


def sketch(family: str, rng: random.Random, split: Split = Split.ALL) -> Sketch:
    """Draw one problem of `family` whose question is in `split`.

    Raises:
        ConfigError: the family does not exist, or none of many draws is in the split.
    """
    if family not in _KNOWN:
        raise ConfigError("task family", family, f"choose among {', '.join(_KNOWN)}")
    for _ in range(_DRAWS_PER_TASK):
        drawn = _KNOWN[family](rng)
        if split is Split.ALL or split_of(drawn.question) is split:
            return drawn
    raise ConfigError("task family", family, f"it has too few questions in the split {split!s}")


def generate(families: Sequence[str], split: Split | str, count: int, seed: int) -> tuple[Task, ...]:
    """Generate `count` (>= 1) different tasks in equal shares of the families, interleaved. Equal arguments give equal
    tasks.

    Raises:
        ConfigError: a family or the split is unknown, `count` is below 1, or the families have too few questions.
    """
    if count < 1 or not families:
        raise ConfigError("number of tasks", count if families else 0, "ask for at least 1 task of at least 1 family")
    side = parse_split(split)
    # With one generator per family, a family's problems do not depend on the other families.
    rngs = {family: random.Random(f"{seed}/{side}/{family}") for family in families}
    tasks: dict[str, Task] = {}
    for n in range(count):
        family = families[n % len(families)]
        # Draw until a question is new.
        for _ in range(_DRAWS_PER_TASK):
            drawn = sketch(family, rngs[family], side)
            if drawn.question not in tasks:
                break
        else:
            raise ConfigError("number of tasks", count, f"family {family!r} has too few different questions")
        tasks[drawn.question] = task_of(family, drawn)
    return tuple(tasks.values())


def task_of(family: str, drawn: Sketch) -> Task:
    """Return the task for a problem of `family`. Equal questions of a family have equal ids."""
    name = f"{family.replace('/', '-')}-{fingerprint(drawn.question)[:12]}"
    return Task(id=name, question=drawn.question, answer=drawn.answer, family=family)
