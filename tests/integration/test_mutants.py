"""Tests can fail: each promise of tests/mutants is taken out of a copy of the code, and its tests notice."""

import ast
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import ROOT, Mutant, mutants

ALL = list(mutants())
FOLDERS = ("repl_rl", "sandbox", "prompts", "tests", "docs", "examples", "scripts", "benchmarks")


def functions(file: str) -> set[str]:
    """Names of the test functions of a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_code_that_is_there_and_names_tests_that_are_there(mutant: Mutant) -> None:
    for edit in mutant.edits:
        assert (ROOT / edit.file).read_text(encoding="utf-8").count(edit.old) == 1, edit
        assert edit.new != edit.old
        assert edit.file.startswith(("repl_rl/", "sandbox/")), "tests are not what is broken"
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in functions(file), test


def test_mutants_have_names_of_their_own() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in ALL).items() if count > 1] == []


@pytest.mark.soak
@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_the_tests_of_a_mutant_fail(mutant: Mutant, tmp_path: Path) -> None:
    """They fail by what they assert: they are collected and run, and each named function has a failure."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    for edit in mutant.edits:
        edit.apply(tmp_path)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-rf", "--tb=no", "--timeout=120", *mutant.tests],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    failed = [line.split()[1] for line in run.stdout.splitlines() if line.startswith("FAILED ")]
    for test in mutant.tests:
        assert any(name.startswith(test) for name in failed), run.stdout
