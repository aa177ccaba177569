"""Settings: every field is documented, and something reads it."""

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest

from repl_rl.cli.eval import EvalConfig
from repl_rl.cli.rollout import RolloutConfig
from repl_rl.cli.train import TrainConfig
from repl_rl.settings.flags import mirrored, names, seam_of

ROOT = Path(__file__).parent.parent / "repl_rl"
OUTSIDE = "\n".join(path.read_text() for path in ROOT.rglob("*.py"))
INSIDE = "\n".join(path.read_text() for path in (ROOT.parent / "sandbox").rglob("*.py"))


def settings(kind: type) -> set[tuple[type, str]]:
    """(class, field) of a configuration and of the ones inside it."""
    found: set[tuple[type, str]] = set()
    for field in fields(kind):
        hint = get_type_hints(kind, include_extras=True)[field.name]
        seam = seam_of(hint)
        if seam is not None:
            for options in seam.tables().values():
                found |= settings(options)
        if isinstance(hint, type) and is_dataclass(hint):
            found |= settings(hint)
        else:
            owner = next(c for c in reversed(kind.__mro__) if field.name in inspect.get_annotations(c))
            found.add((owner, field.name))
    return found


def test_settings_stay_few() -> None:
    flags = list(names(mirrored(TrainConfig)))
    assert len([name for name in flags if "." not in name]) <= 40
    assert len([name for name in flags if "." in name]) <= 60


ALL = sorted(
    {pair for kind in (TrainConfig, EvalConfig, RolloutConfig) for pair in settings(kind)},
    key=lambda pair: (pair[0].__name__, pair[1]),
)


@cache
def bodies(module: str) -> Mapping[str, list[ast.stmt]]:
    """What stands in each class of a module, by its name."""
    nodes = ast.walk(ast.parse(inspect.getsource(sys.modules[module])))
    return {node.name: node.body for node in nodes if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize(("owner", "name"), ALL)
def test_every_setting_is_documented(owner: type, name: str) -> None:
    statements = bodies(owner.__module__)[owner.__name__]
    for statement, following in itertools.pairwise(statements):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if statement.target.id != name:
                continue
            assert isinstance(following, ast.Expr), f"{owner.__name__}.{name} has no docstring"
            assert isinstance(following.value, ast.Constant)
            return
    raise AssertionError(f"{owner.__name__}.{name} is the last statement: it has no docstring")


@pytest.mark.parametrize(("owner", "name"), ALL)
def test_every_setting_is_read_by_something(owner: type, name: str) -> None:
    if owner.__name__ == "RewardTable":
        return  # read as a table, by the name of a status: tests/test_rewards.py
    # What a console may use is sent whole to the package inside the sandbox, and read there by name.
    read = re.search(rf"\.{name}\b(?!\s*=[^=])", OUTSIDE) or re.search(rf"\b{name}\b", INSIDE)
    assert read, f"nothing reads {owner.__name__}.{name}"
