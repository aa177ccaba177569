"""Comparison of formulas by value, for the judge `math`. A formula is written in Python or LaTeX.

A text without a backslash is first read as Python. Any other text is read as LaTeX, and the whole text must be one
formula. An ambiguous text is read as both. Words are compared as words.

`read_python` does not evaluate a text as a program. It builds a sympy value from the syntax tree, with the names and
operators that this module knows. Powers, factorials and exponents are bounded. Sympy may take long on hostile text, so
only a limited process imports this module.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import sympy
from antlr4 import CommonTokenStream, InputStream, Token
from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended.antlr_parser import PSLexer, PSParser
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.sets import FiniteSet
from latex2sympy2_extended.symbols import get_symbol
from math_verify import verify
from math_verify.grader import should_treat_as_complex

from repl_rl.judges.answer_units import split_unit
from repl_rl.judges.number_spellings import mark_bases, rewrite_marks, rewrite_numbers, split_percent

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
    reference_text, answer_text = _FormulaText(reference), _FormulaText(answer)
    if not reference_text.without_markup:
        raise ValueError("it is not a formula")
    if reference_text.without_markup == answer_text.without_markup:
        return True
    if not answer_text.without_markup or (reference_text.words and answer_text.words):
        return bool(answer_text.without_markup) and reference_text.words == answer_text.words
    real = not any(map(_is_complex, (reference_text.without_wrapping, answer_text.without_wrapping)))
    # A short word is a product of letters, unless the other text has short words, too.
    reference_readings = reference_text.readings(
        real, not answer_text.has_short_words, split_unit(answer_text.without_wrapping).word
    )
    answer_readings = answer_text.readings(
        real, not reference_text.has_short_words, split_unit(reference_text.without_wrapping).word
    )
    return _have_equal_brackets(reference_text, answer_text, real) and any(
        _are_equal(reference_value, answer_value)
        for unit, reference_values in reference_readings
        for other_unit, answer_values in answer_readings
        # Either text may leave its unit out.
        if not unit or not other_unit or unit == other_unit
        for reference_value in reference_values
        for answer_value in answer_values
    )


def is_readable(text: str) -> bool:
    """Return True for a formula, for words, and for plain text of letters, digits and marks.

    Plain text equals only the same text. A formula without a value that can be computed, such as `0/0`, and a false
    equation are not readable.
    """
    formula = _FormulaText(text)
    if not formula.without_markup or formula.words:
        return bool(formula.words)
    if formula.without_markup.lower() == "nan":
        return True
    try:
        values = [
            value
            for _, reading_values in formula.readings(real=not _is_complex(formula.without_wrapping))
            for value in reading_values
        ]
        if values:
            return all(map(_is_definite, values))
        plain = _PLAIN_TEXT.fullmatch(formula.without_markup) and re.search(r"\w", formula.without_markup)
        return bool(plain or _normalize_for_latex2sympy(formula.without_wrapping, multiply=True))
    except MemoryError:
        raise
    except Exception:
        # The library may raise any error on hostile text.
        return False


def _is_complex(text: str) -> bool:
    return bool(should_treat_as_complex(text) or _IMAGINARY.search(text))


# Texts

_KNOWN_NAMES = frozenset(
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
_PLAIN_TEXT = re.compile(r"[\w\s.,:;'/-]+")
_RELATIONS = re.compile(
    r"\\(?:approx|approxeq|sim|simeq|cong|to|\w*arrow|implies|iff|mapsto|therefore|because)(?![A-Za-z])"
)
_SUBSCRIPT = re.compile(r"_\{[^{}]*\}")
_LONE_I = re.compile(r"(?<![\\A-Za-z_])i(?![A-Za-z_])")


class _FormulaText:
    """A text without the marks around its formula."""

    def __init__(self, text: str) -> None:
        bare = _strip_wrapping(rewrite_marks(text))
        self.without_wrapping = rewrite_numbers(bare)
        spoken = " ".join(_WRAPPED.sub(r"\1", bare).split())
        self.without_markup = spoken if re.sub(r"[\s\\{}$]", "", spoken) else ""
        """The text without LaTeX's marks around words; "" if nothing is left."""
        self.words = _find_words(spoken)
        self.has_short_words = any(len(word[2]) <= _SHORT_WORD for word in _WHOLE.finditer(spoken))

    def readings(
        self, real: bool, multiply: bool = True, other_unit: str = ""
    ) -> Sequence[tuple[str, Sequence[sympy.Basic]]]:
        """Return pairs of a unit and values, one pair per way to read the text.

        If `multiply` is True, a short word by itself is read as a product of letters. `other_unit` is the unit of the
        text to compare with.
        """
        measured = split_unit(self.without_wrapping, other_unit)
        readings = [(measured.unit, _read_values(measured.value, real, multiply))]
        return readings if measured.certain else [*readings, ("", _read_values(self.without_wrapping, real, multiply))]


def _read_values(text: str, real: bool, multiply: bool) -> Sequence[sympy.Basic]:
    """Return the values of a text as Python and as LaTeX."""
    values = _read_as_python(text, real)
    runs = _RUN.findall(_ENVIRONMENT.sub("", text))
    # With a long word or a known name in it, the reading as Python is not ambiguous.
    if values and any(len(run) > _SHORT_WORD or run in FUNCTIONS or run in CONSTANTS for run in runs):
        return values
    latex_value = None if values == [sympy.nan] else read_latex(text, real, multiply)
    return values if latex_value is None else [*values, latex_value]


def _read_as_python(text: str, real: bool) -> list[sympy.Basic]:
    """Return the value as Python, or nothing if the text is not Python. A value that is too large becomes `nan`."""
    if "\\" in text:
        return []
    try:
        return [read_python(text, real)]
    except TooLarge:
        return [sympy.nan]
    except NotPython:
        return []


def _have_equal_brackets(reference: _FormulaText, answer: _FormulaText, real: bool) -> bool:
    """Return False if the brackets around two texts make their values unequal.

    A set is neither a list nor a tuple. A list may be a tuple, but an open interval is not a closed one.
    """
    reference_bracket, answer_bracket = (
        _find_outer_bracket(reference.without_wrapping),
        _find_outer_bracket(answer.without_wrapping),
    )
    if not reference_bracket or not answer_bracket or reference_bracket == answer_bracket:
        return True
    if "{" in (reference_bracket, answer_bracket):
        return False
    value = read_latex(reference.without_wrapping, real)
    return not isinstance(value.rhs if isinstance(value, sympy.Eq) else value, sympy.Interval)


def _find_outer_bracket(text: str) -> str:
    """Return the opening bracket if one pair of brackets encloses the whole text and several values, else ""."""
    text = re.sub(r"\\([{}])", r"\1", re.sub(r"\\(?:left|right)\s*(?![A-Za-z])", "", text))
    text = text[match.end() :] if (match := _MEMBERSHIP.match(text)) else text
    several = re.search(r"[,;:]", text) and text[0] in "([{" and _find_closing_bracket(text, 0) == len(text) - 1
    return text[0] if several else ""


def _strip_wrapping(text: str) -> str:
    """Remove the quotes, dollar signs, LaTeX brackets and boxes around the whole text."""
    previous = None
    # Repeat, because the marks may be nested.
    while text != previous:
        previous, text = text, text.strip()
        if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
            text = text[1:-1]
        for start, end in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            if len(text) >= len(start + end) and text.startswith(start) and text.endswith(end):
                inner = text[len(start) : -len(end)]
                text = text if start in inner else inner
        for box in ("\\boxed", "\\fbox"):
            if text.startswith(box) and _find_closing_bracket(text, len(box)) == len(text) - 1:
                text = text[len(box) + 1 : -1]
        if number := _WRAPPED_NUMBER.fullmatch(text):
            text = number[1]
    return _SIGNED_DOLLARS.sub(r"\1", text.removeprefix("\\$").removeprefix("$").strip(), count=1)


def _find_closing_bracket(text: str, opening: int) -> int:
    """Return the index of the bracket that closes the one at `opening`, or -1."""
    depth, opener = 0, text[opening : opening + 1]
    closer = {"{": "}", "(": ")", "[": "]"}.get(opener)
    for index in range(opening, len(text) if closer else 0):
        depth += (text[index] == opener) - (text[index] == closer)
        if depth == 0:
            return index
    return -1


def _find_words(spoken: str) -> frozenset[str]:
    """Return the phrases of a text that consists of words alone, without case.

    Commas, semicolons, `and` and `or` separate the phrases.
    """
    runs = [run for run in re.findall(r"[^\W\d_]{2,}", spoken) if run.lower() not in ("and", "or")]
    if not runs or not _PHRASES.fullmatch(spoken) or any(run.lower() in _KNOWN_NAMES for run in runs):
        return frozenset()
    parts = _SEPARATOR.split(spoken.rstrip("."))
    return frozenset(" ".join(part.casefold().split()) for part in parts)


# Python

_MAX_BITS = 1 << 17
"""Largest numerator or denominator of a power, bits."""
_MAX_FACTORIAL = 5000
"""Largest argument of a factorial and of similar functions."""
_MAX_DECIMAL_EXPONENT = 9999
_UNDERSCORED = re.compile(r"(?<![A-Za-z_\d.])[\d.]*\d_[\d_.]*")
# Any other underscore after a digit begins a subscript, such as the base of `204_5`.
_SEPARATED = re.compile(r"\d{1,3}(?:_\d{3})+(?:\.\d*)?")
_NUMPY_ARRAY = re.compile(r"\[[\[\]\d\s.eE+-]*\]")


class NotPython(Exception):
    """A text is not Python of a kind that is read here."""


class TooLarge(Exception):
    """A formula can be parsed, but its value is too large to compute. The judge then treats it as nan, which equals
    nothing.
    """


def read_python(text: str, real: bool) -> sympy.Basic:
    """Return the value of a text in the syntax of Python, sympy or numpy.

    Raises:
        NotPython: the text is not such Python, or has unknown names.
        TooLarge: its value is too large to compute.
    """
    # A comment is not part of a formula.
    if "#" in text or any(not _SEPARATED.fullmatch(number) for number in _UNDERSCORED.findall(text)):
        raise NotPython
    text = text.replace("^", "**")
    # numpy prints arrays without commas.
    if _NUMPY_ARRAY.fullmatch(text) and "," not in text:
        text = re.sub(r"(?<=[\d.\]])\s+(?=[\[\d.+-])", ", ", text)
    # `x = 3` is an equation, not a statement.
    assigned = re.match(r"\s*([A-Za-z]\w*)\s*=(?!=)", text)
    try:
        source = text[assigned.end() :] if assigned else text
        body = ast.parse(source.strip(), mode="eval").body
        value = _FormulaReader(source.strip(), real).read(body)
        if isinstance(body, ast.Tuple) and body.elts and body.elts[0].col_offset == body.col_offset:
            # `1, 2` without parentheses means values in any order.
            value = FiniteSet(*value.args)
        if assigned:
            value = sympy.Eq(get_symbol(assigned[1], real, True), value, evaluate=False)
    except (NotPython, TooLarge):
        raise
    except Exception as error:
        # sympy refuses operands that do not fit together with errors of many kinds.
        raise NotPython from error
    except MemoryError as error:
        # Python's parser refuses deep nesting with this error.
        raise NotPython from error
    if not isinstance(value, sympy.Basic | sympy.MatrixBase):
        raise NotPython
    return value


def check_size(value: sympy.Basic | sympy.MatrixBase) -> None:
    """Refuse a value that is not worked out yet and has a power or a factorial that is too large.

    Raises:
        TooLarge: it has one.
    """
    for part in value.flat() if isinstance(value, sympy.MatrixBase) else (value,):
        _count_bits(part)


def _count_bits(value: sympy.Basic) -> float:
    """Return about the size of the largest integer in an evaluated value, bits."""
    if isinstance(value, sympy.Rational):
        return float(max(abs(value.p).bit_length(), value.q.bit_length()))
    sizes = [_count_bits(part) for part in value.args]
    if isinstance(value, sympy.factorial | sympy.Pow) and value.args[-1].is_number:
        # The last argument has few digits, so that it can be evaluated.
        last = abs(value.args[-1].evalf()) if sizes[-1] <= _MAX_BITS.bit_length() else sympy.oo
        if isinstance(value, sympy.factorial):
            if not last <= _MAX_FACTORIAL:
                raise TooLarge(f"a factorial above {_MAX_FACTORIAL}!")
            return float(last * _MAX_FACTORIAL.bit_length())
        if value.base.is_number and value.base not in (0, 1, -1):
            size = max(sizes[0], 2) * last
            if not size <= _MAX_BITS:
                raise TooLarge(f"a power of more than {_MAX_BITS} bits")
            return float(size)
    return float(sum(sizes) if value.is_Mul else max(sizes, default=2) + bool(value.is_Add))


SympyFunction = Callable[..., object]


def _compute_power(base: sympy.Basic, exponent: sympy.Basic) -> sympy.Basic:
    """Return a power. Raise TooLarge instead of computing a huge number."""
    if base.is_Rational and exponent.is_Rational:
        bits = max(abs(base.p).bit_length(), base.q.bit_length(), 2)
        if abs(base) != 1 and base != 0 and bits * abs(exponent) > _MAX_BITS:
            raise TooLarge(f"a power of more than {_MAX_BITS} bits")
    if base.is_Float and exponent.is_number and abs(exponent) > _MAX_BITS:
        raise TooLarge(f"an exponent above {_MAX_BITS}")
    return base**exponent


def _limit_function(function: SympyFunction) -> SympyFunction:
    """Wrap a function of integers whose value grows fast, and limit its arguments."""

    def call_limited(*arguments: sympy.Basic) -> object:
        if any(a.is_number and not abs(a) <= _MAX_FACTORIAL for a in arguments):
            raise TooLarge(f"an argument above {_MAX_FACTORIAL}")
        return function(*arguments)

    return call_limited


def make_matrix(value: sympy.Basic) -> object:
    """Return the matrix with these rows, or a vector."""
    rows = [list(row.args) if isinstance(row, sympy.Tuple) else [row] for row in value.args]
    return sympy.ImmutableMatrix(rows)


def _get_elements(value: sympy.Basic | None = None) -> Sequence[sympy.Basic]:
    return () if value is None or value is sympy.S.EmptySet else value.args


def _return_unchanged(value: object) -> object:
    return value


def _make_ratio(numerator: sympy.Basic, denominator: sympy.Basic = sympy.S.One) -> object:
    return numerator / denominator


def _make_complex(real: sympy.Basic, imaginary: sympy.Basic = sympy.S.Zero) -> object:
    return real + imaginary * sympy.I


CONSTANTS: Mapping[str, sympy.Basic] = MappingProxyType(
    {
        "pi": sympy.pi,
        "e": sympy.E,
        "E": sympy.E,
        "I": sympy.I,
        "tau": 2 * sympy.pi,
        **dict.fromkeys(("oo", "inf", "Inf", "infinity"), sympy.oo),
        **dict.fromkeys(("nan", "NaN", "NAN"), sympy.nan),
        "zoo": sympy.zoo,
        "True": sympy.true,
        "False": sympy.false,
        "EulerGamma": sympy.EulerGamma,
        "GoldenRatio": sympy.GoldenRatio,
        "EmptySet": sympy.S.EmptySet,
        "Reals": sympy.S.Reals,
        "Integers": sympy.S.Integers,
        "Naturals": sympy.S.Naturals,
        "Rationals": sympy.S.Rationals,
    }
)
_SYMPY_NAMES = re.findall(
    r"\w+",
    """
    sqrt cbrt root exp log sin cos tan cot sec csc asin acos atan acot atan2 sinh cosh tanh asinh acosh atanh Abs sign
    floor ceiling re im conjugate arg gamma erf zeta gcd lcm Min Max Mod Add Mul Union Intersection Interval Eq Ne Lt Le
    Gt Ge And Or Not LambertW
""",
)
_CONVERSION_NAMES = re.findall(
    r"\w+",
    """
    Integer Float Decimal int float bool mpf mpz S sympify float16 float32 float64 longdouble int8 int16 int32 int64
    uint8 uint16 uint32 uint64 complex64 complex128 bool_ intp
""",
)
FUNCTIONS: Mapping[str, SympyFunction] = MappingProxyType(
    {
        **{name: getattr(sympy, name) for name in _SYMPY_NAMES},
        **{f"arc{name[1:]}": getattr(sympy, name) for name in ("asin", "acos", "atan", "asinh", "acosh", "atanh")},
        "arctan2": sympy.atan2,
        "ln": sympy.log,
        "log2": lambda x: sympy.log(x, 2),
        "log10": lambda x: sympy.log(x, 10),
        "log1p": lambda x: sympy.log(1 + x),
        "expm1": lambda x: sympy.exp(x) - 1,
        **dict.fromkeys(("abs", "fabs", "absolute"), sympy.Abs),
        "ceil": sympy.ceiling,
        "max": sympy.Max,
        "min": sympy.Min,
        **dict.fromkeys(("pow", "Pow", "power"), _compute_power),
        "hypot": lambda x, y: sympy.sqrt(x**2 + y**2),
        "radians": lambda x: x * sympy.pi / 180,
        "degrees": lambda x: x * 180 / sympy.pi,
        **dict.fromkeys(("factorial", "fac"), _limit_function(sympy.factorial)),
        **dict.fromkeys(("binomial", "comb"), _limit_function(sympy.binomial)),
        "perm": _limit_function(sympy.ff),
        **dict.fromkeys(("Fraction", "Rational", "mpq"), _make_ratio),
        "complex": _make_complex,
        **dict.fromkeys(_CONVERSION_NAMES, _return_unchanged),
        **dict.fromkeys(
            ("Matrix", "ImmutableMatrix", "MutableDenseMatrix", "ImmutableDenseMatrix", "array"), make_matrix
        ),
        **dict.fromkeys(("set", "frozenset"), lambda value=None: FiniteSet(*_get_elements(value))),
        "FiniteSet": lambda *values: FiniteSet(*values),
        "Tuple": lambda *values: sympy.Tuple(*values),
        **dict.fromkeys(("tuple", "list"), lambda value=None: sympy.Tuple(*_get_elements(value))),
        "Interval.open": sympy.Interval.open,
        "Interval.Lopen": sympy.Interval.Lopen,
        "Interval.Ropen": sympy.Interval.Ropen,
    }
)
_MODULES = frozenset(("math", "cmath", "np", "numpy", "sympy", "sp", "fractions", "decimal", "mpmath", "S"))
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d{1,4}))?")
_OPERATORS: Mapping[type[ast.operator], SympyFunction] = {
    ast.Add: lambda x, y: x + y,
    ast.Sub: lambda x, y: x - y,
    ast.Mult: lambda x, y: x * y,
    ast.Div: lambda x, y: x / y,
    ast.FloorDiv: lambda x, y: sympy.floor(x / y),
    ast.Mod: lambda x, y: sympy.Mod(x, y),
    ast.Pow: _compute_power,
    ast.BitOr: lambda x, y: x | y,
    ast.BitAnd: lambda x, y: And(x, y) if x.is_Relational else x & y,
}
_COMPARISONS: Mapping[type[ast.cmpop], SympyFunction] = {
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
}


class _FormulaReader:
    """Builder of the value of a syntax tree, which refuses unknown nodes."""

    def __init__(self, source: str, real: bool) -> None:
        self._source = source
        self._real = real

    def read(self, node: ast.expr) -> sympy.Basic:
        """Return the value of a node.

        Raises:
            NotPython, TooLarge: see `read_python`.
        """
        match node:
            # Constants and names.
            case ast.Constant():
                return self._read_constant(node)
            case ast.Name() | ast.Attribute():
                return self._read_name(self._read_dotted_name(node))
            # Operators, relations and calls.
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign):
                value = self.read(node.operand)
                return -value if isinstance(sign, ast.USub) else value
            case ast.BinOp():
                return self._find_function(_OPERATORS, node.op)(self.read(node.left), self.read(node.right))
            case ast.Compare():
                return self._read_comparison(node)
            case ast.Call(keywords=[]):
                return self._read_call(node)
            # Containers.
            case ast.Tuple() | ast.List():
                return sympy.Tuple(*map(self.read, node.elts))
            case ast.Set():
                return FiniteSet(*map(self.read, node.elts))
            case ast.Dict():
                return self._read_dict(node)
        raise NotPython

    def _find_function(self, table: Mapping[type, SympyFunction], operator: ast.AST) -> SympyFunction:
        if type(operator) not in table:
            raise NotPython
        return table[type(operator)]

    def _read_constant(self, node: ast.Constant) -> sympy.Basic:
        value, source = node.value, (ast.get_source_segment(self._source, node) or "").replace("_", "")
        if isinstance(value, bool):
            return sympy.true if value else sympy.false
        if isinstance(value, int):
            return sympy.Integer(value)
        if isinstance(value, float):
            return _parse_decimal(source)
        if isinstance(value, complex):
            return _parse_decimal(source[:-1]) * sympy.I
        # A word in quotes is a symbol.
        if isinstance(value, str) and re.fullmatch(r"[^\W\d_]+", value):
            return sympy.Symbol(value.casefold(), real=self._real)
        raise NotPython

    def _read_dotted_name(self, node: ast.expr) -> str:
        """Return a name without its module: `sqrt` for `math.sqrt`, but `Interval.open`."""
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return node.attr if node.value.id in _MODULES else f"{node.value.id}.{node.attr}"
        raise NotPython

    def _read_name(self, name: str) -> sympy.Basic:
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name == "Half":
            return sympy.S.Half
        if "." in name or name in FUNCTIONS:
            raise NotPython
        return get_symbol(name, self._real, True)

    def _read_call(self, node: ast.Call) -> sympy.Basic:
        name = self._read_dotted_name(node.func)
        if name not in FUNCTIONS:
            raise NotPython
        # A word in quotes is a symbol in a container, but only a number as another function's argument.
        if name in ("set", "frozenset", "tuple", "list", "array") or FUNCTIONS[name] is make_matrix:
            return FUNCTIONS[name](*map(self.read, node.args))
        return FUNCTIONS[name](*(self._read_argument(argument) for argument in node.args))

    def _read_argument(self, node: ast.expr) -> sympy.Basic:
        """Return an argument, which may be a number in quotes: `Decimal('0.1')`, `Fraction('1/3')`, `float('inf')`."""
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            return self.read(node)
        text = node.value.strip()
        if text.lstrip("+-").lower() in ("inf", "infinity", "nan"):
            value = CONSTANTS[text.lstrip("+-").lower()]
            return -value if text.startswith("-") else value
        numerator, slash, denominator = text.partition("/")
        return (
            _parse_quoted_number(numerator) / _parse_quoted_number(denominator)
            if slash
            else _parse_quoted_number(numerator)
        )

    def _read_comparison(self, node: ast.Compare) -> sympy.Basic:
        sides = [self.read(side) for side in (node.left, *node.comparators)]
        relations = [
            self._find_function(_COMPARISONS, operator)(left, right, evaluate=False)
            for operator, left, right in zip(node.ops, sides, sides[1:], strict=False)
        ]
        return relations[0] if len(relations) == 1 else And(*relations)

    def _read_dict(self, node: ast.Dict) -> sympy.Basic:
        """Return pairs in any order. A single name with its value is an equation, as in sympy's solutions."""
        pairs = [(self.read(key), self.read(value)) for key, value in zip(node.keys, node.values, strict=True) if key]
        if len(pairs) == 1 and pairs[0][0].is_Symbol:
            return sympy.Eq(*pairs[0], evaluate=False)
        return FiniteSet(*(sympy.Tuple(*pair) for pair in pairs))


def _parse_decimal(source: str) -> sympy.Basic:
    match = _DECIMAL.fullmatch(source)
    if match is None or abs(int(match[1] or 0)) > _MAX_DECIMAL_EXPONENT:
        raise TooLarge(f"a decimal exponent above {_MAX_DECIMAL_EXPONENT}")
    # Keep all digits of the source.
    return sympy.Float(source, max(17, len(source)))


def _parse_quoted_number(text: str) -> sympy.Basic:
    text = text.strip().replace("_", "")
    if re.fullmatch(r"[+-]?\d+", text):
        return sympy.Integer(text)
    if not _DECIMAL.fullmatch(text):
        raise NotPython
    return _parse_decimal(text)


# LaTeX


@lru_cache(maxsize=256)
def read_latex(text: str, real: bool, multiply: bool = False) -> sympy.Basic | None:
    """Return the value of the whole text as one formula, or None. A value that is too large becomes `nan`."""
    value = _read_latex(text, real, multiply)
    if value is None and (part := split_percent(text)):
        # latex2sympy knows only the percent sign after a plain number.
        value = _make_percentage(_read_latex(part, real, multiply))
    return value


def _read_latex(text: str, real: bool, multiply: bool) -> sympy.Basic | None:
    try:
        line = _normalize_for_latex2sympy(text, multiply)
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


def _make_percentage(value: sympy.Basic | None) -> sympy.Basic | None:
    """Return a number, or the number that a name equals, as percent in the form of latex2sympy."""
    if isinstance(value, sympy.Eq) and value.lhs.is_Symbol and (right := _make_percentage(value.rhs)):
        return sympy.Eq(value.lhs, right, evaluate=False)
    if value is None or not _is_number(value) or value is sympy.nan:
        return value if value is sympy.nan else None
    return sympy.Mul(value.doit(), sympy.UnevaluatedExpr(sympy.Rational(1, 100)), evaluate=False)


def _normalize_for_latex2sympy(text: str, multiply: bool) -> str | None:
    """Return the text as latex2sympy reads it, or None if it is not one formula from end to end."""
    line = _join_lines(text)
    if line is None or re.search(r"\\boxed|\\fbox|(?<!\\)\$", line) or _RELATIONS.search(_SUBSCRIPT.sub("", line)):
        return None
    line = re.sub(r"(?<!\\)%", r"\%", line)
    # Rewrite Python's spellings.
    if "\\" not in line:
        line = re.sub(r"\boo\b", r"\\infty ", line.replace("**", "^").replace("*I", "I"))
    if not re.search(r"_\s*(?:i|\{[^{}]*\bi\b)", line):
        # latex2sympy takes `i` for a variable.
        line = _LONE_I.sub("I", line)
    line = normalize_latex(_FUNCTION.sub(r"\\\1 ", _brace_roots(line)), _NORMALIZATION)
    line = mark_bases(_mark_words(line, multiply))
    return line if _is_one_formula(line) else None


def _join_lines(text: str) -> str | None:
    """Replace newlines within brackets or environments by spaces. Return None if other newlines exist."""
    if "\n" not in text:
        return text
    depth, matches = 0, re.finditer(r"\\begin\b|\\end\b|\\?[{}()\[\]]|\n", text)
    for match in matches:
        mark = match[0].lstrip("\\")
        depth += (mark in ("begin", "{", "(", "[")) - (mark in ("end", "}", ")", "]"))
        if mark == "\n" and depth <= 0:
            return None
    return text.replace("\n", " ")


def _mark_words(text: str, multiply: bool) -> str:
    """Mark words as names, as in `\\text{blue}`, so that their letters are not multiplied."""
    environments = [(m.start(), m.end()) for m in _ENVIRONMENT.finditer(text)]
    wrapped = [(m.start(), m.end()) for m in _WRAPPED.finditer(text)]

    def replace_word(match: re.Match[str], word: str) -> str:
        inside = any(start <= match.start() < end for start, end in (*environments, *wrapped))
        short = len(word) <= _SHORT_WORD
        if (
            inside
            or word.lower() in (*_KNOWN_NAMES, "and", "or", "percent", "percentage", "pct")
            or (short and multiply)
        ):
            return match[0]
        return match[0].replace(word, f"\\text{{{word}}}")

    text = _LONG.sub(lambda match: replace_word(match, match[0]), text)
    # The first substitution has moved the marks.
    environments = [(m.start(), m.end()) for m in _ENVIRONMENT.finditer(text)]
    wrapped = [(m.start(), m.end()) for m in _WRAPPED.finditer(text)]
    return _WHOLE.sub(lambda match: replace_word(match, match[2]), text)


def _brace_roots(text: str) -> str:
    """Rewrite `\\sqrt(2)` as `\\sqrt{2}`."""
    position = 0
    while match := _SQRT.search(text, position):
        opening = match.end() - 1
        closing = _find_closing_bracket(text, opening)
        if closing < 0:
            break
        text = f"{text[: match.start()]}\\sqrt{{{text[opening + 1 : closing]}}}{text[closing + 1 :]}"
        position = match.start() + 1
    return text


class _RaiseOnSyntaxError:
    """Error listener of antlr that refuses the first error. Calls of other methods do nothing."""

    def syntaxError(self, *arguments: object) -> None:
        raise _NotLatex

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


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
        part.addErrorListener(_RaiseOnSyntaxError())
    try:
        parser.math()
    except _NotLatex:
        return False
    ended: bool = parser.getCurrentToken().type == Token.EOF
    return ended


# Values


def _are_equal(reference: sympy.Basic, answer: sympy.Basic) -> bool:
    """Return True if two values are equal."""
    try:
        # An answer with a false equation, such as `41 = 42`, is wrong.
        if not all(map(_is_true_equation, _iterate_equations(answer))):
            return False
        reference, answer = _match_shapes(reference, answer)
        if _is_number(reference) and _is_number(answer):
            return _is_same_number(reference, answer)
        if _has_named_values(reference) and isinstance(answer, sympy.Set | sympy.Tuple):
            return _are_equal_in_order(reference, answer)
        if isinstance(reference, sympy.MatrixBase) or isinstance(answer, sympy.MatrixBase):
            return reference.shape == answer.shape and all(map(_are_equal, reference.flat(), answer.flat()))
        if isinstance(reference, sympy.Tuple) and isinstance(answer, sympy.Tuple):
            return len(reference) == len(answer) and all(map(_are_equal, reference, answer))
        for first, second in ((reference, answer), (answer, reference)):
            compound = isinstance(second, sympy.Rel | sympy.Set | sympy.Tuple | And)
            if first.is_Symbol and len(first.name) > 1 and not (second.is_Symbol or compound):
                # A word is not a product of letters.
                return False
        # Make equal numbers identical, because `verify` compares the rest of the structure exactly.
        known = list(_iterate_numbers(reference))
        reference = _replace_known_numbers(reference, known)
        answer = _replace_known_numbers(answer, known)
        return bool(verify(reference, answer, float_rounding=12, numeric_precision=_EXACT_DIGITS, timeout_seconds=None))
    except MemoryError:
        raise
    except Exception:
        # Values that sympy cannot compare are not known to be equal.
        return False


def _has_named_values(value: sympy.Basic) -> bool:
    """Return True for equations of several names, such as `x=2, y=3`."""
    equations = value.args if isinstance(value, FiniteSet) else ()
    return all(isinstance(part, sympy.Eq) and part.lhs.is_Symbol for part in equations) and (
        len({part.lhs for part in equations}) > 1
    )


def _are_equal_in_order(reference: FiniteSet, answer: sympy.Basic) -> bool:
    """Return True if `answer` gives the same values as the equations in `reference`.

    Equations may be in any order. Values without names must be in the order of the reference.
    """
    if isinstance(answer, sympy.Interval):
        parts = [answer.start, answer.end] if answer.is_open else []
    else:
        parts = list(answer._unsorted_args if isinstance(answer, FiniteSet) else answer.args)
    equations = list(reference._unsorted_args)
    if parts and all(isinstance(part, sympy.Eq) for part in parts):
        equations, parts = (sorted(unordered, key=lambda part: str(part.lhs)) for unordered in (equations, parts))
        if [part.lhs for part in equations] != [part.lhs for part in parts]:
            return False
        parts = [part.rhs for part in parts]
    return len(parts) == len(equations) and all(map(_are_equal, [part.rhs for part in equations], parts))


def _is_definite(value: sympy.Basic) -> bool:
    """Return False for an undefined value (nan, complex infinity) or a false equation, which no answer may equal."""
    done = value.doit() if _is_number(value) else value
    return not done.has(sympy.nan, sympy.zoo) and all(map(_is_true_equation, _iterate_equations(value)))


def _is_number(value: sympy.Basic) -> bool:
    """Return True for an expression that sympy knows to be one number."""
    return isinstance(value, sympy.Expr) and not value.free_symbols and value.is_number is True


def _is_same_number(reference: sympy.Expr, answer: sympy.Expr) -> bool:
    """Return True if two numbers are equal: exact ones exactly, others to within `DECIMAL_TOLERANCE`.

    A percentage also equals its number.
    """
    percent = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
    plain = [value.xreplace({percent: sympy.Integer(1)}) for value in (reference, answer)]
    if plain != [reference, answer] and _is_same_value(plain[0].doit(), plain[1].doit()):
        return True
    return _is_same_value(reference.doit(), answer.doit())


def _is_same_value(reference: sympy.Expr, answer: sympy.Expr) -> bool:
    if reference is sympy.nan or answer is sympy.nan:
        return False
    if reference == answer:
        return True
    exact = not reference.has(sympy.Float) and not answer.has(sympy.Float)
    if (exact and reference.is_Rational and answer.is_Rational) or reference.is_infinite or answer.is_infinite:
        return False
    # Compare digits, because sympy cannot prove every equality of exact numbers.
    reference_value, answer_value = reference.evalf(_EXACT_DIGITS), answer.evalf(_EXACT_DIGITS)
    size = max(abs(reference_value), abs(answer_value))
    # Evaluation cannot distinguish such a number from 0.
    if exact and size < _EXACT_TOLERANCE:
        return bool(sympy.simplify(reference - answer) == 0)
    return bool(abs(reference_value - answer_value) <= (_EXACT_TOLERANCE if exact else DECIMAL_TOLERANCE) * size)


def _iterate_equations(value: sympy.Basic) -> Iterable[sympy.Eq]:
    parts = value.args if isinstance(value, sympy.And) else (value,)
    return (part for part in parts if isinstance(part, sympy.Eq))


def _is_true_equation(equation: sympy.Eq) -> bool:
    """Return True unless both sides of an equation are unequal numbers. So the answer `41 = 42` is not 42."""
    left, right = equation.lhs, equation.rhs
    if left.free_symbols or right.free_symbols:
        return True
    return _is_number(left) and _is_number(right) and _is_same_number(left, right)


def _match_shapes(reference: sympy.Basic, answer: sympy.Basic) -> tuple[sympy.Basic, sympy.Basic]:
    """Convert a list to a matrix if it is compared with a matrix."""
    if isinstance(reference, sympy.MatrixBase) and isinstance(answer, sympy.Tuple):
        answer = make_matrix(answer)
        answer = answer.T if answer.shape != reference.shape and 1 in answer.shape else answer
    elif isinstance(answer, sympy.MatrixBase) and isinstance(reference, sympy.Tuple):
        answer, reference = _match_shapes(answer, reference)
    return reference, answer


def _iterate_numbers(value: sympy.Basic) -> Iterator[sympy.Expr]:
    """Yield the largest parts of a value that are numbers."""
    if isinstance(value, sympy.MatrixBase):
        for element in value.flat():
            yield from _iterate_numbers(element)
    elif _is_number(value):
        yield value
    elif isinstance(value, sympy.Mul | sympy.Add):
        # The numbers in a sum or product count as one.
        combined = value.func(*(part for part in value.args if _is_number(part)))
        yield combined
        for part in value.args:
            yield from () if _is_number(part) else _iterate_numbers(part)
    else:
        for part in value.args:
            yield from _iterate_numbers(part)


def _replace_known_numbers(value: sympy.Basic, known: Sequence[sympy.Expr]) -> sympy.Basic:
    """Replace each number that equals a known one by the known one. Other decimals become exact."""
    if isinstance(value, sympy.MatrixBase):
        return value.applyfunc(lambda element: _replace_known_numbers(element, known))
    if _is_number(value):
        return _make_exact(next((number for number in known if _is_same_number(number, value)), value))
    if isinstance(value, FiniteSet | And):
        return type(value)(*(_replace_known_numbers(part, known) for part in value._unsorted_args))
    if isinstance(value, sympy.Mul | sympy.Add):
        combined = _replace_known_numbers(value.func(*(part for part in value.args if _is_number(part))), known)
        rest = [_replace_known_numbers(part, known) for part in value.args if not _is_number(part)]
        return value.func(combined, *rest)
    if isinstance(value, sympy.Rel):
        return value.func(*(_replace_known_numbers(part, known) for part in value.args), evaluate=False)
    if not value.args:
        return value
    return value.func(*(_replace_known_numbers(part, known) for part in value.args))


def _make_exact(number: sympy.Expr) -> sympy.Expr:
    """Replace decimals in a number by equal fractions."""
    if not number.has(sympy.Float):
        return number
    return number.xreplace({decimal: sympy.Rational(str(decimal)) for decimal in number.atoms(sympy.Float)})
