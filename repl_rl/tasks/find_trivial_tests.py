"""Detection of tests that test nothing. They would pay full reward to any program, or to none.

A valid test suite must never be refused. So code counts as a test unless it provably can never fail.
"""

import ast
from collections.abc import Sequence, Set

_ENDS = (ast.Return, ast.Raise, ast.Break, ast.Continue)
"""Statements after which the rest of their block never runs."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
"""Nested functions. A `yield` in one does not make the enclosing function a generator."""
_HARMLESS = frozenset({"print", "range"})
"""Functions whose calls test nothing."""
_SHOWN = (
    ast.Compare,
    ast.Constant,
    ast.Tuple,
    ast.List,
    ast.Set,
    ast.Dict,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.JoinedStr,
    ast.Lambda,
)
"""Expressions whose value a console shows, since it is never None."""


def can_fail(body: Sequence[ast.stmt], tested: Set[str] = frozenset()) -> bool:
    """Return False if the code provably tests nothing.

    A test is an `assert` whose condition may be false, a `raise`, or a call. A call of a function in `tested` does not
    count as a test. A statement that is only a comparison does not count either.
    """
    harmless = _HARMLESS | tested
    nodes: list[ast.AST] = list(_find_reachable(body))
    while nodes:
        node = nodes.pop()
        match node:
            # These test nothing, even if they contain a call.
            case ast.Assert(test=test) if is_always_true(test):
                continue
            case ast.Expr(value=ast.Compare()) | ast.Return(value=ast.Compare()):
                continue
            case ast.Call(func=ast.Name(id=name)) if name in harmless:
                # The call is harmless, but its arguments may contain another call.
                pass
            case ast.Assert() | ast.Raise() | ast.Call():
                return True
        # Search the parts of any other node.
        for _, value in ast.iter_fields(node):
            if isinstance(value, list):
                nodes += _find_reachable([child for child in value if isinstance(child, ast.AST)])
            elif isinstance(value, ast.AST):
                nodes.append(value)
    return False


def _find_reachable(parts: Sequence[ast.AST]) -> Sequence[ast.AST]:
    """Return the parts up to the first statement that ends their block."""
    for count, part in enumerate(parts, start=1):
        if isinstance(part, _ENDS):
            return parts[:count]
    return parts


def is_always_true(condition: ast.expr) -> bool:
    """Return True for a true constant, a container with values, a generator and a `lambda`."""
    match condition:
        case ast.Constant(value=value):
            return bool(value)
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return any(not isinstance(part, ast.Starred) for part in parts)
        case ast.Dict(keys=keys):
            return any(key is not None for key in keys)
    return isinstance(condition, ast.GeneratorExp | ast.Lambda)


def find_mistake(statement: ast.stmt) -> str | None:
    """Return the correction of a statement that looks like a test but tests nothing; None for other statements.

    Examples are `f(2) == 4` without `assert`, and `assert (f(2) == 4, "message")`. `assert True` is accepted.
    """
    match statement:
        case ast.Expr(value=ast.Constant(value=str() | None)) | ast.Assert(test=ast.Constant()):
            return None
        case ast.Expr(value=value) if isinstance(value, _SHOWN):
            return "it tests nothing; write `assert` before it"
        case ast.Assert(test=ast.Tuple() as test) if is_always_true(test):
            return "a tuple is always true; drop the brackets around the condition and its message"
        case ast.Assert(test=test) if is_always_true(test):
            return "its condition is always true; write one that may be false"
    return None


def find_check_mistake(module: ast.Module, entry: str) -> str | None:
    """Return what to change in tests whose `check` can test no program, or None.

    Args:
        module: tests of HumanEval, which define `check`.
        entry: name of the tested function.
    """
    binders = [node for node in ast.walk(module) if "check" in _get_bound_names(node) or "*" in _get_bound_names(node)]
    if not binders:
        return "define the function check(candidate)"
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    checks = [function for function in functions if function.name == "check" and not function.decorator_list]
    # A `check` that is made in another way may be anything.
    if len(checks) != len(binders):
        return None
    check = checks[-1]
    if isinstance(check, ast.AsyncFunctionDef) or _is_generator(check):
        return "calling check(candidate) runs nothing; define a plain function, without async and yield"
    if not _accepts_one_argument(check.args):
        return "check(candidate) is called with one argument; let it take one"
    parameters = {argument.arg for argument in (*check.args.posonlyargs, *check.args.args)}
    return (
        None if can_fail(check.body, parameters | {entry}) else "check(candidate) tests nothing; write an assert in it"
    )


def _get_bound_names(node: ast.AST) -> Set[str]:
    """Return the names that a node binds by itself."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Name(id=name, ctx=ast.Store()):
            return {name}
        case ast.alias(name=name, asname=asname):
            return {asname or name}
    return frozenset()


def _is_generator(function: ast.FunctionDef) -> bool:
    """Return True if the function itself has a `yield`."""
    nodes: list[ast.AST] = list(function.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, _SCOPES):
            nodes += ast.iter_child_nodes(node)
    return False


def _accepts_one_argument(arguments: ast.arguments) -> bool:
    """Return True if a call with one positional argument fits."""
    positional = len(arguments.posonlyargs) + len(arguments.args)
    required = positional - len(arguments.defaults)
    return (positional > 0 or arguments.vararg is not None) and required <= 1 and None not in arguments.kw_defaults
