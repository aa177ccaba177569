"""`scripts/setup` refuses in one line, with the cause, where no environment can be made."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def setup(checkout: Path, **variables: str) -> tuple[int, str]:
    """Exit code and message of the set-up in a checkout that has nothing else."""
    (checkout / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup", checkout / "scripts")
    shutil.copy(ROOT / "pyproject.toml", checkout)
    done = subprocess.run(
        ["bash", checkout / "scripts" / "setup", "train"],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not (checkout / ".venv").exists()
    return done.returncode, done.stderr


def test_a_python_that_is_too_old_is_named_with_the_way_out(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    code, said = setup(tmp_path / "ein Ördner", PYTHON=str(old))
    assert code == 2
    assert said == (
        f"scripts/setup: {old} does not run, or is older than Python 3.11; set PYTHON to the path of one that does\n"
    )


def test_a_machine_without_python_is_told_so(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "cat"):
        (tools / name).symlink_to(str(shutil.which(name)))
    code, said = setup(tmp_path / "checkout", PATH=str(tools))
    assert (code, said.count("\n")) == (2, 1)
    assert "there is no python3.11 and no python3 on the PATH; install one" in said


@pytest.mark.parametrize(
    ("changed", "code"), [("", 0), ('[project.entry-points."repl_rl.samplers"]\nmine = "mine:Mine"\n', 2)]
)
def test_an_environment_is_made_again_once_pyproject_changed_whatever_its_time_says(
    tmp_path: Path, changed: str, code: int
) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "scripts/setup"):
        shutil.copy(ROOT / name, tmp_path / name)
    project = tmp_path / "pyproject.toml"
    (tmp_path / ".venv" / ".ready-train").write_text(
        f"{tmp_path}\n{project.read_text()}{(tmp_path / 'scripts' / 'setup').read_text()}"
    )
    project.write_text(project.read_text() + changed)
    os.utime(project, (0, 0))
    variables = {"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "none")}
    command = ["bash", str(tmp_path / "scripts" / "setup"), "train"]
    assert subprocess.run(command, env=variables, capture_output=True, check=False).returncode == code


def test_a_path_with_a_colon_is_refused(tmp_path: Path) -> None:
    code, said = setup(tmp_path / "a:b")
    assert (code, said.count("\n")) == (2, 1)
    assert "has a colon, which separates paths" in said


@pytest.mark.parametrize(
    ("options", "cause"), [("size=64m", "MB free and the environment takes"), ("size=8g,noexec", "is mounted noexec")]
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
def test_a_file_system_that_cannot_hold_or_run_an_environment_is_refused(
    tmp_path: Path, options: str, cause: str
) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", tmp_path], check=True)
    try:
        code, said = setup(tmp_path / "checkout")
        assert (code, said.count("\n")) == (2, 1)
        assert cause in said
    finally:
        subprocess.run(["umount", tmp_path], check=True)
