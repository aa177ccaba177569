"""Doctests of installed packages, collected as demonstrations. No package is imported or run here."""

import ast
import builtins
import doctest
import importlib.util
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.machine.docstrings import docstrings
from repl_rl.record.console import typed_lines

STDLIB = "stdlib"
"""Package name that means the standard library of this Python."""
_SUMMARY_CHARS = 160
_MAX_LINE_CHARS = 500
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
"""Doctest options that the packages use themselves."""


@dataclass(frozen=True, slots=True)
class Example:
    """Lines to type for one statement, and their documented output."""

    lines: tuple[str, ...]
    want: str
    error: str | None
    """Class name of the expected exception, without its module; None means that the statement raises nothing."""
    flags: int

    def agrees(self, printed: str) -> bool:
        """Return True if the console printed the documented output, or raised the documented exception."""
        if self.error is not None:
            raised = (re.match(r"([\w.]+)", line) for line in printed.split("\n") if not line.startswith(" "))
            return any(found and found[1].rpartition(".")[2] == self.error for found in raised)
        return doctest.OutputChecker().check_output(self.want, printed, self.flags)


@dataclass(frozen=True, slots=True)
class Specimen:
    """Doctest of one docstring."""

    name: str
    """Module and line, `heapq:12`."""
    question: str
    """Question of the prompt: the beginning of the docstring."""
    setup: tuple[str, ...]
    """Lines that import what the doctest uses from its own module."""
    examples: tuple[Example, ...]


def harvest(package: str) -> Iterator[Specimen]:
    """Yield the doctests of an installed package, a part of one (`sympy.core`), or the standard library (`stdlib`).

    Raises:
        ConfigError: the package is not installed.
    """
    root, prefix = _root(package)
    for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
        # The standard library's folder may contain installed packages.
        if "site-packages" in path.relative_to(root.parent).parts:
            continue
        inside = path.relative_to(root).with_suffix("").parts if root.is_dir() else ()
        parts = tuple(part for part in (*prefix, *inside) if part != "__init__")
        if not all(part.isidentifier() for part in parts):
            continue
        for where, text in docstrings(path):
            specimen = _specimen(".".join(parts), where.rpartition(":")[2], text, path)
            if specimen is not None:
                yield specimen


def _root(package: str) -> tuple[Path, tuple[str, ...]]:
    """Return the folder or file of a package, and the module name that prefixes the names of its files."""
    if package == STDLIB:
        return Path(sysconfig.get_path("stdlib")), ()
    top, *rest = package.replace("-", "_").split(".")
    # Look up only the top level: finding a part of a package would import the package.
    spec = importlib.util.find_spec(top) if top.isidentifier() else None
    if spec is not None and spec.origin is not None and Path(spec.origin).suffix == ".py":
        origin = Path(spec.origin)
        root = (origin.parent if origin.name == "__init__.py" else origin).joinpath(*rest)
        root = root if root.exists() else root.with_suffix(".py")
        if root.exists():
            return root, (top, *rest)
    raise ConfigError("package", package, f"name an installed package or a part of one, or {STDLIB}")


def _specimen(module: str, line: str, text: str, path: Path) -> Specimen | None:
    """Return the doctest of a docstring, or None if it has no example that can be typed."""
    try:
        parsed = doctest.DocTestParser().get_examples(text)
    except ValueError:
        return None
    # Skipped examples and very long lines make poor demonstrations.
    kept = [e for e in parsed if not e.options.get(doctest.SKIP)]
    examples = tuple(_example(e) for e in kept)
    if not examples or max(len(line) for e in examples for line in e.lines) > _MAX_LINE_CHARS:
        return None
    # Names that the doctest does not bind but its module does are imported first.
    borrowed = sorted(_free_names("\n".join(e.source for e in kept)) & _top_level(path))
    setup = (f"from {module} import {', '.join(borrowed)}",) if borrowed else ()
    return Specimen(f"{module}:{line}", _question(module, text), setup, examples)


def _example(example: doctest.Example) -> Example:
    flags = _FLAGS
    for option, on in example.options.items():
        flags = flags | option if on else flags & ~option
    error = example.exc_msg.split(":")[0].strip().rpartition(".")[2] if example.exc_msg is not None else None
    return Example(typed_lines(example.source), example.want, error, flags)


def _question(module: str, text: str) -> str:
    """Return the question: the docstring's first paragraph before the first prompt, shortened, in one line."""
    prose = text.partition(">>> ")[0].strip().split("\n\n")[0]
    summary = " ".join(prose.split())[:_SUMMARY_CHARS].rstrip(" :.=-")
    return f"Show how {module} is used{': ' + summary if summary else ''}."


def _free_names(source: str) -> set[str]:
    """Return names that the code uses and nowhere binds."""
    used: set[str] = set()
    bound: set[str] = set(dir(builtins))
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    for node in nodes:
        match node:
            # Order of use and binding is ignored: a name that is bound anywhere counts as bound.
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.alias(name=name, asname=asname):
                bound.add(asname or name.partition(".")[0])
                # A star import may bind any name, so nothing counts as free.
                if name == "*":
                    return set()
    return used - bound


@lru_cache(maxsize=4)
def _top_level(path: Path) -> frozenset[str]:
    """Return names that a module binds at its top level."""
    return frozenset(_bound(ast.parse(path.read_text("utf-8")).body))


def _bound(body: Sequence[ast.stmt]) -> Iterator[str]:
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
            case ast.Assign() | ast.AnnAssign():
                yield from (
                    n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
                )
            case ast.If(body=inner, orelse=other) | ast.Try(body=inner, orelse=other):
                yield from _bound([*inner, *other])
            case _:
                pass
