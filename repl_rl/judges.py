"""Host-side grading. An answer is untrusted text: no judge ever evaluates it.

A task names its judge: `exact`, `numeric`, or `module:function` for one of the user's own.
"""

import importlib
import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from types import MappingProxyType

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.tasks import Task

Judge = Callable[[Task, str], float]
"""Takes a task and a submitted answer, returns an outcome reward: finite, 1.0 for right and 0.0 for wrong."""

_MAX_ANSWER_CHARS = 10_000
_MAX_NUMBER_CHARS = 64
_MAX_EXPONENT = 300
_RELATIVE_TOLERANCE = Fraction(1, 10**9)
_NUMBER = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d*)(?:\.(\d*))?(?:[eE]([+-]?\d{1,3}))?", re.ASCII)


def grade(task: Task, answer: str | None) -> float:
    """The outcome reward of `answer` under the task's judge. None: nothing was submitted, which is worth 0.0.

    Raises:
        ConfigError: there is no such judge.
        UserCodeError: a judge of the user raised, or returned something that is not a finite number.
    """
    judge = find_judge(task.judge)
    return 0.0 if answer is None else judge(task, answer)


@lru_cache(maxsize=64)
def find_judge(name: str) -> Judge:
    """The judge of that name. Call it before a run to refuse a bad name early.

    Raises:
        ConfigError: it is neither a shipped judge nor an importable `module:function`.
    """
    if name in JUDGES:
        return JUDGES[name]
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ConfigError("judge", name, f"choose among {', '.join(JUDGES)}, or give module:function")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError("judge", name, f"it cannot be imported: {error}") from error
    except Exception as error:
        raise UserCodeError(f"judge {name}: importing {module!r} raised {error!r}; mend the module") from error
    if not callable(found):
        raise ConfigError("judge", name, f"{function!r} is not a function")
    return _guarded(name, found)


def exact(task: Task, answer: str) -> float:
    """1.0 when the texts are equal after normalisation.

    Normalisation strips white space at both ends, then one pair of equal quotes around the whole, so that `'abc'`,
    `"abc"` and `abc` are one answer and the integer 160 equals `160`. Case and inner spaces count.
    """
    if len(answer) > _MAX_ANSWER_CHARS:
        return 0.0
    return float(_normalised(answer) == _normalised(task.answer))


def numeric(task: Task, answer: str) -> float:
    """1.0 when both are numbers and equal to within a relative 1e-9.

    A number is decimal digits with an optional sign, `$`, thousands commas, fraction (`18.` too) and exponent, or
    two such divided by `/`. Anything else, or anything over 64 characters, is no number and is wrong.

    Raises:
        ConfigError: the reference answer is no number.
    """
    reference = parse_number(task.answer)
    if reference is None:
        raise ConfigError(f"answer of task {task.id}", task.answer[:80], "the numeric judge needs a number")
    value = parse_number(answer)
    if value is None:
        return 0.0
    return float(abs(value - reference) <= _RELATIVE_TOLERANCE * max(abs(value), abs(reference)))


def parse_number(text: str) -> Fraction | None:
    """The exact value of a number as `numeric` understands it, or None. Takes bounded time on any text."""
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    over, slash, under = _normalised(text).partition("/")
    numerator = _decimal(over)
    if not slash:
        return numerator
    denominator = _decimal(under)
    return numerator / denominator if numerator is not None and denominator else None


def _decimal(text: str) -> Fraction | None:
    match = _NUMBER.fullmatch(text.replace("$", "", 1).strip())
    if match is None:
        return None
    sign, whole, fraction, exponent = match[1], match[2].replace(",", ""), match[3] or "", int(match[4] or 0)
    if not whole + fraction or abs(exponent) > _MAX_EXPONENT:
        return None
    value = Fraction(int(whole + fraction), 10 ** len(fraction)) * Fraction(10) ** exponent
    return -value if sign == "-" else value


def _normalised(text: str) -> str:
    text = text.strip()
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


def _guarded(name: str, function: Callable[[Task, str], object]) -> Judge:
    """A judge of the user whose errors are attributed to it."""

    def judge(task: Task, answer: str) -> float:
        try:
            value = function(task, answer)
        except Exception as error:
            raise UserCodeError(f"judge {name} raised on task {task.id}: {error!r}; mend the judge") from error
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UserCodeError(f"judge {name} returned {value!r} for task {task.id}; return a finite number")
        return float(value)

    return judge


JUDGES: MappingProxyType[str, Judge] = MappingProxyType({"exact": exact, "numeric": numeric})
