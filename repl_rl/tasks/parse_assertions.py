"""Splitting of assertions such as `assert f(2) == 4` into a console expression and a comparison on the host.

A tested program runs in the console, so it could read an expected value there. Here the console only prints the value
of `f(2)`, as a literal, and the host makes the comparison.
"""

import ast
import math
import operator
from collections.abc import Callable, Container, Mapping, Sequence, Set
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType

from repl_rl.tasks.validate_text import NotPython, print_python

_MAX_PRINTED_CHARS = 30_000
"""Longest literal that is read from the console, characters."""
_MAX_EXPECTED_CHARS = 10_000
"""Longest expected value, characters."""
_MAX_BITS = 10_000
"""Largest integer in a literal, bits."""
_ISCLOSE = "math.isclose"
_PRINT_PROGRAM = """\
def plain(value):
    kind = type(value)
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        return plain(value.item())
    for base in (bool, int, float, complex, str, bytes):
        if isinstance(value, base):
            return base.__repr__(value)
    if isinstance(value, fractions.Fraction):
        return "Fraction(%d, %d)" % (value.numerator, value.denominator)
    if isinstance(value, dict):
        return "{%s}" % ", ".join("%s: %s" % (plain(key), plain(item)) for key, item in dict.items(value))
    for base, name in ((list, ""), (tuple, "tuple"), (collections.abc.Set, "frozenset")):
        if isinstance(value, base):
            return "%s([%s])" % (name, ", ".join(map(plain, value)))
    return repr(value)


import collections.abc, contextlib, fractions, io
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    shown = plain(eval(source, names))
print(shown)
"""
"""Code that prints a value as a literal. An instance of a subclass is printed as its base type. Other output of the
program is dropped."""


@dataclass(frozen=True, slots=True)
class SplitAssertion:
    """One `assert`, split in two."""

    expression: str
    """Expression for the console: Python on one line."""
    compare: Callable[[object], object]
    """Comparison with the expected value. If it raises, the assertion does not hold."""

    @property
    def console_line(self) -> str:
        """One physical line that prints the value of the expression as a literal."""
        return f"__import__('builtins').exec({_PRINT_PROGRAM!r}, {{'source': {self.expression!r}, 'names': globals()}})"

    def check_output(self, printed: str) -> bool:
        """Return True if the console printed the literal of a value for which the assertion holds."""
        if len(printed) > _MAX_PRINTED_CHARS:
            return False
        try:
            return bool(self.compare(_parse_literal(ast.parse(printed.strip(), mode="eval").body)))
        except Exception:
            # The program wrote the text, so it may be anything.
            return False
        except MemoryError:
            # Python's parser refuses deep nesting with this error.
            return False


class _NotALiteral(Exception):
    """The expression is not a literal."""


def find_isclose_names(nodes: Sequence[ast.AST]) -> Set[str]:
    """Return the names of `math.isclose` in tests: its full name, and names under which they import it.

    Other functions of this name, such as numpy's, have other tolerances.
    """
    qualified_names = {_ISCLOSE}
    for node in nodes:
        match node:
            case ast.ImportFrom(module="math", names=names, level=0):
                qualified_names |= {alias.asname or alias.name for alias in names if alias.name == "isclose"}
                qualified_names |= {"isclose" for alias in names if alias.name == "*"}
            case ast.Import(names=names):
                qualified_names |= {
                    f"{alias.asname}.isclose" for alias in names if alias.name == "math" and alias.asname
                }
    # A name that is defined again means another function.
    return qualified_names - {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def qualify_isclose(statement: ast.stmt, names: Set[str]) -> None:
    """Replace an imported name of `math.isclose` in an assertion by its full name, so that it can be split."""
    match statement:
        case ast.Assert(test=ast.Call(func=func) as call) if _get_dotted_name(func) in names:
            call.func = ast.parse(_ISCLOSE, mode="eval").body


def _get_dotted_name(node: ast.expr) -> str | None:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return f"{module}.{name}"
    return None


def split_assertion(statement: ast.stmt, isclose: Set[str] = frozenset({_ISCLOSE})) -> SplitAssertion | None:
    """Split an `assert` that compares the value of a call with a literal. Return None for any other statement.

    Args:
        statement: statement of tests.
        isclose: names of `math.isclose` in these tests.
    """
    return _split_test(statement.test, isclose) if isinstance(statement, ast.Assert) else None


def _split_test(test: ast.expr, isclose: Set[str]) -> SplitAssertion | None:
    try:
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=ast.Call() as call):
                return _split_truth_test(call, False)
            case ast.Call(func=func, args=[first, second]) if _get_dotted_name(func) in isclose:
                return _split_isclose(first, second, {k.arg or "": k.value for k in test.keywords})
            case ast.Call():
                return _split_truth_test(test, True)
            case ast.Compare(ops=[relation], comparators=[right]):
                return _split_comparison(test.left, relation, right)
    except (_NotALiteral, NotPython):
        pass
    return None


def _split_truth_test(call: ast.Call, expected: bool) -> SplitAssertion:
    # The expected values would be within the call, and so in the console.
    if any(isinstance(part, ast.Compare) for part in ast.walk(call)):
        raise _NotALiteral
    return SplitAssertion(f"bool({print_python(call)})", lambda value: value is expected)


def _split_isclose(first: ast.expr, second: ast.expr, keywords: Mapping[str, ast.expr]) -> SplitAssertion:
    # `isclose` takes its two numbers in either order.
    call, literal = (first, second) if _contains_call(first) else (second, first)
    expected, options = _parse_expected(literal), {name: _parse_number(value) for name, value in keywords.items()}
    relative, absolute = options.pop("rel_tol", 1e-9), options.pop("abs_tol", 0.0)
    if options or not _contains_call(call) or not isinstance(expected, int | float):
        raise _NotALiteral

    def is_near(value: object) -> bool:
        return isinstance(value, int | float) and math.isclose(value, expected, rel_tol=relative, abs_tol=absolute)

    return SplitAssertion(print_python(call), is_near)


def _parse_number(node: ast.expr) -> float:
    value = _parse_expected(node)
    if not isinstance(value, int | float):
        raise _NotALiteral
    return value


def _split_comparison(left: ast.expr, relation: ast.cmpop, right: ast.expr) -> SplitAssertion:
    compare = _RELATIONS.get(type(relation))
    if compare is None:
        raise _NotALiteral
    # The console evaluates the side with the call.
    if not _contains_call(left):
        compare, left, right = _swap_arguments(compare), right, left
    expected = _parse_expected(right)
    # Identity of other values would not survive printing.
    if isinstance(relation, ast.Is | ast.IsNot) and not (expected is None or isinstance(expected, bool)):
        raise _NotALiteral
    if not _contains_call(left):
        raise _NotALiteral
    # In `abs(f(x) - 0.5) < 1e-6`, the console evaluates only `f(x)`.
    distance = _parse_distance(left)
    if distance is not None:
        call, centre = distance
        return SplitAssertion(print_python(call), lambda value: compare(_compute_distance(value, centre), expected))
    return SplitAssertion(print_python(left), lambda value: compare(value, expected))


def _parse_distance(node: ast.expr) -> tuple[ast.expr, object] | None:
    """Return the call and the number of `abs(f(x) - 0.5)`, or None for another expression."""
    match node:
        case ast.Call(
            func=ast.Name("abs" | "fabs") | ast.Attribute(attr="fabs"), args=[ast.BinOp(op=ast.Sub()) as difference]
        ):
            for call, literal in ((difference.left, difference.right), (difference.right, difference.left)):
                if _contains_call(call) and not _contains_call(literal):
                    return call, _parse_expected(literal)
    return None


def _compute_distance(value: object, centre: object) -> float:
    if not isinstance(value, int | float | complex) or not isinstance(centre, int | float | complex):
        raise TypeError
    return abs(value - centre)


def _contains_call(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Call) for part in ast.walk(node)) and not _is_literal(node)


def _is_literal(node: ast.expr) -> bool:
    try:
        _parse_literal(node)
    except Exception:
        # An expression without a value is not a literal.
        return False
    return True


def _parse_expected(node: ast.expr) -> object:
    try:
        value = _parse_literal(node)
        # Python refuses to print very long integers.
        length = len(repr(value))
    except (RecursionError, ArithmeticError, TypeError, ValueError) as error:
        raise _NotALiteral from error
    # A console would cut off what it prints.
    if length > _MAX_EXPECTED_CHARS:
        raise _NotALiteral
    return value


# Relations and literals

Relation = Callable[..., object]


def _swap_arguments(relation: Relation) -> Relation:
    return lambda value, expected: relation(expected, value)


def _is_contained(item: object, container: object) -> bool:
    return isinstance(container, Container) and operator.contains(container, item)


_RELATIONS: Mapping[type[ast.cmpop], Relation] = MappingProxyType(
    {
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
        ast.Is: operator.is_,
        ast.IsNot: operator.is_not,
        ast.In: _is_contained,
        ast.NotIn: lambda item, container: not _is_contained(item, container),
    }
)
_ARITHMETIC: Mapping[type[ast.operator], Relation] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.Pow: operator.pow,
    }
)
_CONSTRUCTORS: Mapping[str, Callable[..., object]] = MappingProxyType(
    {
        "set": set,
        "frozenset": frozenset,
        "tuple": tuple,
        "list": list,
        "dict": dict,
        "float": float,
        "Fraction": Fraction,
        "Decimal": Decimal,
    }
)
_NAMED_NUMBERS: Mapping[str, object] = MappingProxyType({"inf": math.inf, "nan": math.nan})


def _parse_literal(node: ast.expr) -> object:
    """Return the value of a literal. Only numbers, texts and containers are ever built."""
    match node:
        # Constants and containers.
        case ast.Constant():
            return node.value
        case ast.Tuple():
            return tuple(map(_parse_literal, node.elts))
        case ast.List():
            return list(map(_parse_literal, node.elts))
        case ast.Set():
            return set(map(_parse_literal, node.elts))
        case ast.Dict():
            keys = [_parse_literal(key) for key in node.keys if key is not None]
            return dict(zip(keys, map(_parse_literal, node.values), strict=True))
        case ast.Name(id=name) if name in _NAMED_NUMBERS:
            return _NAMED_NUMBERS[name]
        # Arithmetic with bounded operands.
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign):
            number = _check_magnitude(_parse_literal(node.operand))
            return -number if isinstance(sign, ast.USub) else number
        case ast.BinOp(op=operation) if type(operation) in _ARITHMETIC:
            left, right = _check_magnitude(_parse_literal(node.left)), _check_magnitude(_parse_literal(node.right))
            # Bound the size of a power before it is computed.
            if isinstance(operation, ast.Pow) and (
                isinstance(right, complex) or abs(right) * _count_bits(left) > _MAX_BITS
            ):
                raise _NotALiteral
            return _ARITHMETIC[type(operation)](left, right)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _CONSTRUCTORS:
            return _CONSTRUCTORS[name](*map(_parse_literal, node.args))
    raise _NotALiteral


def _check_magnitude(value: object) -> int | float | complex:
    if not isinstance(value, int | float | complex) or _count_bits(value) > _MAX_BITS:
        raise _NotALiteral
    return value


def _count_bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 64
