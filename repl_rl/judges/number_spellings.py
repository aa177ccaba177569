"""Conversion of number notations that the Python and LaTeX parsers do not accept into LaTeX that they accept."""

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
_NAME_AND_SIGN = r"(?:[A-Za-z]\w*\s*=\s*)?[+-]?\s*"
_LATEX_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\{,\}|,?\\!|\\,)\s*\d{3})+(?![\d,])")
_NUMBER_WITH_COMMAS = re.compile(rf"({_NAME_AND_SIGN})({_THOUSANDS})(\.\d*)?(\s*\\?%)?")
_LIST_WITH_COMMAS = re.compile(
    rf"((?:\\?\{{|\(|\[)?)\s*{_THOUSANDS}(?:\s*;\s*{_THOUSANDS}|,\s+{_THOUSANDS})+\s*((?:\\?\}}|\)|\])?)"
)
_MIXED = re.compile(rf"({_NAME_AND_SIGN})(\d+)\s+(\d+)\s*/\s*(\d+)(\s*\\?%)?")
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
    return _ROOT.sub(lambda match: f"\\sqrt{{{match[1]}}}" if match[1] else "\\sqrt", text)


def rewrite_numbers(text: str) -> str:
    """Rewrite thousands such as `x = 1,000`, mixed numbers such as `1 1/2`, and repeating decimals."""
    text = _SPACE_BEFORE_PERCENT.sub("", _PERCENT_WORD.sub(r"\\%", text))
    text = _LATEX_THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    if number := _NUMBER_WITH_COMMAS.fullmatch(text):
        text = f"{number[1]}{number[2].replace(',', '')}{number[3] or ''}{number[4] or ''}"
    elif _LIST_WITH_COMMAS.fullmatch(text):
        text = re.sub(_THOUSANDS, lambda match: match[0].replace(",", ""), text)
    elif (mixed := _MIXED.fullmatch(text)) and int(mixed[3]) < int(mixed[4]):
        text = f"{mixed[1]}{mixed[2]}\\frac{{{mixed[3]}}}{{{mixed[4]}}}{mixed[5] or ''}"
    return _LETTER.sub(r" \1 ", _REPEATING.sub(_expand_repeating, text))


def _expand_repeating(match: re.Match[str]) -> str:
    """Return a repeating decimal as an exact fraction. Its last digits, under a bar, repeat forever."""
    whole, fixed, repeating = match[1] or "0", match[2], match[3] or match[4]
    scale = 10 ** len(fixed)
    value = Fraction(int(whole + fixed), scale) + Fraction(int(repeating), scale * (10 ** len(repeating) - 1))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def mark_bases(text: str) -> str:
    """Replace numbers with a base, such as `204_5`, by symbol names, and remove separators, as in `1_000`.

    A number with base 10 only loses its base.
    """
    text = _UNDERSCORES.sub(lambda match: match[0].replace("_", ""), text)
    return _BASED.sub(_read_base, text)


def _read_base(match: re.Match[str]) -> str:
    number, base = match[1], int(match[2] or match[3])
    name = (number.lstrip("0") or "0").replace(".", "point")
    return number if base == 10 else f"\\text{{{name}base{base}}}"


def split_percent(text: str) -> str | None:
    """Return the text before the percent sign at the end, or None if the sign is not for the whole text."""
    match = re.fullmatch(r"(.*[^\s\\])\s*\\?%", text, re.DOTALL)
    if not match or "%" in match[1]:
        return None
    depth, start = 0, re.match(_NAME_AND_SIGN, match[1])
    for mark in match[1][start.end() if start else 0 :]:
        depth += (mark in "{([") - (mark in "})]")
        if depth == 0 and mark in "+-,;=<>&":
            return None
    return match[1]
