"""Reader of formulas in the syntax of Python, sympy and numpy, which does not evaluate them as a program.

It builds a sympy value from the syntax tree of a text, with the names and operators that this module knows. Powers,
factorials and exponents are bounded.
"""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import sympy
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.sets import FiniteSet
from latex2sympy2_extended.symbols import get_symbol

_MAX_BITS = 1 << 17
"""Largest numerator or denominator of a power, bits."""
_MAX_FACTORIAL = 5000
_MAX_DECIMAL_EXPONENT = 9999
_UNDERSCORED = re.compile(r"(?<![A-Za-z_\d.])[\d.]*\d_[\d_.]*")
# Any other underscore after a digit begins a subscript, such as the base of `204_5`.
_SEPARATED = re.compile(r"\d{1,3}(?:_\d{3})+(?:\.\d*)?")
_NUMPY_ARRAY = re.compile(r"\[[\[\]\d\s.eE+-]*\]")


class NotPython(Exception):
    """A text is not Python of a kind that is read here."""


class TooLarge(Exception):
    """A text is Python, but its value is too large to compute."""


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
        value = _Reader(source.strip(), real).read(body)
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
                raise TooLarge
            return float(last * _MAX_FACTORIAL.bit_length())
        if value.base.is_number and value.base not in (0, 1, -1):
            size = max(sizes[0], 2) * last
            if not size <= _MAX_BITS:
                raise TooLarge
            return float(size)
    return float(sum(sizes) if value.is_Mul else max(sizes, default=2) + bool(value.is_Add))


Function = Callable[..., object]


def _power(base: sympy.Basic, exponent: sympy.Basic) -> sympy.Basic:
    if base.is_Rational and exponent.is_Rational:
        bits = max(abs(base.p).bit_length(), base.q.bit_length(), 2)
        if abs(base) != 1 and base != 0 and bits * abs(exponent) > _MAX_BITS:
            raise TooLarge
    if base.is_Float and exponent.is_number and abs(exponent) > _MAX_BITS:
        raise TooLarge
    return base**exponent


def _bounded(function: Function) -> Function:
    """Wrap a function of integers whose value grows fast, and limit its arguments."""

    def call(*arguments: sympy.Basic) -> object:
        if any(a.is_number and not abs(a) <= _MAX_FACTORIAL for a in arguments):
            raise TooLarge
        return function(*arguments)

    return call


def as_matrix(value: sympy.Basic) -> object:
    """Return the matrix with these rows, or a vector."""
    rows = [list(row.args) if isinstance(row, sympy.Tuple) else [row] for row in value.args]
    return sympy.ImmutableMatrix(rows)


def _elements(value: sympy.Basic | None = None) -> Sequence[sympy.Basic]:
    return () if value is None or value is sympy.S.EmptySet else value.args


def _itself(value: object) -> object:
    return value


def _ratio(over: sympy.Basic, under: sympy.Basic = sympy.S.One) -> object:
    return over / under


def _complex(real: sympy.Basic, imaginary: sympy.Basic = sympy.S.Zero) -> object:
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
_SAME_NAME = re.findall(
    r"\w+",
    """
    sqrt cbrt root exp log sin cos tan cot sec csc asin acos atan acot atan2 sinh cosh tanh asinh acosh atanh Abs sign
    floor ceiling re im conjugate arg gamma erf zeta gcd lcm Min Max Mod Add Mul Union Intersection Interval Eq Ne Lt Le
    Gt Ge And Or Not LambertW
""",
)
_TYPES = re.findall(
    r"\w+",
    """
    Integer Float Decimal int float bool mpf mpz S sympify float16 float32 float64 longdouble int8 int16 int32 int64
    uint8 uint16 uint32 uint64 complex64 complex128 bool_ intp
""",
)
FUNCTIONS: Mapping[str, Function] = MappingProxyType(
    {
        **{name: getattr(sympy, name) for name in _SAME_NAME},
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
        **dict.fromkeys(("pow", "Pow", "power"), _power),
        "hypot": lambda x, y: sympy.sqrt(x**2 + y**2),
        "radians": lambda x: x * sympy.pi / 180,
        "degrees": lambda x: x * 180 / sympy.pi,
        **dict.fromkeys(("factorial", "fac"), _bounded(sympy.factorial)),
        **dict.fromkeys(("binomial", "comb"), _bounded(sympy.binomial)),
        "perm": _bounded(sympy.ff),
        **dict.fromkeys(("Fraction", "Rational", "mpq"), _ratio),
        "complex": _complex,
        **dict.fromkeys(_TYPES, _itself),
        **dict.fromkeys(
            ("Matrix", "ImmutableMatrix", "MutableDenseMatrix", "ImmutableDenseMatrix", "array"), as_matrix
        ),
        **dict.fromkeys(("set", "frozenset"), lambda value=None: FiniteSet(*_elements(value))),
        "FiniteSet": lambda *values: FiniteSet(*values),
        "Tuple": lambda *values: sympy.Tuple(*values),
        **dict.fromkeys(("tuple", "list"), lambda value=None: sympy.Tuple(*_elements(value))),
        "Interval.open": sympy.Interval.open,
        "Interval.Lopen": sympy.Interval.Lopen,
        "Interval.Ropen": sympy.Interval.Ropen,
    }
)
_MODULES = frozenset(("math", "cmath", "np", "numpy", "sympy", "sp", "fractions", "decimal", "mpmath", "S"))
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d{1,4}))?")
_BINARY: Mapping[type[ast.operator], Function] = {
    ast.Add: lambda x, y: x + y,
    ast.Sub: lambda x, y: x - y,
    ast.Mult: lambda x, y: x * y,
    ast.Div: lambda x, y: x / y,
    ast.FloorDiv: lambda x, y: sympy.floor(x / y),
    ast.Mod: lambda x, y: sympy.Mod(x, y),
    ast.Pow: _power,
    ast.BitOr: lambda x, y: x | y,
    ast.BitAnd: lambda x, y: And(x, y) if x.is_Relational else x & y,
}
_COMPARED: Mapping[type[ast.cmpop], Function] = {
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
}


class _Reader:
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
            case ast.Constant():
                return self._constant(node)
            case ast.Name() | ast.Attribute():
                return self._name(self._dotted(node))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign):
                value = self.read(node.operand)
                return -value if isinstance(sign, ast.USub) else value
            case ast.BinOp():
                return self._known(_BINARY, node.op)(self.read(node.left), self.read(node.right))
            case ast.Compare():
                return self._compared(node)
            case ast.Call(keywords=[]):
                return self._call(node)
            case ast.Tuple() | ast.List():
                return sympy.Tuple(*map(self.read, node.elts))
            case ast.Set():
                return FiniteSet(*map(self.read, node.elts))
            case ast.Dict():
                return self._dict(node)
        raise NotPython

    def _known(self, table: Mapping[type, Function], operator: ast.AST) -> Function:
        if type(operator) not in table:
            raise NotPython
        return table[type(operator)]

    def _constant(self, node: ast.Constant) -> sympy.Basic:
        value, source = node.value, (ast.get_source_segment(self._source, node) or "").replace("_", "")
        if isinstance(value, bool):
            return sympy.true if value else sympy.false
        if isinstance(value, int):
            return sympy.Integer(value)
        if isinstance(value, float):
            return _decimal(source)
        if isinstance(value, complex):
            return _decimal(source[:-1]) * sympy.I
        # A word in quotes is a symbol.
        if isinstance(value, str) and re.fullmatch(r"[^\W\d_]+", value):
            return sympy.Symbol(value.casefold(), real=self._real)
        raise NotPython

    def _dotted(self, node: ast.expr) -> str:
        """Return a name without its module: `sqrt` for `math.sqrt`, but `Interval.open`."""
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return node.attr if node.value.id in _MODULES else f"{node.value.id}.{node.attr}"
        raise NotPython

    def _name(self, name: str) -> sympy.Basic:
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name == "Half":
            return sympy.S.Half
        if "." in name or name in FUNCTIONS:
            raise NotPython
        return get_symbol(name, self._real, True)

    def _call(self, node: ast.Call) -> sympy.Basic:
        name = self._dotted(node.func)
        if name not in FUNCTIONS:
            raise NotPython
        # A word in quotes is a symbol in a container, but only a number as another function's argument.
        if name in ("set", "frozenset", "tuple", "list", "array") or FUNCTIONS[name] is as_matrix:
            return FUNCTIONS[name](*map(self.read, node.args))
        return FUNCTIONS[name](*(self._argument(argument) for argument in node.args))

    def _argument(self, node: ast.expr) -> sympy.Basic:
        """Return an argument, which may be a number in quotes: `Decimal('0.1')`, `Fraction('1/3')`, `float('inf')`."""
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            return self.read(node)
        text = node.value.strip()
        if text.lstrip("+-").lower() in ("inf", "infinity", "nan"):
            value = CONSTANTS[text.lstrip("+-").lower()]
            return -value if text.startswith("-") else value
        over, slash, under = text.partition("/")
        return _quoted(over) / _quoted(under) if slash else _quoted(over)

    def _compared(self, node: ast.Compare) -> sympy.Basic:
        sides = [self.read(side) for side in (node.left, *node.comparators)]
        relations = [
            self._known(_COMPARED, operator)(left, right, evaluate=False)
            for operator, left, right in zip(node.ops, sides, sides[1:], strict=False)
        ]
        return relations[0] if len(relations) == 1 else And(*relations)

    def _dict(self, node: ast.Dict) -> sympy.Basic:
        """Return pairs in any order. A single name with its value is an equation, as in sympy's solutions."""
        pairs = [(self.read(key), self.read(value)) for key, value in zip(node.keys, node.values, strict=True) if key]
        if len(pairs) == 1 and pairs[0][0].is_Symbol:
            return sympy.Eq(*pairs[0], evaluate=False)
        return FiniteSet(*(sympy.Tuple(*pair) for pair in pairs))


def _decimal(source: str) -> sympy.Basic:
    match = _DECIMAL.fullmatch(source)
    if match is None or abs(int(match[1] or 0)) > _MAX_DECIMAL_EXPONENT:
        raise TooLarge
    # Keep all digits of the source.
    return sympy.Float(source, max(17, len(source)))


def _quoted(text: str) -> sympy.Basic:
    text = text.strip().replace("_", "")
    if re.fullmatch(r"[+-]?\d+", text):
        return sympy.Integer(text)
    if not _DECIMAL.fullmatch(text):
        raise NotPython
    return _decimal(text)
