"""Any Python from 3.11 on: `scripts/python` runs the suites of `tests/python.txt` on another one."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_source_compiles_without_a_warning_of_this_python() -> None:
    paths = [path for folder in ("repl_rl", "sandbox", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in paths:
            compile(path.read_bytes(), path, "exec", dont_inherit=True)
    assert len(paths) > 500


def test_the_package_imports_without_torch_and_without_a_warning() -> None:
    code = "import sys; sys.modules['torch'] = None; import repl_rl, repl_rl.sandbox; print(repl_rl.__version__)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_listed_suite_is_there() -> None:
    listed = (ROOT / "tests" / "python.txt").read_text().split()
    assert [name for name in listed if not (ROOT / name).exists()] == []
    assert len(set(listed)) == len(listed)


def _python(checkout: Path, *words: str, **variables: str) -> tuple[int, str]:
    """Exit code and message of the script in a checkout that has nothing else."""
    (checkout / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "python", checkout / "scripts")
    environment = {"PATH": os.environ["PATH"], **variables}
    command: list[str | Path] = ["bash", checkout / "scripts" / "python", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_a_python_that_cannot_be_had_is_named_with_the_way_out(tmp_path: Path) -> None:
    assert _python(tmp_path / "new", "3.99") == (
        2,
        "scripts/python: there is no python3.99 on the PATH and no release of Debian that has it; "
        "install a python3.99\n",
    )
    for number, words in enumerate([(), ("3",), ("thirteen",)]):
        code, said = _python(tmp_path / str(number), *words)
        assert (code, said) == (2, "usage: scripts/python 3.N [PYTEST ARGUMENT ...]\n")


def test_what_debootstrap_cannot_take_is_refused_before_it_starts(tmp_path: Path) -> None:
    code, said = _python(tmp_path / "with space", "3.14", DEBIAN="1")
    assert (code, said.count("\n")) == (2, 1)
    assert "no space in the path" in said or "run this as root on Debian" in said
