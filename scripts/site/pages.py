"""Which file of the repository is which page of the site, and links between files made links between pages."""

import posixpath
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
_RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
WRITTEN = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "examples.md": "examples/README.md",
    **{f"benchmarks/results/{path.name}": f"benchmarks/results/{path.name}" for path in _RESULTS},
}
"""Pages whose text stands outside docs/, with the path of that text in the repository."""
NOTEBOOKS = "notebooks"
_SOURCE = "source/"
_LINK = re.compile(r"(?<=\]\()(?P<path>[^()\s#]+)(?P<anchor>#[^()\s]*)?(?=\))")


def origin(page: str) -> str:
    """The path in the repository of what a page shows; for one that is made of code it is a path that is not there."""
    if page in WRITTEN:
        return WRITTEN[page]
    if page == f"{NOTEBOOKS}/index.md":
        return NOTEBOOKS
    if page.startswith(f"{NOTEBOOKS}/"):
        return page.removesuffix(".md") + ".ipynb"
    if page.startswith(_SOURCE):
        return page.removeprefix(_SOURCE).removesuffix(".md")
    return f"docs/{page}"


def linked(text: str, file: str) -> set[str]:
    """What a text links to in the repository: paths of files and folders.

    Args:
        text: Markdown.
        file: its path in the repository.
    """
    found = {_target(file, link["path"]) for link in _LINK.finditer(text)}
    return {path for path in found if (ROOT / path).exists()}


def rewritten(text: str, page: str, pages: Iterable[str]) -> str:
    """A text whose links lead to pages, where they led to files of the repository that have one.

    Args:
        text: Markdown, as it stands in the repository.
        page: the page that shows it.
        pages: all pages, and all files beside them.
    """
    homes = {origin(each): each for each in pages}

    def moved(link: re.Match[str]) -> str:
        home = homes.get(_target(origin(page), link["path"]))
        if home is None:
            return link[0]
        return posixpath.relpath(home, posixpath.dirname(page) or ".") + (link["anchor"] or "")

    return _LINK.sub(moved, text)


def _target(file: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(file), path))


def sources(texts: Mapping[str, str]) -> dict[str, str]:
    """Pages that show source files: those that texts link to and that are no page otherwise.

    Args:
        texts: Markdown by its path in the repository.
    """
    files = set().union(*(linked(text, file) for file, text in texts.items()))
    return {f"{_SOURCE}{file}.md": _source(file) for file in sorted(files) if file.endswith(".py")}


def _source(file: str) -> str:
    text = (ROOT / file).read_text(encoding="utf-8")
    return f'# {file}\n\n````python linenums="1"\n{text}````\n'


def notebooks() -> dict[str, str]:
    """A page of each notebook, and one that lists them. No outputs: the repository keeps none."""
    exporter, pages, rows = MarkdownExporter(), {}, []
    for path in sorted((ROOT / NOTEBOOKS).glob("*.ipynb")):
        head, _, rest = exporter.from_filename(str(path))[0].strip().partition("\n")
        told = f"*This is `{NOTEBOOKS}/{path.name}`: open it in Jupyter to see what its cells show.*"
        pages[f"{NOTEBOOKS}/{path.stem}.md"] = f"{head}\n\n{told}\n{rest}\n"
        rows.append(f"- [{head.removeprefix('# ')}]({path.stem}.md)")
    needed = "They need the extra `notebooks`. The tests run each of them from clean."
    return {f"{NOTEBOOKS}/index.md": "\n".join(["# Notebooks", "", needed, "", *rows, ""]), **pages}
