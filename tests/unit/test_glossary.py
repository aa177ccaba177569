"""docs/glossary.md: every place that it names exists, and every renamed public name is in it."""

import re

from repl_rl.deprecations.old_names import OLD_EXPORTS
from tests.support.documents import PAGES, ROOT

PAGE = PAGES["docs/glossary.md"]
_PLACE = re.compile(r"\| `(?P<file>[\w/]+\.py)`(?:: `(?P<name>[\w.]+)`)? \|")


def test_every_term_is_where_the_glossary_says() -> None:
    places = list(_PLACE.finditer(PAGE))
    assert len(places) > 60
    for place in places:
        text = (ROOT / "repl_rl" / place["file"]).read_text()
        for part in (place["name"] or "").split("."):
            assert re.search(rf"\b{part}\b", text), place[0]


def test_every_renamed_public_name_is_in_the_glossary() -> None:
    for old, new in OLD_EXPORTS.items():
        assert f"| `{old}` | `{new}` |" in PAGE
