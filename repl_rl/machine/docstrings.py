"""Console sessions in the docstrings of Python files. The files are parsed and never imported."""

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (file and line, text) for each string with a prompt in a Python file.

    A file that cannot be parsed yields nothing.
    """
    try:
        with warnings.catch_warnings():
            # The file is not ours, so warnings such as one about an invalid escape are ignored.
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ">>> " in node.value:
            yield f"{path.name}:{node.lineno}", node.value
