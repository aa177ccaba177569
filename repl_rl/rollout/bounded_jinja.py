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

_ITEM_BYTES = 64
"""Bytes that count for one item of a container."""
_MAX_BITS = 1 << 16
"""Bits of the largest whole number."""
_MAX_DIGITS = 1000
"""Digits after the point to which a number may be rounded."""
_WIDTHS = re.compile(r"[#0\- +]*(\*|\d+)?(\.(\*|\d+)?)?[hlL]?")
_TOTAL_FACTOR = 32
"""Limit of the total size of all results of one render, as a multiple of the size limit of one result."""
_CONCAT_FILTER, _SLICE_FILTER = "~", "[:]"
"""Names of filters that replace `~` and count a slice. No template can call them: they are not identifiers."""
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
            finalize=self._check_shown,
        )
        self._limits = _Limits()
        self.globals.update(like.globals)
        self.filters.update({name: self._wrap_filter(name, function) for name, function in like.filters.items()})
        self.filters[_CONCAT_FILTER] = pass_eval_context(partial(self._join))
        self.filters[_SLICE_FILTER] = self._charge_result
        self._compiled = lru_cache(maxsize=8)(self._compile_source)

    def render(self, source: str, names: Mapping[str, object], max_chars: int) -> str:
        """Render the template `source`; no value in it may have more than `max_chars` characters.

        Raises:
            TooLarge: it makes a larger value, or too many values.
            Exception: any error of the template.
        """
        self._limits.most, self._limits.left = max_chars, _TOTAL_FACTOR * max_chars
        return self._compiled(source).render(**names)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Apply a binary operator, unless the result is too large."""
        # Compute the size of the result before the operation, which cannot be interrupted.
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(_count_result_bits(operator, left, right))
        elif operator == "%" and isinstance(left, str | bytes):
            self._charge(self._estimate_percent_format(left, right))
        elif operator == "*":
            sequence, times = (right, left) if isinstance(left, int) else (left, right)
            self._charge(_get_length(sequence) * max(times, 0) if isinstance(times, int) else 0)
        elif operator == "+":
            self._charge(_get_length(left) + _get_length(right))
        result: object = super().call_binop(context, operator, left, right)
        return result

    def call(self, context: Context, obj: object, /, *args: object, **kwargs: object) -> object:
        """Call a function or a method, unless the result is too large."""
        # The sandbox of Jinja wraps methods such as `str.format`.
        bound = getattr(obj, "__wrapped__", obj)
        owner, name = getattr(bound, "__self__", None), str(getattr(bound, "__name__", ""))
        if isinstance(owner, str | bytes):
            # An iterator can be consumed once only: count its items in a list.
            if name == "join" and args and isinstance(args[0], Iterable):
                args = ([*args[0]], *args[1:])
            self._charge(self._estimate_method_result(owner, name, (*args, *kwargs.values())))
        elif isinstance(owner, int):
            self._charge(max((value for value in (*args, *kwargs.values()) if isinstance(value, int)), default=0))
        return self._charge_result(super().call(context, obj, *args, **kwargs))

    def concat(self, parts: Iterable[str], /) -> str:
        """Join the parts of a text that the template writes, unless they are too large."""
        texts, size = list[str](), 0
        for part in parts:
            size = self._check_size(size + len(part))
            texts.append(part)
        self._charge(size)
        return "".join(texts)

    def _compile_source(self, source: str) -> Template:
        tree = _FilterInserter(self).visit(self.parse(source))
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def _check_size(self, size: int) -> int:
        if size > self._limits.most:
            raise TooLarge(f"{size} characters")
        return size

    def _charge(self, size: int) -> None:
        """Check the size of a result, and add it to the sum of all results."""
        self._limits.left -= self._check_size(size)
        if self._limits.left < 0:
            raise TooLarge(f"over {_TOTAL_FACTOR * self._limits.most} characters in all steps together")

    def _measure(self, *values: object) -> int:
        """Return about how many characters `values` have as text, with all items of containers.

        The same container may occur many times in another one, so counting stops once the total exceeds the limit.
        """
        total, pending = 0, [*values]
        while pending and total <= self._limits.most:
            value = pending.pop()
            # Count the attributes that a namespace holds.
            if isinstance(value, Namespace):
                value = object.__getattribute__(value, "_Namespace__attrs")
            if isinstance(value, Mapping):
                pending += [*value.keys(), *value.values()]
            elif isinstance(value, list | tuple | set | frozenset | MappingView):
                pending += [*value] if isinstance(value, Iterable) else []
            total += len(value) if isinstance(value, str | bytes) else _ITEM_BYTES
        return total

    def _estimate_percent_format(self, text: str | bytes, arguments: object) -> int:
        """Return an upper bound on the size of `text % arguments`."""
        fields = _read_field_widths(text if isinstance(text, str) else text.decode("latin-1"))
        times = len(fields) if isinstance(arguments, Mapping) else 1
        return len(text) + sum(fields) + times * self._measure(arguments)

    def _estimate_brace_format(self, text: str, arguments: Sequence[object]) -> int:
        """Return an upper bound on the size of `text.format(*arguments)`."""
        fields = [spec for _, field, spec, _ in Formatter().parse(text) if field is not None]
        if any("{" in (spec or "") for spec in fields):
            raise TooLarge("a width that an argument gives")
        widths = sum(int(number) for spec in fields for number in re.findall(r"\d{1,18}", spec or ""))
        return len(text) + widths + len(fields) * self._measure(*arguments)

    def _estimate_method_result(self, text: str | bytes, name: str, arguments: Sequence[object]) -> int:
        """Return an upper bound on the size of the result of method `name`, or 0 if the method adds no text."""
        if name in ("format", "format_map"):
            return self._estimate_brace_format(str(text), arguments)
        if name == "join" and arguments:
            return self._measure(arguments[0]) + (
                len(arguments[0]) * len(text) if isinstance(arguments[0], list) else 0
            )
        if name == "replace" and len(arguments) > 1:
            return len(text) + self._check_size(_count_matches(text, arguments[0])) * _get_length(arguments[1])
        if name == "translate":
            return len(text) * (self._measure(*arguments) + 1)
        # The remaining methods pad up to a width.
        widths = [value for value in arguments if isinstance(value, int)]
        if name == "expandtabs":
            return len(text) + _count_matches(text, "\t" if isinstance(text, str) else b"\t") * max(*widths, 8, 0)
        return max(widths, default=0) if name in ("center", "ljust", "rjust", "zfill") else 0

    def _estimate_filter_result(self, name: str, value: object, arguments: Sequence[object]) -> int:
        """Return an upper bound on the size of the result of filter `name`, or 0 if the filter adds no text."""
        widest = max((argument for argument in arguments if isinstance(argument, int)), default=0)
        if name == "round" and widest > _MAX_DIGITS:
            raise TooLarge(f"{widest} digits")
        if name in ("batch", "slice"):
            return _ITEM_BYTES * widest
        if name in _STRUCTURAL:
            return 0
        # The remaining filters write their value as text, so its size counts.
        size = self._check_size(self._measure(value))
        if name == "format":
            mapped = bool(arguments) and isinstance(arguments[-1], dict)
            return self._estimate_percent_format(str(value), arguments[-1] if mapped else arguments) + self._measure(
                *arguments
            )
        if name == "replace" and len(arguments) > 1:
            return size + _count_matches(str(value), str(arguments[0])) * self._measure(arguments[1])
        if name == "join":
            return size + self._measure(*arguments[:1]) * (len(value) if isinstance(value, list) else 0)
        texts = sum(len(argument) for argument in arguments if isinstance(argument, str))
        if name == "indent":
            return size + (str(value).count("\n") + 1) * (max(widest, 4) + texts)
        return max(size * (1 + texts + (widest if name == "tojson" else 0)), widest if name == "center" else 0)

    def _wrap_filter(self, name: str, function: _Function) -> _Function:
        """Return a filter like `function`, with limits."""
        # Jinja passes a context, if the filter asks for one, before the value.
        context_first = hasattr(function, "jinja_pass_arg")

        @wraps(function)
        def filter_with_limits(*args: object, **kwargs: object) -> object:
            context, (value, *arguments) = args[:context_first], args[context_first:]
            if name == "join" and isinstance(value, Iterable):
                value = [*value]
            self._charge(self._estimate_filter_result(name, value, [*arguments, *kwargs.values()]))
            return self._charge_result(function(*context, value, *arguments, **kwargs))

        return filter_with_limits

    def _charge_result(self, value: object) -> object:
        """Count a result that is at most a few times as large as its input."""
        if isinstance(value, int):
            _check_bits(value.bit_length())
        else:
            self._charge(_get_length(value))
        return value

    def _join(self, context: EvalContext, values: Sequence[object]) -> str:
        self._charge(self._measure(*values))
        return markup_join(values) if context.autoescape else str_join(values)

    def _check_shown(self, value: object) -> object:
        """Check a value before it is written as text."""
        if not isinstance(value, str):
            self._check_size(self._measure(value))
        return value


class _Limits(threading.local):
    """Limits of the render that runs in this thread."""

    most = 0
    """Largest size of one value."""
    left = 0
    """Size that is left for all further values of this render."""


class _FilterInserter(NodeTransformer):
    """Visitor that puts filters where the environment has no hook: at `~`, and around slices."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Replace `a ~ b` by a filter of a list."""
        self.generic_visit(node)
        return self._wrap_node(nodes.List(node.nodes, lineno=node.lineno), _CONCAT_FILTER)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Put a filter around a slice."""
        self.generic_visit(node)
        return self._wrap_node(node, _SLICE_FILTER) if isinstance(node.arg, nodes.Slice) else node

    def _wrap_node(self, node: nodes.Expr, name: str) -> nodes.Node:
        marked = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        return marked.set_environment(self._environment)


def _get_length(value: object) -> int:
    """Return the size of a text or list, without the content of its items; 0 for any other value."""
    if isinstance(value, str | bytes):
        return len(value)
    return _ITEM_BYTES * len(value) if isinstance(value, list | tuple) else 0


def _count_matches(text: str | bytes, part: object) -> int:
    """Return at most the number of places at which `part` is replaced."""
    if isinstance(text, str) and isinstance(part, str):
        return text.count(part)
    return text.count(part) if isinstance(text, bytes) and isinstance(part, bytes) else 0


def _count_result_bits(operator: str, left: int, right: int) -> int:
    if operator == "**":
        return left.bit_length() * max(right, 0)
    if operator == "*":
        return left.bit_length() + right.bit_length()
    return max(left.bit_length(), right.bit_length())


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TooLarge(f"a number of {bits} bits")


def _read_field_widths(text: str) -> Sequence[int]:
    """Return the sum of width and precision of each field of a format for the operator `%`."""
    widths, position = list[int](), text.find("%")
    while position >= 0:
        position += 1
        if text.startswith("(", position):
            # A key may hold balanced parentheses.
            depth = 1
            while depth and position + 1 < len(text):
                position += 1
                depth += {"(": 1, ")": -1}.get(text[position], 0)
            position += 1
        numbers = _WIDTHS.match(text, position)
        if numbers is None:
            break
        if "*" in numbers[0]:
            raise TooLarge("a width that an argument gives")
        widths.append(sum(int(number[:18]) for number in re.findall(r"\d+", numbers[0])))
        # Skip the letter of the field, which is `%` in `%%`.
        position = text.find("%", numbers.end() + 1)
    return widths
