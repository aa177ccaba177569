"""Demonstrations from doctests of installed packages: their collection, and their execution in a sandbox.

The collection reads source files; no package is imported or run in this process. The execution keeps, as trajectories,
doctests whose output is as documented.
"""

import ast
import asyncio
import builtins
import doctest
import hashlib
import importlib.util
import re
import sysconfig
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox.base import LineResult, Sandbox, SandboxSession
from repl_rl.trajectory.console_text import choose_prompt, split_into_typed_lines
from repl_rl.trajectory.trajectory import (
    Execution,
    Line,
    LineEnd,
    LineStatus,
    Prompt,
    Sampled,
    Segment,
    Stop,
    Trajectory,
)
from repl_rl.utils.installed_versions import iterate_doctest_docstrings

STDLIB = "stdlib"
"""Package name that means the standard library of this Python."""
_SUMMARY_CHARS = 160
"""Longest summary of a docstring in a question, characters."""
_MAX_LINE_CHARS = 500
"""Longest line to type, characters."""
_DOCTEST_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
"""Doctest options that the packages use themselves."""
_WRITTEN_LOGPROB = 0.0
"""Log probability (nats) of a demonstrated token; it was not sampled, so its probability counts as 1."""
_FATAL_STATUSES = {
    LineStatus.TIMEOUT: "ran into a time limit",
    LineStatus.MEMORY_LIMIT: "ran into a memory limit",
    LineStatus.OUTPUT_LIMIT: "printed too much",
    LineStatus.EXITED: "ended its console",
    LineStatus.ANSWERED: "ended its console",
    LineStatus.KILLED: "killed its console",
    LineStatus.SANDBOX_FAULT: "our console failed",
}
"""Statuses after which the output means nothing, and the reason to report."""


@dataclass(frozen=True, slots=True)
class DoctestExample:
    """Lines to type for one statement, and their documented output."""

    lines: tuple[str, ...]
    expected_output: str
    expected_error: str | None
    """Class name of the expected exception, without its module; None means that the statement raises nothing."""
    flags: int

    def matches(self, printed: str) -> bool:
        """Return True if the console printed the documented output, or raised the documented exception."""
        if self.expected_error is not None:
            error_names = (re.match(r"([\w.]+)", line) for line in printed.split("\n") if not line.startswith(" "))
            return any(match and match[1].rpartition(".")[2] == self.expected_error for match in error_names)
        return doctest.OutputChecker().check_output(self.expected_output, printed, self.flags)


@dataclass(frozen=True, slots=True)
class DocstringTest:
    """Doctest of one docstring."""

    name: str
    """Module and line, `heapq:12`."""
    question: str
    """Question of the prompt: the beginning of the docstring."""
    setup: tuple[str, ...]
    """Lines that import what the doctest uses from its own module."""
    examples: tuple[DoctestExample, ...]


def iterate_doctests(package: str) -> Iterator[DocstringTest]:
    """Yield the doctests of an installed package, a part of one (`sympy.core`), or the standard library (`stdlib`).

    Raises:
        ConfigError: the package is not installed.
    """
    root, prefix = _find_package_root(package)
    for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
        # The standard library's folder may contain installed packages.
        if "site-packages" in path.relative_to(root.parent).parts:
            continue
        relative = path.relative_to(root).with_suffix("").parts if root.is_dir() else ()
        parts = tuple(part for part in (*prefix, *relative) if part != "__init__")
        if not all(part.isidentifier() for part in parts):
            continue
        for location, text in iterate_doctest_docstrings(path):
            docstring_test = _build_docstring_test(".".join(parts), location.rpartition(":")[2], text, path)
            if docstring_test is not None:
                yield docstring_test


def _find_package_root(package: str) -> tuple[Path, tuple[str, ...]]:
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


def _build_docstring_test(module: str, line: str, text: str, path: Path) -> DocstringTest | None:
    """Return the doctest of a docstring, or None if it has no example that can be typed."""
    try:
        parsed = doctest.DocTestParser().get_examples(text)
    except ValueError:
        return None
    # Skipped examples and very long lines make poor demonstrations.
    selected = [e for e in parsed if not e.options.get(doctest.SKIP)]
    examples = tuple(_build_example(e) for e in selected)
    if not examples or max(len(line) for e in examples for line in e.lines) > _MAX_LINE_CHARS:
        return None
    # Names that the doctest does not bind but its module does are imported first.
    imported = sorted(_find_free_names("\n".join(e.source for e in selected)) & _find_top_level_names(path))
    setup = (f"from {module} import {', '.join(imported)}",) if imported else ()
    return DocstringTest(f"{module}:{line}", _extract_question(module, text), setup, examples)


def _build_example(example: doctest.Example) -> DoctestExample:
    """Convert an example of the standard library's parser. Its own options change the common ones."""
    flags = _DOCTEST_FLAGS
    for option, enabled in example.options.items():
        flags = flags | option if enabled else flags & ~option
    # Keep only the class of the exception, as IGNORE_EXCEPTION_DETAIL does.
    error = example.exc_msg.split(":")[0].strip().rpartition(".")[2] if example.exc_msg is not None else None
    return DoctestExample(split_into_typed_lines(example.source), example.want, error, flags)


def _extract_question(module: str, text: str) -> str:
    """Return the question: the docstring's first paragraph before the first prompt, shortened, in one line."""
    prose = text.partition(">>> ")[0].strip().split("\n\n")[0]
    summary = " ".join(prose.split())[:_SUMMARY_CHARS].rstrip(" :.=-")
    return f"Show how {module} is used{': ' + summary if summary else ''}."


def _find_free_names(source: str) -> set[str]:
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
def _find_top_level_names(path: Path) -> frozenset[str]:
    """Return names that a module binds at its top level."""
    return frozenset(_iterate_bound_names(ast.parse(path.read_text("utf-8")).body))


def _iterate_bound_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield names that statements bind, those in `if` and `try` included."""
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
                yield from _iterate_bound_names([*inner, *other])
            case _:
                pass


@dataclass(slots=True)
class DemonstrationCounts:
    """Counts of demonstrations by result: complete, truncated or rejected."""

    complete: int = 0
    truncated: Counter[str] = field(default_factory=Counter)
    """Demonstrations that are kept up to their first wrong example, by what is wrong."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Demonstrations of which nothing is kept, by reason."""

    @property
    def accepted_count(self) -> int:
        """Number of demonstrations that are kept, complete or truncated."""
        return self.complete + self.truncated.total()

    def to_json(self) -> Mapping[str, int | Mapping[str, int]]:
        """Return the counts as JSON."""
        return {
            "kept": self.accepted_count,
            "kept_whole": self.complete,
            "kept_in_part": dict(self.truncated.most_common()),
            "dropped": dict(self.rejected.most_common()),
        }


@dataclass(frozen=True, slots=True)
class DoctestRecipe:
    """Settings for executing and recording demonstrations."""

    renderer: Renderer
    template: str = "bare"
    """Prompt template."""
    max_tokens: int = 1024
    """Longest trajectory, prompt included, tokens (>= 1)."""
    max_lines: int = 32
    """Maximum number of lines of one trajectory (>= 1)."""
    concurrency: int = 8
    """Concurrent consoles (>= 1)."""


async def generate_verified_doctests(
    docstring_tests: Sequence[DocstringTest], sandbox: Sandbox, recipe: DoctestRecipe, counts: DemonstrationCounts
) -> AsyncIterator[Trajectory]:
    """Yield trajectories of doctests that printed the documented output, in order; `counts` counts the others.

    Each doctest runs in a separate console. If an example goes wrong, the part before it is kept, provided that it
    printed something. Duplicates are dropped. Lines are `Sampled`, so a fine-tuning learns them; everything else is
    `Observed`.
    """
    slots = asyncio.Semaphore(recipe.concurrency)

    async def verify_one(docstring_test: DocstringTest) -> tuple[Trajectory | None, str]:
        async with slots:
            return await _execute_doctest(docstring_test, sandbox, recipe)

    digests: set[bytes] = set()
    tasks = [asyncio.create_task(verify_one(docstring_test)) for docstring_test in docstring_tests]
    try:
        # Await in the order of the specimens, so that results do not depend on timing.
        for task in tasks:
            trajectory, problem = await task
            if trajectory is None:
                counts.rejected[problem] += 1
                continue
            # Many docstrings repeat the same example.
            key = hashlib.sha256(repr(trajectory.completion_ids).encode()).digest()
            if key in digests:
                counts.rejected["is there already"] += 1
                continue
            digests.add(key)
            if problem:
                counts.truncated[problem] += 1
            else:
                counts.complete += 1
            yield trajectory
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _execute_doctest(
    docstring_test: DocstringTest, sandbox: Sandbox, recipe: DoctestRecipe
) -> tuple[Trajectory | None, str]:
    """Return the correct part of the trajectory, or None, and what went wrong, or ""."""
    start_s = time.monotonic()
    version = ".".join(map(str, sandbox.python_version))
    prompt = recipe.renderer.build_prompt(docstring_test.question, recipe.template, version)
    segments: list[Segment] = []
    # Number of segments up to the last correct example that printed something.
    correct_segments = 0
    problem = ""
    async with sandbox.session() as console:
        # The imports come first, as examples without output.
        for example in (
            *(DoctestExample((line,), "", None, 0) for line in docstring_test.setup),
            *docstring_test.examples,
        ):
            results = await _run_example(console, example)
            # A wrong example is not recorded: the trajectory ends before it.
            problem = _find_mismatch(example, results)
            if not problem:
                _add_segments(segments, example, results, recipe.renderer, prompt)
            length = len(prompt.token_ids) + sum(len(s.token_ids) for s in segments)
            if not problem and (length > recipe.max_tokens or len(segments) > 2 * recipe.max_lines):
                problem = "is too long"
            if problem:
                break
            correct_segments = len(segments) if any(r.text for r in results) else correct_segments
    if not correct_segments:
        return None, problem or "prints nothing"
    digest = hashlib.sha256("\n".join(line for e in docstring_test.examples for line in e.lines).encode()).hexdigest()
    trajectory = Trajectory(
        id=f"doctest-{digest[:16]}",
        task_id=docstring_test.name,
        prompt=prompt,
        segments=tuple(segments[:correct_segments]),
        stop=Stop.FINISHED,
        policy_step=0,
        seed=0,
        wall_s=time.monotonic() - start_s,
    )
    return trajectory, problem


async def _run_example(console: SandboxSession, example: DoctestExample) -> list[LineResult]:
    """Type the lines of an example, until the console has ended."""
    results: list[LineResult] = []
    for line in example.lines:
        if not console.ended:
            results.append(await console.push(line))
    return results


def _find_mismatch(example: DoctestExample, results: Sequence[LineResult]) -> str:
    """Return what went wrong in an example, or ""."""
    # Limits and dead consoles first: their output means nothing.
    for result in results:
        if result.status in _FATAL_STATUSES:
            return _FATAL_STATUSES[result.status]
    status = results[-1].status
    if status is LineStatus.INCOMPLETE or len(results) < len(example.lines):
        return "is not one statement"
    failed = status in (LineStatus.EXCEPTION, LineStatus.SYNTAX_ERROR)
    if failed and example.expected_error is None:
        return "raised what it should not"
    if not failed and example.expected_error is not None:
        return "did not raise what it should"
    return "" if example.matches("".join(r.text for r in results)) else "printed something else"


def _add_segments(
    segments: list[Segment], example: DoctestExample, results: Sequence[LineResult], renderer: Renderer, start: Prompt
) -> None:
    """Append a sampled line and an observation for each line, encoded separately as in a rollout."""
    for line, result in zip(example.lines, results, strict=True):
        before = segments[-1] if segments else start
        assert not isinstance(before, Sampled)
        ids = renderer.encode_as_sampled(line + "\n", before)
        execution = Execution(result.status, result.elapsed_s, ran=(line,))
        written = Line(ids, (_WRITTEN_LOGPROB,) * len(ids), line + "\n", LineEnd.NEWLINE, execution)
        shown = renderer.encode_observation(result.text + choose_prompt(result.incomplete))
        segments += (Sampled((written,)), replace(shown, cut=shown.cut or result.truncated))
