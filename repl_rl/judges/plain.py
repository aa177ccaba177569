"""Judges that compare texts and numbers. They take bounded time on any answer, so they run in this process."""

import re
from fractions import Fraction

from repl_rl.errors import ConfigError
from repl_rl.tasks import Task

MAX_ANSWER_CHARS = 10_000
"""Longest answer that can be right, characters."""
_MAX_NUMBER_CHARS = 4000
"""Longest number, characters. Python itself reads no more than 4,300 digits."""
_MAX_EXPONENT = 400
"""Largest exponent of a number. Every finite float of 64 bits has a smaller one."""
_RELATIVE_TOLERANCE = Fraction(1, 10**9)
_NUMBER = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d*)(?:\.(\d*))?(?:[eE]([+-]?\d{1,3}))?", re.ASCII)
_DECIMAL = re.compile(r"[.eE]")


def exact(task: Task, answer: str) -> float:
    """Return 1.0 if the texts are equal after normalisation.

    Normalisation strips white space at both ends, and then one pair of equal quotes around the whole. So `'abc'`,
    `"abc"` and `abc` are one answer, and the integer 160 equals `160`. Case and inner spaces count.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return 0.0
    return float(_normalised(answer) == _normalised(task.answer))


def numeric(task: Task, answer: str) -> float:
    """Return 1.0 if both are equal numbers. With a point or an exponent in either, a relative 1e-9 is tolerated.

    A number is decimal digits with an optional sign, `$`, thousands commas, fraction (also `18.`) and exponent, or two
    such numbers divided by `/`. Any other text, and any text over 4,000 characters, is wrong.

    Raises:
        ConfigError: the reference answer is not a number.
    """
    reference = read_reference(task)
    value = parse_number(answer)
    if value is None:
        return 0.0
    tolerance = _RELATIVE_TOLERANCE if _DECIMAL.search(task.answer) or _DECIMAL.search(answer) else 0
    return float(abs(value - reference) <= tolerance * max(abs(value), abs(reference)))


def read_reference(task: Task) -> Fraction:
    """Return the reference answer of a task for `numeric`.

    Raises:
        ConfigError: the answer is not a number.
    """
    reference = parse_number(task.answer)
    if reference is None:
        raise ConfigError(task.reference, task.answer[:80], "the numeric judge needs a number")
    return reference


def parse_number(text: str) -> Fraction | None:
    """Return the exact value of a number as `numeric` reads it, or None. Takes bounded time on any text."""
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
