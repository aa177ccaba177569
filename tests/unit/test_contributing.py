"""The first task of CONTRIBUTING.md works as it is written."""

import re
from pathlib import Path
from types import ModuleType

from tests.support.played_lines import play

ROOT = Path(__file__).parents[2]
STEPS = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## First task")[1].split("\n## ")[0]


def quoted(start: str) -> str:
    """The code of the recipe that starts so."""
    (found,) = [code for code in re.findall(r"`([^`]+)`", STEPS) if code.startswith(start)]
    return str(found)


def test_the_first_task_gives_the_metric_that_it_describes() -> None:
    source = (ROOT / quoted("repl_rl/trajectory/")).read_text(encoding="utf-8")
    assert source.count("\n_TRY = ") == 1
    source = source.replace("\n_TRY = ", f"\n{quoted('_IMPORT = ')}\n_TRY = ")
    # The metric is one more entry of what `compute_trajectory_metrics` returns.
    function = source.index("def compute_trajectory_metrics")
    start = source.index("return {\n", function) + len("return {\n")
    source = f"{source[:start]}{quoted(chr(34) + 'import_rate')},\n{source[start:]}"
    module = ModuleType("changed_metrics")
    exec(compile(source, "changed_metrics", "exec"), vars(module))
    lines = ["import math\n", "important = 1\n", "from math import pi\n", "submit_final_answer(1)\n"]
    assert module.compute_trajectory_metrics(play(lines))["import_rate"] == 0.5


def test_the_files_that_the_first_task_names_are_there() -> None:
    named = list(re.findall(r"`([\w./]+\.(?:py|md))`", STEPS))
    assert len(named) >= 4
    assert [name for name in named if not (ROOT / name).is_file()] == []
