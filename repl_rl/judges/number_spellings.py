"""Rewriting of numbers in spellings that the readers of Python and LaTeX do not know, as LaTeX that they know."""

import re
from fractions import Fraction

_MARKS = str.maketrans(
    {
        **dict.fromkeys("−‐‑﹣－", "-"),
        **dict.fromkeys("·⋅", "*"),
        "×": "*",
        **dict.fromkeys("÷⁄", "/"),
        "²": "^2",
        "³": "^3",
        "π": " pi ",
        "∞": " oo ",
        "°": "^\\circ ",
    }
)
# Between two digits, an en dash means a range.
_EN_DASH = re.compile(r"(?<!\d)–|–(?!\d)")
_ROOT = re.compile(r"√\s*(?:(\d+(?:\.\d+)?|pi\b|[A-Za-z])|(?=[({]))")
_THOUSANDS = r"\d{1,3}(?:,\d{3})+"
_NAMED = r"(?:[A-Za-z]\w*\s*=\s*)?[+-]?\s*"
_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\{,\}|,?\\!|\\,)\s*\d{3})+(?![\d,])")
_ONE = re.compile(rf"({_NAMED})({_THOUSANDS})(\.\d*)?(\s*\\?%)?")
_SEVERAL = re.compile(
    rf"((?:\\?\{{|\(|\[)?)\s*{_THOUSANDS}(?:\s*;\s*{_THOUSANDS}|,\s+{_THOUSANDS})+\s*((?:\\?\}}|\)|\])?)"
)
_MIXED = re.compile(rf"({_NAMED})(\d+)\s+(\d+)\s*/\s*(\d+)(\s*\\?%)?")
_REPEATING = re.compile(r"(?<!\d)(\d*)\.(\d*)\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))(?!\d)")
_PERCENT = r"\s*(?:percent|percentage|pct)\s*"
_PERCENT_WORD = re.compile(rf"\\text\s*\{{{_PERCENT}\}}|(?<=[\d)}}]){_PERCENT}$")
_SPACE_BEFORE_PERCENT = re.compile(r"(?:\s|~|\\[,;:! ])+(?=\\?%)")
_BASED = re.compile(r"(?<![\w.}\\])(\d[\d.]*)_(?:(\d)|\{\s*(\d+)\s*\})")
_UNDERSCORES = re.compile(r"(?<![\w.])\d{1,3}(?:_\d{3})+(?!\w)")
_LETTER = re.compile(r"\\(?:text|mathrm)\s*\{\s*([ei])\s*\}")


def rewrite_marks(text: str) -> str:
    """Rewrite marks of mathematics outside ASCII: signs, `√2` and `90°`."""
    text = _EN_DASH.sub("-", text.translate(_MARKS))
    return _ROOT.sub(lambda found: f"\\sqrt{{{found[1]}}}" if found[1] else "\\sqrt", text)


def rewrite_numbers(text: str) -> str:
    """Rewrite thousands such as `x = 1,000`, mixed numbers such as `1 1/2`, and repeating decimals."""
    text = _SPACE_BEFORE_PERCENT.sub("", _PERCENT_WORD.sub(r"\\%", text))
    text = _GROUPS.sub(lambda found: re.sub(r"\D", "", found[0]), text)
    if one := _ONE.fullmatch(text):
        text = f"{one[1]}{one[2].replace(',', '')}{one[3] or ''}{one[4] or ''}"
    elif _SEVERAL.fullmatch(text):
        text = re.sub(_THOUSANDS, lambda found: found[0].replace(",", ""), text)
    elif (mixed := _MIXED.fullmatch(text)) and int(mixed[3]) < int(mixed[4]):
        text = f"{mixed[1]}{mixed[2]}\\frac{{{mixed[3]}}}{{{mixed[4]}}}{mixed[5] or ''}"
    return _LETTER.sub(r" \1 ", _REPEATING.sub(_expand_repeating, text))


def _expand_repeating(repeating: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction: digits once, then digits again and again."""
    whole, once, again = repeating[1] or "0", repeating[2], repeating[3] or repeating[4]
    ones = 10 ** len(once)
    value = Fraction(int(whole + once), ones) + Fraction(int(again), ones * (10 ** len(again) - 1))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def mark_bases(text: str) -> str:
    """Make names of numbers with a base other than 10, such as `204_5`, and remove separators such as `1_000`."""
    text = _UNDERSCORES.sub(lambda found: found[0].replace("_", ""), text)
    return _BASED.sub(_read_base, text)


def _read_base(found: re.Match[str]) -> str:
    number, base = found[1], int(found[2] or found[3])
    name = (number.lstrip("0") or "0").replace(".", "point")
    return number if base == 10 else f"\\text{{{name}base{base}}}"


def split_percent(text: str) -> str | None:
    """Return the text before the percent sign at the end, or None if the sign is not for the whole text."""
    found = re.fullmatch(r"(.*[^\s\\])\s*\\?%", text, re.DOTALL)
    if not found or "%" in found[1]:
        return None
    depth, start = 0, re.match(_NAMED, found[1])
    for mark in found[1][start.end() if start else 0 :]:
        depth += (mark in "{([") - (mark in "})]")
        if depth == 0 and mark in "+-,;=<>&":
            return None
    return found[1]
