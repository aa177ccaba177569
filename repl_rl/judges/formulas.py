"""Formulas as Python or LaTeX. Each text is read as a whole, and values are compared.

A text without a backslash is first read as Python (`python_formulas`). Any other text is read as LaTeX, and the
whole text must be one formula. An ambiguous text is read as both. Words are compared as words. Sympy may take long on
hostile text, so only a limited process imports this module.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

import sympy
from antlr4 import CommonTokenStream, InputStream, Token
from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended.antlr_parser import PSLexer, PSParser
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.sets import FiniteSet
from math_verify import verify
from math_verify.grader import should_treat_as_complex

from repl_rl.judges.measures import split_unit
from repl_rl.judges.python_formulas import (
    CONSTANTS,
    FUNCTIONS,
    NotPython,
    TooLarge,
    as_matrix,
    check_size,
    read_python,
)
from repl_rl.judges.spellings import mark_bases, rewrite_marks, rewrite_numbers, split_percent

DECIMAL_TOLERANCE = 1e-9
"""Relative tolerance if either number is a decimal. The judge `numeric` has the same one."""
_EXACT_DIGITS, _EXACT_TOLERANCE = 60, sympy.Float("1e-40")
"""Digits to which two exact numbers are evaluated, and the relative difference up to which they count as equal."""
_SHORT_WORD = 3
"""Longest run of letters that may be a product, as `xy` is."""

_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)


class _NotLatex(Exception):
    """The grammar of LaTeX refuses a text."""


def is_equal(reference: str, answer: str) -> bool:
    """Return True if both texts are formulas of equal value, or equal words.

    Raises:
        ValueError: the reference is neither.
    """
    wanted, given = _Text(reference), _Text(answer)
    if not wanted.spoken:
        raise ValueError("it is no formula")
    if wanted.spoken == given.spoken:
        return True
    if not given.spoken or (wanted.words and given.words):
        return bool(given.spoken) and wanted.words == given.words
    real = not any(map(_is_complex, (wanted.bare, given.bare)))
    # A short word is a product of letters, unless the other text has short words, too.
    wanted_readings = wanted.readings(real, not given.has_short_words, split_unit(given.bare).word)
    given_readings = given.readings(real, not wanted.has_short_words, split_unit(wanted.bare).word)
    return _same_brackets(wanted, given, real) and any(
        _same(one, other)
        for unit, values in wanted_readings
        for other_unit, other_values in given_readings
        # Either text may leave its unit out.
        if not unit or not other_unit or unit == other_unit
        for one in values
        for other in other_values
    )


def is_readable(text: str) -> bool:
    """Return True for a formula, for words, and for plain text of letters, digits and marks.

    Plain text equals only the same text. A formula without a value that can be computed, such as `0/0`, and a false
    equation are not readable.
    """
    found = _Text(text)
    if not found.spoken or found.words:
        return bool(found.words)
    if found.spoken.lower() == "nan":
        return True
    try:
        values = [value for _, each in found.readings(real=not _is_complex(found.bare)) for value in each]
        if values:
            return all(map(_is_definite, values))
        plain = _PLAIN.fullmatch(found.spoken) and re.search(r"\w", found.spoken)
        return bool(plain or _whole_formula(found.bare, multiply=True))
    except MemoryError:
        raise
    except Exception:
        # For the reason given in `read_latex`.
        return False


def _is_complex(text: str) -> bool:
    return bool(should_treat_as_complex(text) or _IMAGINARY.search(text))


# Texts

_KNOWN = frozenset(
    re.findall(
        r"\w+",
        """
        pi oo inf infty infinity nan exp log ln lg sin cos tan cot sec csc asin acos atan arcsin arccos arctan sinh
        cosh tanh sqrt cbrt abs max min gcd lcm mod det lim sum int prod deg
        """,
    )
)
_RUN = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}"
)
_PHRASES = re.compile(r"[^\W\d_]+(?:[ .,;'-]+[^\W\d_]+)*\.?")
_SEPARATOR = re.compile(r"\s*[,;]\s*(?:and|or)\s+|\s*[,;]\s*|\s+(?:and|or)\s+")
_WHOLE = re.compile(r"(?:^|(?<=[,;{}()\[\]=&]))(\s*)([A-Za-z]{2,})(\s*)(?=$|[,;{}()\[\]=&\\])")
_LONG = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{4,}(?![A-Za-z}])|(?<=[,\s({])[A-Za-z]{4,}(?=[,\s)}])")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[A-Za-z*]+\}")
_WRAPPED_NUMBER = re.compile(r"\\text\s*\{([^{}A-Za-z]*\d[^{}A-Za-z]*)\}")
_SIGNED_DOLLARS = re.compile(r"([+-])\s*\\?\$\s*(?=[\d.])")
_MEMBERSHIP = re.compile(r"[A-Za-z]\w*\s*(?:\\in(?![A-Za-z])|=(?!=))\s*")
_SQRT = re.compile(r"\\sqrt\s*\(")
_FUNCTION = re.compile(r"(?<![\\A-Za-z])(sin|cos|tan|cot|sec|csc|log|ln|sqrt|pi|infty)(?![A-Za-z])")
_IMAGINARY = re.compile(r"(?<![\\A-Za-z])i(?![A-Za-z_])|(?<![\\A-Za-z_])I(?![A-Za-z_])|\d[jJ](?![A-Za-z_])")
_PLAIN = re.compile(r"[\w\s.,:;'/-]+")
_RELATIONS = re.compile(
    r"\\(?:approx|approxeq|sim|simeq|cong|to|\w*arrow|implies|iff|mapsto|therefore|because)(?![A-Za-z])"
)
_SUBSCRIPT = re.compile(r"_\{[^{}]*\}")
_LONE_I = re.compile(r"(?<![\\A-Za-z_])i(?![A-Za-z_])")


class _Text:
    """A text without the marks around its formula."""

    def __init__(self, text: str) -> None:
        bare = _unwrapped(rewrite_marks(text))
        self.bare = rewrite_numbers(bare)
        spoken = " ".join(_WRAPPED.sub(r"\1", bare).split())
        self.spoken = spoken if re.sub(r"[\s\\{}$]", "", spoken) else ""
        """The text without LaTeX's marks around words; "" if nothing is left."""
        self.words = _words(spoken)
        self.has_short_words = any(len(word[2]) <= _SHORT_WORD for word in _WHOLE.finditer(spoken))

    def readings(
        self, real: bool, multiply: bool = True, other_unit: str = ""
    ) -> Sequence[tuple[str, Sequence[sympy.Basic]]]:
        """Return units and values. With `multiply`, a short word by itself is a product of letters.

        `other_unit` is the unit of the text that this one is compared with.
        """
        measured = split_unit(self.bare, other_unit)
        found = [(measured.unit, _values(measured.value, real, multiply))]
        return found if measured.certain else [*found, ("", _values(self.bare, real, multiply))]


def _values(text: str, real: bool, multiply: bool) -> Sequence[sympy.Basic]:
    """Return the values of a text as Python and as LaTeX."""
    found = _python(text, real)
    runs = _RUN.findall(_ENVIRONMENT.sub("", text))
    # With a long word or a known name in it, the reading as Python is not ambiguous.
    if found and any(len(run) > _SHORT_WORD or run in FUNCTIONS or run in CONSTANTS for run in runs):
        return found
    value = None if found == [sympy.nan] else read_latex(text, real, multiply)
    return found if value is None else [*found, value]


def _python(text: str, real: bool) -> list[sympy.Basic]:
    """Return the value as Python, or nothing if the text is not Python. A value that is too large becomes `nan`."""
    if "\\" in text:
        return []
    try:
        return [read_python(text, real)]
    except TooLarge:
        return [sympy.nan]
    except NotPython:
        return []


def _same_brackets(wanted: _Text, given: _Text, real: bool) -> bool:
    """Return False if the brackets around two texts make their values unequal.

    A set is neither a list nor a tuple. A list may be a tuple, but an open interval is not a closed one.
    """
    one, other = _brackets(wanted.bare), _brackets(given.bare)
    if not one or not other or one == other:
        return True
    if "{" in (one, other):
        return False
    value = read_latex(wanted.bare, real)
    return not isinstance(value.rhs if isinstance(value, sympy.Eq) else value, sympy.Interval)


def _brackets(text: str) -> str:
    """Return the opening bracket of several values between one pair of brackets, or ""."""
    text = re.sub(r"\\([{}])", r"\1", re.sub(r"\\(?:left|right)\s*(?![A-Za-z])", "", text))
    text = text[found.end() :] if (found := _MEMBERSHIP.match(text)) else text
    several = re.search(r"[,;:]", text) and text[0] in "([{" and _closing(text, 0) == len(text) - 1
    return text[0] if several else ""


def _unwrapped(text: str) -> str:
    """Remove the quotes, dollar signs, LaTeX brackets and boxes around the whole text."""
    before = None
    # Repeat, because the marks may be nested.
    while text != before:
        before, text = text, text.strip()
        if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
            text = text[1:-1]
        for start, end in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            if len(text) >= len(start + end) and text.startswith(start) and text.endswith(end):
                inner = text[len(start) : -len(end)]
                text = text if start in inner else inner
        for box in ("\\boxed", "\\fbox"):
            if text.startswith(box) and _closing(text, len(box)) == len(text) - 1:
                text = text[len(box) + 1 : -1]
        if number := _WRAPPED_NUMBER.fullmatch(text):
            text = number[1]
    return _SIGNED_DOLLARS.sub(r"\1", text.removeprefix("\\$").removeprefix("$").strip(), count=1)


def _closing(text: str, opening: int) -> int:
    """Return the index of the bracket that closes the one at `opening`, or -1."""
    depth, pair = 0, text[opening : opening + 1]
    closes = {"{": "}", "(": ")", "[": "]"}.get(pair)
    for at in range(opening, len(text) if closes else 0):
        depth += (text[at] == pair) - (text[at] == closes)
        if depth == 0:
            return at
    return -1


def _words(spoken: str) -> frozenset[str]:
    """Return the phrases of a text that consists of words alone, without case.

    Commas, semicolons, `and` and `or` separate the phrases.
    """
    runs = [run for run in re.findall(r"[^\W\d_]{2,}", spoken) if run.lower() not in ("and", "or")]
    if not runs or not _PHRASES.fullmatch(spoken) or any(run.lower() in _KNOWN for run in runs):
        return frozenset()
    parts = _SEPARATOR.split(spoken.rstrip("."))
    return frozenset(" ".join(part.casefold().split()) for part in parts)


# LaTeX


@lru_cache(maxsize=256)
def read_latex(text: str, real: bool, multiply: bool = False) -> sympy.Basic | None:
    """Return the value of the whole text as one formula, or None. A value that is too large becomes `nan`."""
    value = _read_latex(text, real, multiply)
    if value is None and (part := split_percent(text)):
        # latex2sympy knows only the percent sign after a plain number.
        value = _percentage(_read_latex(part, real, multiply))
    return value


def _read_latex(text: str, real: bool, multiply: bool) -> sympy.Basic | None:
    try:
        line = _whole_formula(text, multiply)
        value = line and latex2sympy(line, is_real=real, convert_degrees=False, normalization_config=None)
        if line and value is not None:
            check_size(value)
    except MemoryError:
        raise
    except TooLarge:
        return sympy.nan
    except Exception:
        # The library may raise any error on hostile text, which is then not a formula.
        return None
    # `[42, 42]` is a list of two numbers, not an interval.
    single = isinstance(value, sympy.FiniteSet | type(sympy.S.EmptySet))
    return None if line is None or (single and line.startswith("[")) else value


def _percentage(value: sympy.Basic | None) -> sympy.Basic | None:
    """Return a number, or the number that a name equals, as percent in the form of latex2sympy."""
    if isinstance(value, sympy.Eq) and value.lhs.is_Symbol and (right := _percentage(value.rhs)):
        return sympy.Eq(value.lhs, right, evaluate=False)
    if value is None or not _is_number(value) or value is sympy.nan:
        return value if value is sympy.nan else None
    return sympy.Mul(value.doit(), sympy.UnevaluatedExpr(sympy.Rational(1, 100)), evaluate=False)


def _whole_formula(text: str, multiply: bool) -> str | None:
    """Return the text as latex2sympy reads it, or None if it is not one formula from end to end."""
    line = _on_one_line(text)
    if line is None or re.search(r"\\boxed|\\fbox|(?<!\\)\$", line) or _RELATIONS.search(_SUBSCRIPT.sub("", line)):
        return None
    line = re.sub(r"(?<!\\)%", r"\%", line)
    # Rewrite Python's spellings.
    if "\\" not in line:
        line = re.sub(r"\boo\b", r"\\infty ", line.replace("**", "^").replace("*I", "I"))
    if not re.search(r"_\s*(?:i|\{[^{}]*\bi\b)", line):
        # latex2sympy takes `i` for a variable.
        line = _LONE_I.sub("I", line)
    line = normalize_latex(_FUNCTION.sub(r"\\\1 ", _with_braced_roots(line)), _NORMALIZATION)
    line = mark_bases(_with_words(line, multiply))
    return line if _is_one_formula(line) else None


def _on_one_line(text: str) -> str | None:
    """Replace newlines within brackets or environments by spaces. Return None if other newlines exist."""
    if "\n" not in text:
        return text
    depth, places = 0, re.finditer(r"\\begin\b|\\end\b|\\?[{}()\[\]]|\n", text)
    for place in places:
        mark = place[0].lstrip("\\")
        depth += (mark in ("begin", "{", "(", "[")) - (mark in ("end", "}", ")", "]"))
        if mark == "\n" and depth <= 0:
            return None
    return text.replace("\n", " ")


def _with_words(text: str, multiply: bool) -> str:
    """Mark words as names, as in `\\text{blue}`, so that their letters are not multiplied."""
    environments = [(m.start(), m.end()) for m in _ENVIRONMENT.finditer(text)]
    wrapped = [(m.start(), m.end()) for m in _WRAPPED.finditer(text)]

    def name(found: re.Match[str], word: str) -> str:
        inside = any(start <= found.start() < end for start, end in (*environments, *wrapped))
        short = len(word) <= _SHORT_WORD
        if inside or word.lower() in (*_KNOWN, "and", "or", "percent", "percentage", "pct") or (short and multiply):
            return found[0]
        return found[0].replace(word, f"\\text{{{word}}}")

    text = _LONG.sub(lambda found: name(found, found[0]), text)
    # The first substitution has moved the marks.
    environments = [(m.start(), m.end()) for m in _ENVIRONMENT.finditer(text)]
    wrapped = [(m.start(), m.end()) for m in _WRAPPED.finditer(text)]
    return _WHOLE.sub(lambda found: name(found, found[2]), text)


def _with_braced_roots(text: str) -> str:
    """Rewrite `\\sqrt(2)` as `\\sqrt{2}`."""
    at = 0
    while found := _SQRT.search(text, at):
        opening = found.end() - 1
        closing = _closing(text, opening)
        if closing < 0:
            break
        text = f"{text[: found.start()]}\\sqrt{{{text[opening + 1 : closing]}}}{text[closing + 1 :]}"
        at = found.start() + 1
    return text


class _Refuses:
    """Error listener of antlr that refuses the first error. Calls of other methods do nothing."""

    def syntaxError(self, *about: object) -> None:
        raise _NotLatex

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *about: None


def _is_one_formula(text: str) -> bool:
    """Return True if the grammar of LaTeX reads the text to its end."""
    # The fast mode of antlr reads nearly all formulas. A formula that it refuses may still be valid.
    return any(_is_read_to_its_end(text, mode) for mode in (PredictionMode.SLL, PredictionMode.LL))


def _is_read_to_its_end(text: str, mode: PredictionMode) -> bool:
    lexer = PSLexer(InputStream(text))
    parser = PSParser(CommonTokenStream(lexer))
    parser._interp.predictionMode = mode
    for part in (lexer, parser):
        part.removeErrorListeners()
        part.addErrorListener(_Refuses())
    try:
        parser.math()
    except _NotLatex:
        return False
    ended: bool = parser.getCurrentToken().type == Token.EOF
    return ended


# Values


def _same(wanted: sympy.Basic, given: sympy.Basic) -> bool:
    """Return True if two values are equal."""
    try:
        # An answer with a false equation, such as `41 = 42`, is wrong.
        if not all(map(_holds, _equations(given))):
            return False
        wanted, given = _alike(wanted, given)
        if _is_number(wanted) and _is_number(given):
            return _same_number(wanted, given)
        if _names_its_values(wanted) and isinstance(given, sympy.Set | sympy.Tuple):
            return _same_in_order(wanted, given)
        if isinstance(wanted, sympy.MatrixBase) or isinstance(given, sympy.MatrixBase):
            return wanted.shape == given.shape and all(map(_same, wanted.flat(), given.flat()))
        if isinstance(wanted, sympy.Tuple) and isinstance(given, sympy.Tuple):
            return len(wanted) == len(given) and all(map(_same, wanted, given))
        for one, other in ((wanted, given), (given, wanted)):
            compound = isinstance(other, sympy.Rel | sympy.Set | sympy.Tuple | And)
            if one.is_Symbol and len(one.name) > 1 and not (other.is_Symbol or compound):
                # A word is not a product of letters.
                return False
        # Make equal numbers identical, because `verify` compares the rest of the structure exactly.
        known = list(_numbers(wanted))
        wanted = _with_numbers(wanted, known)
        given = _with_numbers(given, known)
        return bool(verify(wanted, given, float_rounding=12, numeric_precision=_EXACT_DIGITS, timeout_seconds=None))
    except MemoryError:
        raise
    except Exception:
        # Values that sympy cannot compare are not known to be equal.
        return False


def _names_its_values(value: sympy.Basic) -> bool:
    """Return True for equations of several names, such as `x=2, y=3`."""
    equations = value.args if isinstance(value, FiniteSet) else ()
    return all(isinstance(part, sympy.Eq) and part.lhs.is_Symbol for part in equations) and (
        len({part.lhs for part in equations}) > 1
    )


def _same_in_order(wanted: FiniteSet, given: sympy.Basic) -> bool:
    """Return True if the values, or the equations in any order, are those of the wanted equations."""
    if isinstance(given, sympy.Interval):
        parts = [given.start, given.end] if given.is_open else []
    else:
        parts = list(given._unsorted_args if isinstance(given, FiniteSet) else given.args)
    equations = list(wanted._unsorted_args)
    if parts and all(isinstance(part, sympy.Eq) for part in parts):
        equations, parts = (sorted(each, key=lambda part: str(part.lhs)) for each in (equations, parts))
        if [part.lhs for part in equations] != [part.lhs for part in parts]:
            return False
        parts = [part.rhs for part in parts]
    return len(parts) == len(equations) and all(map(_same, [part.rhs for part in equations], parts))


def _is_definite(value: sympy.Basic) -> bool:
    """Return True for a value that an answer may equal."""
    done = value.doit() if _is_number(value) else value
    return not done.has(sympy.nan, sympy.zoo) and all(map(_holds, _equations(value)))


def _is_number(value: sympy.Basic) -> bool:
    return isinstance(value, sympy.Expr) and not value.free_symbols and value.is_number is True


def _same_number(wanted: sympy.Expr, given: sympy.Expr) -> bool:
    """Return True if two numbers are equal: exact ones exactly, others to within `DECIMAL_TOLERANCE`.

    A percentage also equals its number.
    """
    percent = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
    plain = [value.xreplace({percent: sympy.Integer(1)}) for value in (wanted, given)]
    if plain != [wanted, given] and _same_value(plain[0].doit(), plain[1].doit()):
        return True
    return _same_value(wanted.doit(), given.doit())


def _same_value(wanted: sympy.Expr, given: sympy.Expr) -> bool:
    if wanted is sympy.nan or given is sympy.nan:
        return False
    if wanted == given:
        return True
    exact = not wanted.has(sympy.Float) and not given.has(sympy.Float)
    if (exact and wanted.is_Rational and given.is_Rational) or wanted.is_infinite or given.is_infinite:
        return False
    one, other = wanted.evalf(_EXACT_DIGITS), given.evalf(_EXACT_DIGITS)
    size = max(abs(one), abs(other))
    # Evaluation cannot distinguish such a number from 0.
    if exact and size < _EXACT_TOLERANCE:
        return bool(sympy.simplify(wanted - given) == 0)
    return bool(abs(one - other) <= (_EXACT_TOLERANCE if exact else DECIMAL_TOLERANCE) * size)


def _equations(value: sympy.Basic) -> Iterable[sympy.Eq]:
    parts = value.args if isinstance(value, sympy.And) else (value,)
    return (part for part in parts if isinstance(part, sympy.Eq))


def _holds(equation: sympy.Eq) -> bool:
    """Return True unless an equation has unequal numbers as its sides: `41 = 42` is no spelling of 42."""
    left, right = equation.lhs, equation.rhs
    if left.free_symbols or right.free_symbols:
        return True
    return _is_number(left) and _is_number(right) and _same_number(left, right)


def _alike(wanted: sympy.Basic, given: sympy.Basic) -> tuple[sympy.Basic, sympy.Basic]:
    """Convert a list to a matrix if it is compared with a matrix."""
    if isinstance(wanted, sympy.MatrixBase) and isinstance(given, sympy.Tuple):
        given = as_matrix(given)
        given = given.T if given.shape != wanted.shape and 1 in given.shape else given
    elif isinstance(given, sympy.MatrixBase) and isinstance(wanted, sympy.Tuple):
        given, wanted = _alike(given, wanted)
    return wanted, given


def _numbers(value: sympy.Basic) -> Iterator[sympy.Expr]:
    """Yield the largest parts of a value that are numbers."""
    if isinstance(value, sympy.MatrixBase):
        for element in value.flat():
            yield from _numbers(element)
    elif _is_number(value):
        yield value
    elif isinstance(value, sympy.Mul | sympy.Add):
        together = value.func(*(part for part in value.args if _is_number(part)))
        yield together
        for part in value.args:
            yield from () if _is_number(part) else _numbers(part)
    else:
        for part in value.args:
            yield from _numbers(part)


def _with_numbers(value: sympy.Basic, known: Sequence[sympy.Expr]) -> sympy.Basic:
    """Replace each number that equals a known one by the known one. Other decimals become exact."""
    if isinstance(value, sympy.MatrixBase):
        return value.applyfunc(lambda element: _with_numbers(element, known))
    if _is_number(value):
        return _exact(next((number for number in known if _same_number(number, value)), value))
    if isinstance(value, FiniteSet | And):
        return type(value)(*(_with_numbers(part, known) for part in value._unsorted_args))
    if isinstance(value, sympy.Mul | sympy.Add):
        together = _with_numbers(value.func(*(part for part in value.args if _is_number(part))), known)
        rest = [_with_numbers(part, known) for part in value.args if not _is_number(part)]
        return value.func(together, *rest)
    if isinstance(value, sympy.Rel):
        return value.func(*(_with_numbers(part, known) for part in value.args), evaluate=False)
    if not value.args:
        return value
    return value.func(*(_with_numbers(part, known) for part in value.args))


def _exact(number: sympy.Expr) -> sympy.Expr:
    if not number.has(sympy.Float):
        return number
    return number.xreplace({each: sympy.Rational(str(each)) for each in number.atoms(sympy.Float)})
