"""Links of a built site: those that lead nowhere, and those that lead out of it.

python -m scripts.site.links site
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass(slots=True)
class Read:
    """What a page links to, and what can be linked to in it."""

    links: list[str] = field(default_factory=list)
    """As they are written: of anchors, pictures, scripts, styles and frames."""
    anchors: set[str] = field(default_factory=set)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.read = Read()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.read.links.append(value)
            elif value and (name == "id" or (tag == "a" and name == "name")):
                self.read.anchors.add(value)


def pages(site: Path) -> dict[Path, Read]:
    """Every page of a site, but the one that a server shows in the place of a missing one."""
    found = {}
    for path in sorted(site.rglob("*.html")):
        if path != site / "404.html":
            reader = _Reader()
            reader.feed(path.read_text(encoding="utf-8"))
            found[path] = reader.read
    return found


def external(pages: Mapping[Path, Read]) -> list[str]:
    """Every address outside the site, once each. None of them is asked for."""
    return sorted({link for page in pages.values() for link in page.links if _leaves(link)})


def dead(pages: Mapping[Path, Read]) -> list[str]:
    """Every link to a file or an anchor that is not there, with the page that has it."""
    return [f"{path}: {link}" for path, page in pages.items() for link in page.links if _is_dead(path, link, pages)]


def _leaves(link: str) -> bool:
    parts = urlsplit(link)
    return bool(parts.scheme or parts.netloc) and parts.scheme not in ("data", "javascript")


def _is_dead(page: Path, link: str, pages: Mapping[Path, Read]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return False
    # The path of a page's own anchor is empty.
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if target.is_dir():
        target /= "index.html"
    if target not in pages:
        return not target.is_file()
    return bool(parts.fragment) and unquote(parts.fragment) not in pages[target].anchors


def report(site: Path) -> Iterator[str]:
    """What is to be said of a site, line by line; a dead link begins with its word."""
    found = pages(site.resolve())
    yield f"{len(found)} pages; addresses outside, which nothing has asked for:"
    yield from (f"  {address}" for address in external(found))
    yield from (f"dead: {link}" for link in dead(found))


if __name__ == "__main__":
    said = list(report(Path(sys.argv[1])))
    print("\n".join(said))
    sys.exit(any(line.startswith("dead: ") for line in said))
