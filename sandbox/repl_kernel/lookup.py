"""Questions about code that is not run: is it complete, how does a name go on, what is it?"""

import ast
import builtins
import codeop
import inspect
import keyword
import pkgutil
import re
import sys
from collections.abc import Mapping
from contextlib import suppress

_DOTTED = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_AT_END = re.compile(rf"(?:(?P<owner>{_DOTTED})\.)?(?P<prefix>[^\W\d]\w*|)$")
_IMPORT = re.compile(r"\s*(?:import|from)\s+\w*$")
_MISSING = object()


def completeness(code: str) -> dict[str, str]:
    """What the console would say to `code`, typed line by line: run it, ask for more, or refuse it."""
    *lines, last = code.split("\n")
    lines.append(last if last.strip() else "")  # a blank line closes a block, whatever it is indented by
    source, mode = "\n".join(lines), "exec"
    try:
        body = ast.parse(source).body
        if not body:
            return {"status": "complete"}
        first = min(node.lineno for node in (body[-1], *getattr(body[-1], "decorator_list", ())))
        source, mode = "\n".join(lines[first - 1 :]), "single"
    except (SyntaxError, ValueError, OverflowError):  # no Python, or not yet
        pass
    try:
        if codeop.compile_command(source, "<stdin>", mode):
            return {"status": "complete"}
    except (SyntaxError, ValueError, OverflowError):
        return {"status": "invalid"}
    written = next((line for line in reversed(lines) if line.strip()), "")
    indent = written[: len(written) - len(written.lstrip())]
    deeper = written.partition("#")[0].rstrip().endswith(":")
    return {"status": "incomplete", "indent": indent + "    " * deeper}


def resolve(name: str, namespace: Mapping[str, object]) -> object:
    """The object that a dotted name stands for. Raises `LookupError` if there is none."""
    first, *attributes = name.split(".")
    found = namespace.get(first, _MISSING)
    if found is _MISSING:
        found = getattr(builtins, first, _MISSING)
    for attribute in attributes:
        try:
            found = getattr(found, attribute)
        except Exception:
            found = _MISSING
    if found is _MISSING:
        raise LookupError(name)
    return found


def completions(code: str, cursor: int, namespace: Mapping[str, object]) -> tuple[list[str], int]:
    """Names that the one before the cursor may become, and where it starts."""
    before = code[:cursor]
    match = _AT_END.search(before)
    assert match is not None  # the pattern matches nothing at all, too
    owner, prefix = match["owner"], match["prefix"]
    if owner is None and before[: match.start()].endswith("."):  # an attribute of something that is no name
        return [], cursor
    if owner is not None:
        names = _attributes(owner, namespace)
    elif _IMPORT.match(before.rpartition("\n")[2]):
        names = {module.name for module in pkgutil.iter_modules()} | set(sys.builtin_module_names)
    else:
        names = {*namespace, *dir(builtins), *keyword.kwlist}
    hidden = not prefix.startswith("_")
    found = {name for name in names if name.startswith(prefix) and not (hidden and name.startswith("_"))}
    return sorted(found), cursor - len(prefix)


def _attributes(owner: str, namespace: Mapping[str, object]) -> set[str]:
    try:
        return {name for name in dir(resolve(owner, namespace)) if isinstance(name, str)}
    except Exception:  # a program's own `__dir__`
        return set()


def description(code: str, cursor: int, detail: int, namespace: Mapping[str, object]) -> str | None:
    """What the name at the cursor is; `detail` 1: with its source. None if it is no known name."""
    for name in _names_at(code, cursor):
        try:
            return _describe(name, resolve(name, namespace), detail)
        except LookupError:
            continue
    return None


def _names_at(code: str, cursor: int) -> list[str]:
    """The dotted name that the cursor touches, then the one whose call it stands in."""
    names = []
    for match in re.finditer(_DOTTED, code):
        if match.start() <= cursor <= match.end():
            rest = code[cursor : match.end()].partition(".")[0]
            names.append(code[match.start() : cursor] + rest)
    depth = 0
    for position in range(min(cursor, len(code)) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(code[position], 0)
        if depth < 0:
            call = re.search(rf"{_DOTTED}$", code[:position])
            return [*names, call[0]] if call else names
    return names


def _describe(name: str, value: object, detail: int) -> str:
    parts = {"Signature": "", "Type": type(value).__name__, "Docstring": inspect.getdoc(value) or "<no docstring>"}
    if callable(value):
        try:
            parts["Signature"] = f"{name}{inspect.signature(value)}"
        except (ValueError, TypeError):  # built in, without one
            parts["Signature"] = ""
    elif not inspect.ismodule(value):
        parts["Value"] = _short(value)
    if detail > 0:
        parts["Source"] = "<not available>"
        if callable(value) or inspect.ismodule(value):
            with suppress(OSError, TypeError):  # typed into the console, or no Python
                parts["Source"] = inspect.getsource(value)
    return "\n".join(f"{title}:{chr(10) if chr(10) in text else ' '}{text}" for title, text in parts.items() if text)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
