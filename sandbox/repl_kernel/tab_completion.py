"""Queries about code that is not run: its completeness, the names that complete it, and the object of a name."""

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


def check_completeness(code: str) -> dict[str, str]:
    """Return the response of the console to `code`, typed line by line: run it, ask for more, or refuse it."""
    *lines, last = code.split("\n")
    # A blank line closes a block, even if it is indented.
    lines.append(last if last.strip() else "")
    source, mode = "\n".join(lines), "exec"
    try:
        body = ast.parse(source).body
        if not body:
            return {"status": "complete"}
        # Only the last statement can be incomplete; check it as the console does.
        first_line = min(node.lineno for node in (body[-1], *getattr(body[-1], "decorator_list", ())))
        source, mode = "\n".join(lines[first_line - 1 :]), "single"
    except (SyntaxError, ValueError, OverflowError):
        # The code is not valid Python, or incomplete.
        pass
    try:
        if codeop.compile_command(source, "<stdin>", mode):
            return {"status": "complete"}
    except (SyntaxError, ValueError, OverflowError):
        return {"status": "invalid"}
    last_line = next((line for line in reversed(lines) if line.strip()), "")
    indent = last_line[: len(last_line) - len(last_line.lstrip())]
    deeper = last_line.partition("#")[0].rstrip().endswith(":")
    return {"status": "incomplete", "indent": indent + "    " * deeper}


def resolve_name(name: str, namespace: Mapping[str, object]) -> object:
    """Return the object of a dotted name. Raise `LookupError` if it does not exist."""
    root, *attributes = name.split(".")
    value = namespace.get(root, _MISSING)
    if value is _MISSING:
        value = getattr(builtins, root, _MISSING)
    for attribute in attributes:
        try:
            value = getattr(value, attribute)
        except Exception:
            value = _MISSING
    if value is _MISSING:
        raise LookupError(name)
    return value


def find_completions(code: str, cursor: int, namespace: Mapping[str, object]) -> tuple[list[str], int]:
    """Return the names that complete the one before the cursor, and the position where it starts."""
    preceding = code[:cursor]
    match = _AT_END.search(preceding)
    # The pattern also matches an empty string.
    assert match is not None
    owner, prefix = match["owner"], match["prefix"]
    if owner is None and preceding[: match.start()].endswith("."):
        # This is an attribute of an expression that is no name.
        return [], cursor
    if owner is not None:
        names = _list_attributes(owner, namespace)
    elif _IMPORT.match(preceding.rpartition("\n")[2]):
        names = {module.name for module in pkgutil.iter_modules()} | set(sys.builtin_module_names)
    else:
        names = {*namespace, *dir(builtins), *keyword.kwlist}
    hidden = not prefix.startswith("_")
    matching = {name for name in names if name.startswith(prefix) and not (hidden and name.startswith("_"))}
    return sorted(matching), cursor - len(prefix)


def _list_attributes(owner: str, namespace: Mapping[str, object]) -> set[str]:
    try:
        return {name for name in dir(resolve_name(owner, namespace)) if isinstance(name, str)}
    except Exception:
        # The program's own `__dir__` raised an exception.
        return set()


def describe_name(code: str, cursor: int, detail: int, namespace: Mapping[str, object]) -> str | None:
    """Return a description of the name at the cursor, or None if it is unknown. `detail` 1 includes its source."""
    for name in _find_names_at(code, cursor):
        try:
            return _format_description(name, resolve_name(name, namespace), detail)
        except LookupError:
            continue
    return None


def _find_names_at(code: str, cursor: int) -> list[str]:
    """Return the dotted name that the cursor touches, then the name of the call that contains the cursor."""
    names = []
    for match in re.finditer(_DOTTED, code):
        if match.start() <= cursor <= match.end():
            rest = code[cursor : match.end()].partition(".")[0]
            names.append(code[match.start() : cursor] + rest)
    # Search backwards for an open parenthesis and the name before it.
    depth = 0
    for position in range(min(cursor, len(code)) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(code[position], 0)
        if depth < 0:
            call = re.search(rf"{_DOTTED}$", code[:position])
            return [*names, call[0]] if call else names
    return names


def _format_description(name: str, value: object, detail: int) -> str:
    parts = {"Signature": "", "Type": type(value).__name__, "Docstring": inspect.getdoc(value) or "<no docstring>"}
    if callable(value):
        try:
            parts["Signature"] = f"{name}{inspect.signature(value)}"
        except (ValueError, TypeError):
            # A builtin without a signature.
            parts["Signature"] = ""
    elif not inspect.ismodule(value):
        parts["Value"] = _shorten(value)
    if detail > 0:
        parts["Source"] = "<not available>"
        if callable(value) or inspect.ismodule(value):
            with suppress(OSError, TypeError):
                # It was typed into the console, or is not written in Python.
                parts["Source"] = inspect.getsource(value)
    return "\n".join(f"{title}:{chr(10) if chr(10) in text else ' '}{text}" for title, text in parts.items() if text)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
