"""Tasks drawn from the seeded families: any number of them, on either side of the split."""

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
"""Names after `builtin:`, and the families that each stands for."""


def families_of(source: str) -> tuple[str, ...]:
    """The families that `builtin:NAME` stands for.

    Raises:
        ConfigError: there is no such name.
    """
    kind, _, name = source.partition(":")
    if kind != "builtin" or name not in BUILTIN:
        names = [name for name in BUILTIN if "/" not in name]
        remedy = f"choose among {', '.join(names)}; graded and {', '.join(TOPICS)} also with a level: dates/2"
        raise ConfigError("built-in tasks", name if kind == "builtin" else source, remedy)
    return BUILTIN[name]


def sketch(family: str, rng: random.Random, split: Split = Split.ALL) -> Sketch:
    """Draw one problem of `family` whose question lies in `split`.

    Raises:
        ConfigError: there is no such family, or none of many draws falls in the split.
    """
    if family not in _KNOWN:
        raise ConfigError("task family", family, f"choose among {', '.join(_KNOWN)}")
    for _ in range(_DRAWS_PER_TASK):
        drawn = _KNOWN[family](rng)
        if split is Split.ALL or split_of(drawn.question) is split:
            return drawn
    raise ConfigError("task family", family, f"it has too few questions in the split {split!s}")


def generate(families: Sequence[str], split: Split | str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` (>= 1) different tasks in equal shares of the families, interleaved. Equal arguments, equal tasks.

    Raises:
        ConfigError: an unknown family or split, `count` below 1, or more than the families can give.
    """
    if count < 1 or not families:
        raise ConfigError("number of tasks", count if families else 0, "ask for at least 1 task of at least 1 family")
    side = parse_split(split)
    rngs = {family: random.Random(f"{seed}/{side}/{family}") for family in families}
    tasks: dict[str, Task] = {}
    for n in range(count):
        family = families[n % len(families)]
        for _ in range(_DRAWS_PER_TASK):
            drawn = sketch(family, rngs[family], side)
            if drawn.question not in tasks:
                break
        else:
            raise ConfigError("number of tasks", count, f"family {family!r} has too few different questions")
        tasks[drawn.question] = task_of(family, drawn)
    return tuple(tasks.values())


def task_of(family: str, drawn: Sketch) -> Task:
    """The task that asks what was drawn of `family`. Equal questions of a family have equal ids."""
    name = f"{family.replace('/', '-')}-{fingerprint(drawn.question)[:12]}"
    return Task(id=name, question=drawn.question, answer=drawn.answer, family=family)
