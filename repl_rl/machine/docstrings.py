"""The console sessions that stand in Python files. Nothing of theirs is imported."""

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """(file and line, text) of every text with a prompt in a Python file; nothing where it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of an escape that is none: the file is not ours
            tree = ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ">>> " in node.value:
            yield f"{path.name}:{node.lineno}", node.value
