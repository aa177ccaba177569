"""Mutants: edits that take one promise out of the code, and the tests that must fail then.

Each table of a file `*.toml` here is a mutant:

    [[mutant]]
    name = "F8"                              # what it is called in reports
    promise = "serve: min_tokens: 0 asks for nothing"
    file = "repl_rl/serve/request.py"        # relative to the repository
    old = "..."                              # text that occurs once in the file
    new = "..."                              # what replaces it
    tests = ["tests/integration/serve/test_refusals.py::test_..."]

Several edits of one mutant are tables `[[mutant.edit]]` with `file`, `old` and `new`.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Edit:
    """Replacement of a text that occurs once in a file of the repository."""

    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Change the file below `root`."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{self.file} has {text.count(self.old)} times: {self.old}"
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Mutant:
    """Promise, the edits that break it, and node ids of tests that must fail then."""

    name: str
    promise: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


def mutants() -> Iterator[Mutant]:
    """All mutants, file by file."""
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        for table in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
            edits = table.get("edit", [table])
            yield Mutant(
                table["name"],
                table["promise"],
                tuple(Edit(edit["file"], edit["old"], edit["new"]) for edit in edits),
                tuple(table["tests"]),
            )
