"""`scripts/suite` gives a few failed tests a second chance alone, says so, and passes nothing that fails again."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOY = """
import os
from pathlib import Path

import pytest

@pytest.mark.parametrize("name", ["a b - c", "x[1]", "3", "4"][: int(os.environ["UNLUCKY"])])
def test_chance(name):
    been = Path(__file__).with_name("been " + name)
    if not been.exists():
        been.touch()
        raise AssertionError("for its neighbours' sake")

def test_broken():
    assert "BROKEN" not in os.environ
"""


def suite(folder: Path, **variables: str) -> tuple[int, str]:
    """Exit code and output of the script over the toy's tests, two processes beside each other."""
    (folder / "test_toy.py").write_text(TOY)
    done = subprocess.run(
        [ROOT / "scripts" / "suite", "not heavy", "-c", ROOT / "pyproject.toml", "-n", "2", "--dist", "load", folder],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("unlucky", [1, 3])
def test_a_few_that_pass_alone_pass_and_are_named(tmp_path: Path, unlucky: int) -> None:
    code, said = suite(tmp_path, UNLUCKY=str(unlucky))
    assert code == 0, said
    assert "run once more alone:" in said
    assert "test_toy.py::test_chance[a b - c]" in said.partition("run once more alone:")[2]
    assert said.rstrip().endswith("fix it.")


def test_what_fails_again_fails_the_suite(tmp_path: Path) -> None:
    code, said = suite(tmp_path, UNLUCKY="2", BROKEN="1")
    assert code == 1
    assert "1 failed, 2 passed" in said
    assert "fix it" not in said


def test_more_than_a_few_have_no_second_chance(tmp_path: Path) -> None:
    code, said = suite(tmp_path, UNLUCKY="4")
    assert code == 1
    assert "scripts/suite: 4 tests failed, more than chance explains; none is run again" in said
    assert "alone:" not in said


def test_a_suite_that_passes_says_nothing_of_it(tmp_path: Path) -> None:
    code, said = suite(tmp_path, UNLUCKY="0")
    assert (code, "scripts/suite" in said) == (0, False)


def test_a_suite_without_tests_is_no_success(tmp_path: Path) -> None:
    command = [str(ROOT / "scripts" / "suite"), "soak", "-c", str(ROOT / "pyproject.toml"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 5
