"""The README, the pages of docs/ and benchmarks/results/, and their code blocks."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
    )
}
"""Their texts by their paths in the repository."""


_BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md")
SITE = PAGES | {name: (ROOT / name).read_text() for name in _BESIDE}
"""All texts that are pages of the site, by their paths in the repository."""
_FENCED = re.compile(r"(?ms)^(?P<fence>`{3,})(?P<language>\w*)[^\n`]*\n(?P<source>.*?)^(?P=fence)$")


def fenced(text: str) -> list[tuple[str, str]]:
    """Language and source of each block; those that stand inside another one are part of that."""
    return [(block["language"], block["source"]) for block in _FENCED.finditer(text)]


def blocks(language: str, *pages: str) -> list[str]:
    """The sources of all blocks of a language, page after page."""
    return [block for page in pages for block in re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)]


def commands() -> list[str]:
    """Every `repl-rl` command of every page, in blocks and in sentences, once each."""
    lines = "".join(blocks("sh", *PAGES)).replace("\\\n", " ").splitlines()
    quoted = [command for page in PAGES.values() for command in re.findall(r"`(repl-rl [a-z]+ [^`]*--[^`]+)`", page)]
    written = (" ".join(line.partition("  #")[0].split()) for line in lines + quoted if line.startswith("repl-rl"))
    return [line for line in dict.fromkeys(written) if "--help" not in line]
