"""docs/specification.md: every promise has a number of its own, and names tests that are there."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "specification.md").read_text()
NAMED = re.compile(r"`(?:(?P<file>[\w./]*\btest_\w+\.py)(?:::(?P<test>\w+))?|::(?P<more>\w+)|(?P<alone>test_\w+))`")
ENTRIES = re.split(r"\n(?! )", PAGE)
"""Rows of tables, and items of lists with the lines that continue them."""
SOURCES = {path: path.read_text() for path in TESTS.rglob("test_*.py")}


def missing(entry: str) -> list[str]:
    """Return names in an entry that nothing below tests/ has. `::name` is in the file that was named before it."""
    found, file = [], ""
    for named in NAMED.finditer(entry):
        file = (named["file"] or file).removeprefix("../")
        here = [text for path, text in SOURCES.items() if named["alone"] or path.as_posix().endswith(f"/{file}")]
        test = named["test"] or named["more"] or named["alone"]
        if not here or (test and not any(f"def {test}(" in text for text in here)):
            found.append(named[0])
    return found


def test_every_test_that_the_specification_names_exists() -> None:
    assert [(entry[:60], names) for entry in ENTRIES if (names := missing(entry))] == []


def test_a_name_that_is_not_there_is_found() -> None:
    assert missing("| K1 | x | `test_specification.py::test_gone`, `test_gone.py` |") != []
    assert missing("| K1 | x | `test_specification.py`, `::gone`, `../test_gone.py` |") == [
        "`::gone`",
        "`../test_gone.py`",
    ]


def test_no_two_rows_have_one_number() -> None:
    numbers = re.findall(r"^(?:- \*\*|\| )([A-Z]\d+)(?:\*\*| \|)", PAGE, re.MULTILINE)
    assert len(numbers) > 250
    assert sorted(numbers) == sorted(set(numbers))
