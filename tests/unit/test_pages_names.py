"""Pages and examples use members that exist, by their present names."""

import ast
import re
from types import FunctionType

import pytest

from repl_rl import RolloutConfig, Rollouts, Trajectory
from repl_rl.rollout.episode import Episode
from tests.support.documents import PAGES, ROOT

TYPES = {"episode": Episode, "rollouts": Rollouts, "trajectory": Trajectory, "world": RolloutConfig}
"""Name of a variable in pages -> its type."""


@pytest.mark.parametrize("page", sorted(PAGES))
def test_a_page_names_members_that_exist_under_their_present_names(page: str) -> None:
    used = re.findall(r"(?<![\w./])(episode|rollouts|trajectory|world)\.(?!json|md|py)([a-z]\w*)", PAGES[page])
    wrong = [f"{name}.{member}" for name, member in used if not hasattr(TYPES[name], member)]
    fields = {f"{name}.{field}" for name, kind in TYPES.items() for field in getattr(kind, "__annotations__", {})}
    assert [each for each in wrong if each not in fields] == []


def test_the_list_of_an_episodes_methods_names_members_that_exist() -> None:
    section = PAGES["docs/samplers/README.md"].partition("## Episode methods\n")[2].partition("\n## ")[0]
    listed = re.findall(r"(?m)^- `(?:await |async for line in )?(\w+)\(", section)
    assert len(listed) >= 10
    # An old name is no function of the class: it warns.
    methods = {
        name for kind in Episode.__mro__ for name, member in vars(kind).items() if isinstance(member, FunctionType)
    }
    assert [name for name in listed if name not in methods] == []


def defined_names(file: str) -> set[str]:
    """Functions of a file of the package, and methods as `Class.method`."""
    found = set[str]()
    for node in ast.parse((ROOT / "repl_rl" / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {f"{node.name}.{each.name}" for each in methods}
    return found


def test_the_walks_of_the_design_page_name_functions_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`,\s+`([\w.]+)`", PAGES["docs/design.md"])
    assert len(named) > 25
    assert [(file, name) for file, name in named if name not in defined_names(file)] == []


def test_the_page_of_the_debugger_stops_at_the_marked_line() -> None:
    lines = (ROOT / "examples" / "debug_one_rollout.py").read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith("# BREAKPOINT")]
    assert f"(Pdb) break {number}\n" in PAGES["docs/debugging.md"]
