"""Units and other words after a value, such as `5 cm`, `5\\text{ m/s}` and `18\\text{ eggs}`.

A single letter and an unknown word after a number are no unit, unless the text marks them as words.
"""

import re
from typing import NamedTuple

_SPELLINGS = {
    "millimeter": "mm millimetre",
    "centimeter": "cm centimetre",
    "decimeter": "dm decimetre",
    "meter": "m metre mtr",
    "kilometer": "km kilometre",
    "inch": "in inche",
    "foot": "ft feet",
    "yard": "yd",
    "mile": "mi",
    "milligram": "mg",
    "gram": "g gm",
    "kilogram": "kg",
    "ounce": "oz",
    "pound": "lb",
    "milliliter": "ml millilitre",
    "liter": "l litre",
    "gallon": "gal",
    "second": "s sec",
    "minute": "min",
    "hour": "h hr",
    "year": "yr",
    "degree": "deg",
    "mph": "",
    "kmh": "kmph",
    "man": "men",
    "woman": "women",
}
"""Other spellings of a unit, by its name."""
_NAMES = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in (name, *spellings.split())}
"""Spelling of a unit -> its name."""
_OTHER_WORDS = """
    ton day week month cent rupee ohm acre hectare unit radian apple coin digit edge tile mark student soldier monkey
    toy meal ticket
"""
_LETTERS = frozenset("mgslhLCF")
"""Single letters that are a unit if they are marked as a word."""
_LONG = sorted({word for word in (*_NAMES, *_OTHER_WORDS.split()) if len(word) > 2 and word.isalpha()}, key=len)[::-1]
_SHORT = ("mm", "cm", "dm", "km", "in", "ft", "yd", "mi", "mg", "gm", "kg", "oz", "lb", "ml", "hr", "yr")
_NAME = rf"(?:{'|'.join(_LONG)})(?:s|es)?|(?:{'|'.join(_SHORT)})"
_POWER = r"(?:\s*\^\s*(?:[23]|\{\s*[23]\s*\}))?"
_PLAIN = re.compile(
    rf"(?:(?<=[\d)}}\]])|(?<=\w\s))\s*"
    rf"((?:(?:square|cubic|sq|cu)\.?\s+)?(?:{_NAME}){_POWER}(?:\s*(?:/|\bper\b)\s*(?:{_NAME}|[hs])){{0,2}}{_POWER})\s*$"
)
_MARKED = re.compile(rf"\\(text|textrm|textnormal|mbox|mathrm)\s*\{{([^{{}}]*)\}}({_POWER})\s*$")
_SPACE = re.compile(r"(?:\s|~|\\[,;:! ]|\\q?quad(?![A-Za-z]))+$")
_ENDS_IN_COMMAND = re.compile(r"\\([A-Za-z]+)$")
_VALUES = re.compile(
    r"(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|upsilon|phi"
    r"|chi|psi|omega)|circ|infty",
    re.IGNORECASE,
)
"""Commands of LaTeX that are values. After any other, such as `\\cdot`, a word is a part of the formula."""


class Measured(NamedTuple):
    """A text without the unit after its value."""

    value: str
    unit: str
    """The unit's name, which is the same for all its spellings, or "" if the text has none."""
    word: str
    """The unit as the text spells it."""
    certain: bool
    """False if the unit may be a product of letters: `5mm` may be `5*m*m`."""


def split_unit(text: str, other_unit: str = "") -> Measured:
    """Split the unit from the end of a text. `other_unit` is the unit of the text to compare with."""
    # A word in a command such as `\text` may be any unit.
    if marked := _MARKED.search(text):
        value, word = _SPACE.sub("", text[: marked.start()]), marked[2].strip()
        if _ends_in_value(value) and (len(word) > 1 or word in _LETTERS) and re.search(r"[^\W\d_]", word):
            word = f"{word}{marked[3]}"
            return Measured(value, _normalize_unit(word), word, True)
    # Without a command, only a known unit counts. Up to two letters may also be variables.
    elif plain := _PLAIN.search(text):
        value, word = _SPACE.sub("", text[: plain.start()]), plain[1].strip()
        if _ends_in_value(value):
            return Measured(
                value, _normalize_unit(word), word, len(re.findall(r"[^\W\d_]", word)) > 2 and "/" not in word
            )
    # Any word is a unit if the other text has it as its unit.
    elif other_unit and (match := re.search(rf"(?<=[\d)}}\]])\s*{re.escape(other_unit)}\s*$", text)):
        return Measured(text[: match.start()], _normalize_unit(other_unit), other_unit, False)
    return Measured(text, "", "", True)


def _ends_in_value(text: str) -> bool:
    """Return True if a unit may follow the text."""
    command = _ENDS_IN_COMMAND.search(text)
    return bool(_VALUES.fullmatch(command[1]) if command else re.search(r"[\w)}\]!|.%]$", text))


def _normalize_unit(word: str) -> str:
    """Return the name that all spellings of a unit share."""
    word = re.sub(r"[{}\s.]+", " ", word).strip()
    # `5 m` and `5 M` may differ, but words do not.
    word = word if len(word) == 1 else word.casefold()
    word = re.sub(r"^(?:square|sq) (.*)", r"\1^2", word)
    word = re.sub(r"^(?:cubic|cu) (.*)", r"\1^3", word)
    word = re.sub(r"[^\W\d_]+", lambda match: _singularize(match[0]), word)
    word = re.sub(r"\s*([/^])\s*", r"\1", re.sub(r"\s*\bper\b\s*", "/", word))
    return {"mile/hour": "mph", "kilometer/hour": "kmh"}.get(word, word)


def _singularize(word: str) -> str:
    singular = word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith("ss") else word
    return _NAMES.get(word) or _NAMES.get(singular, singular)
