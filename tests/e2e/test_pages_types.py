"""The Python of README, pages and notebooks as a user's own files: the public face suffices, and it is typed."""

import ast
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from tests.support.documents import PAGES, ROOT

_BLOCK = re.compile(r"^(`{3,4})python\n(.*?)^\1$", re.DOTALL | re.MULTILINE)
_FENCED = re.compile(r"^````.*?^````$", re.DOTALL | re.MULTILINE)
"""A transcript: the Python between its inner fences is what a policy wrote."""


def notebook(path: Path) -> str:
    """Its code as one coroutine, since cells may await."""
    cells = [cell["source"] for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n\n".join("".join(source) for source in cells)
    return f"async def notebook() -> None:\n{textwrap.indent(code, '    ')}\n"


def sources() -> dict[str, str]:
    """Every page and notebook that has Python, and all of it as one file."""
    blocks = {name: [code for _, code in _BLOCK.findall(_FENCED.sub("", text))] for name, text in PAGES.items()}
    pages = {name: "\n\n".join(code) for name, code in blocks.items() if code}
    return pages | {f"notebooks/{path.name}": notebook(path) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}


SOURCES = sources()


@pytest.mark.parametrize("name", SOURCES)
def test_a_page_imports_from_the_public_face_alone(name: str) -> None:
    deep: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(SOURCES[name])):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("repl_rl."):
            deep |= {(str(node.module), alias.name) for alias in node.names}
        if isinstance(node, ast.Import):
            deep |= {(alias.name, "") for alias in node.names if alias.name.startswith("repl_rl.")}
    assert deep == set()


def settings() -> str:
    """A user's settings of mypy: strict, and the package as an installed one, whose own errors are not theirs.

    Packages that the project does not follow are not followed here, which would take minutes.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    overrides = [each for each in project["overrides"] if each.get("follow_imports") == "skip"]
    skipped = [module for each in overrides for module in each["module"]]
    parts = {
        "mypy": f"strict = True\nmypy_path = {ROOT}\n",
        "mypy-repl_rl.*": "follow_imports = silent\n",
        ",".join(f"mypy-{module}" if not number else module for number, module in enumerate(skipped)): (
            "follow_imports = skip\nignore_missing_imports = True\n"
        ),
    }
    return "\n".join(f"[{section}]\n{lines}" for section, lines in parts.items())


@pytest.mark.heavy
def test_the_python_of_every_page_and_notebook_passes_strict_mypy_as_a_users_file(tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text(settings())
    files = [tmp_path / f"{re.sub(r'[^a-z0-9]+', '_', name.lower())}.py" for name in SOURCES]
    for file, source in zip(files, SOURCES.values(), strict=True):
        file.write_text(source)
    cache = ROOT / ".mypy_cache" / "pages"
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(cache), "--config-file", "mypy.ini"]
    done = subprocess.run([*command, *(file.name for file in files)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
