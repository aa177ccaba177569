"""docs/rollouts.md shows the published figures and no others."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rollouts.md").read_text()
SCRIPT = ROOT / "benchmarks" / "rollouts.py"


def names() -> dict[str, object]:
    namespace: dict[str, object] = {"__file__": str(SCRIPT), "__name__": "rollouts"}
    exec(SCRIPT.read_text(), namespace)
    return namespace


def test_the_figures_of_the_page_are_those_of_the_published_run() -> None:
    block = names()["block"]
    assert callable(block)
    assert block(json.loads((ROOT / "docs" / "rollouts.json").read_text())) in PAGE


def test_every_number_with_a_unit_stands_in_the_generated_block() -> None:
    marks = names()
    head, _, rest = PAGE.partition(str(marks["BEGIN"]))
    _, _, tail = rest.partition(str(marks["END"]))
    assert not re.search(r"\d+(\.\d+)?(x|%| ?ms| ?KiB)\b", head + tail)
