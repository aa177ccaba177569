"""Jinja environment for foreign templates, in which no operation makes a value above a size limit.

A limit on CPU time does not interrupt one operation in C, such as `'a' * 2000000000`. So the size of each result is
computed before the operation.
"""

import re
import threading
from collections.abc import Callable, Iterable, Mapping, MappingView, Sequence
from functools import lru_cache, partial, wraps
from string import Formatter

from jinja2 import Environment, Template, TemplateRuntimeError, nodes
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_eval_context
from jinja2.visitor import NodeTransformer

_ITEM = 64
"""Bytes that count for one item of a container."""
_MOST_BITS = 1 << 16
"""Bits of the largest whole number."""
_MOST_DIGITS = 1000
"""Digits after the point to which a number may be rounded."""
_WIDTHS = re.compile(r"[#0\- +]*(\*|\d+)?(\.(\*|\d+)?)?[hlL]?")
_TOTAL = 32
"""Sum of all results of one render, in multiples of the limit of one result."""
_JOINED, _MADE = "~", "[:]"
"""Filters that replace the operator `~` and count a slice. No template can spell these names."""
_STRUCTURAL = {
    *("abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items", "last"),
    *("length", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "round", "select"),
    *("selectattr", "slice", "sort", "sum", "unique"),
}
"""Filters that do not write their value as text."""
_Function = Callable[..., object]


class TooLarge(TemplateRuntimeError):
    """A template makes a value above the limit. The message is the size."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Environment with the filters, globals and extensions of another, and with limits.

    Templates are compiled once. Any thread may render.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, like: Environment) -> None:
        super().__init__(
            trim_blocks=like.trim_blocks,
            lstrip_blocks=like.lstrip_blocks,
            extensions=[type(extension) for extension in like.extensions.values()],
            finalize=self._show,
        )
        self._limits = _Limits()
        self.globals.update(like.globals)
        self.filters.update({name: self._count_result(name, function) for name, function in like.filters.items()})
        self.filters[_JOINED] = pass_eval_context(partial(self._join))
        self.filters[_MADE] = self._check_made
        self._compiled = lru_cache(maxsize=8)(self._compile_source)

    def render(self, source: str, names: Mapping[str, object], most: int) -> str:
        """Render the template `source`; no value in it may have more than `most` characters.

        Raises:
            TooLarge: it makes a larger value, or too many values.
            Exception: any error of the template.
        """
        self._limits.most, self._limits.left = most, _TOTAL * most
        return self._compiled(source).render(**names)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Apply a binary operator, unless the result is too large."""
        # Compute the size of the result before the operation, which cannot be interrupted.
        if isinstance(left, int) and isinstance(right, int):
            _refuse_bits(_bits(operator, left, right))
        elif operator == "%" and isinstance(left, str | bytes):
            self._take(self._percent(left, right))
        elif operator == "*":
            sequence, times = (right, left) if isinstance(left, int) else (left, right)
            self._take(_length(sequence) * max(times, 0) if isinstance(times, int) else 0)
        elif operator == "+":
            self._take(_length(left) + _length(right))
        result: object = super().call_binop(context, operator, left, right)
        return result

    def call(self, context: Context, obj: object, /, *args: object, **kwargs: object) -> object:
        """Call a function or a method, unless the result is too large."""
        # The sandbox of Jinja wraps methods such as `str.format`.
        bound = getattr(obj, "__wrapped__", obj)
        on, name = getattr(bound, "__self__", None), str(getattr(bound, "__name__", ""))
        if isinstance(on, str | bytes):
            # An iterator can be consumed once only: count its items in a list.
            if name == "join" and args and isinstance(args[0], Iterable):
                args = ([*args[0]], *args[1:])
            self._take(self._size_of_method(on, name, (*args, *kwargs.values())))
        elif isinstance(on, int):
            self._take(max((each for each in (*args, *kwargs.values()) if isinstance(each, int)), default=0))
        return self._check_made(super().call(context, obj, *args, **kwargs))

    def concat(self, parts: Iterable[str], /) -> str:
        """Join the parts of a text that the template writes, unless they are too large."""
        kept, size = list[str](), 0
        for part in parts:
            size = self._fits(size + len(part))
            kept.append(part)
        self._take(size)
        return "".join(kept)

    def _compile_source(self, source: str) -> Template:
        tree = _Marking(self).visit(self.parse(source))
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def _fits(self, size: int) -> int:
        if size > self._limits.most:
            raise TooLarge(f"{size} characters")
        return size

    def _take(self, size: int) -> None:
        """Check the size of a result, and add it to the sum of all results."""
        self._limits.left -= self._fits(size)
        if self._limits.left < 0:
            raise TooLarge(f"over {_TOTAL * self._limits.most} characters in all steps together")

    def _size(self, *values: object) -> int:
        """Return about how many characters `values` have as text, with all items of containers.

        A container may hold another many times. So the count ends above the limit.
        """
        total, left = 0, [*values]
        while left and total <= self._limits.most:
            each = left.pop()
            # Count the attributes that a namespace holds.
            if isinstance(each, Namespace):
                each = object.__getattribute__(each, "_Namespace__attrs")
            if isinstance(each, Mapping):
                left += [*each.keys(), *each.values()]
            elif isinstance(each, list | tuple | set | frozenset | MappingView):
                left += [*each] if isinstance(each, Iterable) else []
            total += len(each) if isinstance(each, str | bytes) else _ITEM
        return total

    def _percent(self, text: str | bytes, given: object) -> int:
        """Return at most the size of `text % given`."""
        fields = _fields(text if isinstance(text, str) else text.decode("latin-1"))
        times = len(fields) if isinstance(given, Mapping) else 1
        return len(text) + sum(fields) + times * self._size(given)

    def _braces(self, text: str, given: Sequence[object]) -> int:
        """Return at most the size of `text.format(*given)`."""
        fields = [spec for _, field, spec, _ in Formatter().parse(text) if field is not None]
        if any("{" in (spec or "") for spec in fields):
            raise TooLarge("a width that an argument gives")
        widths = sum(int(number) for spec in fields for number in re.findall(r"\d{1,18}", spec or ""))
        return len(text) + widths + len(fields) * self._size(*given)

    def _size_of_method(self, text: str | bytes, name: str, given: Sequence[object]) -> int:
        """Return at most the size of the result of method `name`, or 0 for one that adds nothing."""
        if name in ("format", "format_map"):
            return self._braces(str(text), given)
        if name == "join" and given:
            return self._size(given[0]) + (len(given[0]) * len(text) if isinstance(given[0], list) else 0)
        if name == "replace" and len(given) > 1:
            return len(text) + self._fits(_count(text, given[0])) * _length(given[1])
        if name == "translate":
            return len(text) * (self._size(*given) + 1)
        # The remaining methods pad up to a width.
        widths = [each for each in given if isinstance(each, int)]
        if name == "expandtabs":
            return len(text) + _count(text, "\t" if isinstance(text, str) else b"\t") * max(*widths, 8, 0)
        return max(widths, default=0) if name in ("center", "ljust", "rjust", "zfill") else 0

    def _size_of_filter(self, name: str, value: object, given: Sequence[object]) -> int:
        """Return at most the size of the result of filter `name`, or 0 for one that adds nothing."""
        widest = max((each for each in given if isinstance(each, int)), default=0)
        if name == "round" and widest > _MOST_DIGITS:
            raise TooLarge(f"{widest} digits")
        if name in ("batch", "slice"):
            return _ITEM * widest
        if name in _STRUCTURAL:
            return 0
        # The remaining filters write their value as text, so its size counts.
        size = self._fits(self._size(value))
        if name == "format":
            mapped = bool(given) and isinstance(given[-1], dict)
            return self._percent(str(value), given[-1] if mapped else given) + self._size(*given)
        if name == "replace" and len(given) > 1:
            return size + _count(str(value), str(given[0])) * self._size(given[1])
        if name == "join":
            return size + self._size(*given[:1]) * (len(value) if isinstance(value, list) else 0)
        texts = sum(len(each) for each in given if isinstance(each, str))
        if name == "indent":
            return size + (str(value).count("\n") + 1) * (max(widest, 4) + texts)
        return max(size * (1 + texts + (widest if name == "tojson" else 0)), widest if name == "center" else 0)

    def _count_result(self, name: str, function: _Function) -> _Function:
        """Return a filter like `function`, with limits."""
        # Jinja passes a context, if the filter asks for one, before the value.
        context_first = hasattr(function, "jinja_pass_arg")

        @wraps(function)
        def count_result(*args: object, **kwargs: object) -> object:
            before, (value, *given) = args[:context_first], args[context_first:]
            if name == "join" and isinstance(value, Iterable):
                value = [*value]
            self._take(self._size_of_filter(name, value, [*given, *kwargs.values()]))
            return self._check_made(function(*before, value, *given, **kwargs))

        return count_result

    def _check_made(self, value: object) -> object:
        """Count a result that is at most a few times as large as its input."""
        if isinstance(value, int):
            _refuse_bits(value.bit_length())
        else:
            self._take(_length(value))
        return value

    def _join(self, context: EvalContext, values: Sequence[object]) -> str:
        self._take(self._size(*values))
        return markup_join(values) if context.autoescape else str_join(values)

    def _show(self, value: object) -> object:
        """Check a value before it is written as text."""
        if not isinstance(value, str):
            self._fits(self._size(value))
        return value


class _Limits(threading.local):
    """Limits of the render that runs in this thread."""

    most = 0
    """Largest size of one value."""
    left = 0
    """Size that is left for all further values of this render."""


class _Marking(NodeTransformer):
    """Visitor that puts filters where the environment has no hook: at `~`, and around slices."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Replace `a ~ b` by a filter of a list."""
        self.generic_visit(node)
        return self._filter(nodes.List(node.nodes, lineno=node.lineno), _JOINED)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Put a filter around a slice."""
        self.generic_visit(node)
        return self._filter(node, _MADE) if isinstance(node.arg, nodes.Slice) else node

    def _filter(self, node: nodes.Expr, name: str) -> nodes.Node:
        made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        return made.set_environment(self._environment)


def _length(value: object) -> int:
    """Return the size of a text or list, without the content of its items; 0 for any other value."""
    if isinstance(value, str | bytes):
        return len(value)
    return _ITEM * len(value) if isinstance(value, list | tuple) else 0


def _count(text: str | bytes, part: object) -> int:
    """Return at most the number of places at which `part` is replaced."""
    if isinstance(text, str) and isinstance(part, str):
        return text.count(part)
    return text.count(part) if isinstance(text, bytes) and isinstance(part, bytes) else 0


def _bits(operator: str, left: int, right: int) -> int:
    if operator == "**":
        return left.bit_length() * max(right, 0)
    if operator == "*":
        return left.bit_length() + right.bit_length()
    return max(left.bit_length(), right.bit_length())


def _refuse_bits(bits: int) -> None:
    if bits > _MOST_BITS:
        raise TooLarge(f"a number of {bits} bits")


def _fields(text: str) -> Sequence[int]:
    """Return the sum of width and precision of each field of a format for the operator `%`."""
    found, at = list[int](), text.find("%")
    while at >= 0:
        at += 1
        if text.startswith("(", at):
            # A key may hold balanced parentheses.
            depth = 1
            while depth and at + 1 < len(text):
                at += 1
                depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        numbers = _WIDTHS.match(text, at)
        if numbers is None:
            break
        if "*" in numbers[0]:
            raise TooLarge("a width that an argument gives")
        found.append(sum(int(number[:18]) for number in re.findall(r"\d+", numbers[0])))
        # Skip the letter of the field, which is `%` in `%%`.
        at = text.find("%", numbers.end() + 1)
    return found
