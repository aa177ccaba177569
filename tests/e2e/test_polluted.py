"""The suite depends on nobody's machine: variables, home, locale, width, files of the working folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from repl_rl.cli import main

ROOT = Path(__file__).parents[2]
DECOYS = ("gmpy2", "json", "logging", "repl_rl_decoy", "tree", "wandb")
"""Modules of the working folder that libraries would take for theirs."""

FILES = (
    "test_settings.py", "test_onward.py", "test_runs_listed.py", "test_runs_compared.py", "test_tasks.py",
    "sandbox/test_jupyter_install.py",
)  # fmt: skip
"""Tests of what reads variables, widths, homes, kernels and data sets."""


@pytest.mark.heavy
def test_what_reads_the_machine_passes_in_a_polluted_environment(tmp_path: Path) -> None:
    desk, home = tmp_path / "a desk", tmp_path / "home"
    for folder in (desk, home / ".jupyter", home / ".config" / "matplotlib", tmp_path / "t m p"):
        folder.mkdir(parents=True)
    for name in DECOYS:
        (desk / f"{name}.py").write_text(f"raise SystemExit('{name} of the working folder ran')\n")
    (home / ".jupyter" / "jupyter_config.py").write_text("raise RuntimeError('the config of a user ran')\n")
    (home / ".config" / "matplotlib" / "matplotlibrc").write_text("backend: nothing\n")
    assert main(["kernel", "install", "--prefix", str(home / ".local"), "--no-isolated"]) == 0
    polluted = {
        **os.environ,
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "TMPDIR": str(tmp_path / "t m p"),
        "JUPYTER_PATH": str(home / ".local" / "share" / "jupyter"),
        "JUPYTER_CONFIG_DIR": str(home / ".jupyter"),
        "HF_HOME": str(home / "hub"),
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "online",
        "WANDB_API_KEY": "0" * 40,
        "RAY_ADDRESS": "192.0.2.1:6379",
        "OPENAI_BASE_URL": "http://192.0.2.1/v1",
        "VLLM_USE_V1": "0",
        "MPLBACKEND": "nothing",
        "PYTHONWARNINGS": "ignore",
        "PYTHONSTARTUP": str(desk / "json.py"),
        "LC_ALL": "C",
        "COLUMNS": "33",
        "NO_COLOR": "1",
    }
    files = [str(ROOT / "tests" / name) for name in FILES]
    program = Path(sys.executable).parent / "pytest"  # unlike `python -m pytest` it does not look in the working folder
    command: list[str | Path] = [program, *files, "-c", ROOT / "pyproject.toml", "-m", "not heavy and not soak"]
    done = subprocess.run([*command, "-p", "no:xdist"], cwd=desk, env=polluted, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
