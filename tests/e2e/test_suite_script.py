"""`scripts/suite` runs quarantined tests last and alone, and no other test twice, except a few with `--retry`."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOY = """
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent

def record(name):
    with HERE.joinpath("order").open("a") as order:
        print(name, file=order)

@pytest.mark.parametrize("name", ["a b - c", "x[1]", "3", "4"][: int(os.environ["UNLUCKY"])])
def test_chance(name):
    record("chance")
    been = HERE / ("been " + name)
    if not been.exists():
        been.touch()
        raise AssertionError("for its neighbours' sake")

@pytest.mark.parametrize("number", [0, 1])
def test_known(number):
    record("known")
    assert "KNOWN" not in os.environ, "known"

def test_broken():
    record("broken")
    assert "BROKEN" not in os.environ
"""
FLAKY = '[[flaky]]\ntest = "test_toy.py::test_known"\nreason = "a wall-clock promise"\nsince = 2026-11-30\n'


def suite(folder: Path, *options: str, processes: int = 0, **variables: str) -> tuple[int, str]:
    """Return exit code and output of the script over the toy's tests."""
    (folder / "test_toy.py").write_text(TOY)
    (folder / "flaky.toml").write_text(FLAKY)
    names: list[str | Path] = [
        "-c",
        ROOT / "pyproject.toml",
        "--rootdir",
        folder,
        "--quarantine-file",
        folder / "flaky.toml",
    ]
    done = subprocess.run(
        [ROOT / "scripts" / "suite", *options, "not heavy", *names, "-n", str(processes), "--dist", "load", folder],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def order(folder: Path) -> list[str]:
    """Return what ran, one test after the other."""
    return (folder / "order").read_text().split()


def test_quarantined_tests_run_once_after_the_others_with_nothing_beside_them(tmp_path: Path) -> None:
    code, said = suite(tmp_path, processes=2, UNLUCKY="0")
    assert (code, "scripts/suite" in said) == (0, False)
    assert order(tmp_path) == ["broken", "known", "known"]


def test_a_quarantined_test_that_fails_fails_the_suite_and_is_not_run_again(tmp_path: Path) -> None:
    code, said = suite(tmp_path, "--retry", UNLUCKY="0", KNOWN="1")
    assert code == 1
    assert "2 failed, 2 deselected" in said
    assert order(tmp_path) == ["broken", "known", "known"]


def test_a_test_that_fails_is_not_run_again(tmp_path: Path) -> None:
    code, said = suite(tmp_path, UNLUCKY="1")
    assert (code, "alone" in said) == (1, False)
    assert order(tmp_path).count("chance") == 1


@pytest.mark.parametrize("unlucky", [1, 3])
def test_with_retry_a_few_that_pass_alone_pass_and_are_named(tmp_path: Path, unlucky: int) -> None:
    code, said = suite(tmp_path, "--retry", processes=2, UNLUCKY=str(unlucky))
    assert code == 0, said
    assert "run once more alone:" in said
    assert "test_toy.py::test_chance[a b - c]" in said.partition("run once more alone:")[2]
    assert "fix it, or add it to tests/flaky.toml" in said
    assert order(tmp_path).count("chance") == 2 * unlucky


def test_with_retry_what_fails_again_fails_the_suite(tmp_path: Path) -> None:
    code, said = suite(tmp_path, "--retry", UNLUCKY="2", BROKEN="1")
    assert code == 1
    assert "1 failed, 2 passed" in said
    assert "fix it" not in said


def test_with_retry_more_than_a_few_have_no_second_chance(tmp_path: Path) -> None:
    code, said = suite(tmp_path, "--retry", UNLUCKY="4")
    assert code == 1
    assert "scripts/suite: 4 tests failed, more than chance explains; none is run again" in said
    assert "alone:" not in said


def test_a_suite_without_tests_is_no_success(tmp_path: Path) -> None:
    command = [str(ROOT / "scripts" / "suite"), "soak", "-c", str(ROOT / "pyproject.toml"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 5
