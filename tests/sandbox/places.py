"""Small environments with a base Python of their own, made anywhere, and what a console says in each."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
NOBODY = 65_534
_UNUSED = ("test", "site-packages", "idlelib", "tkinter", "config-*", "lib2to3", "ensurepip", "turtledemo")
_ASK = """
import asyncio, json, sys
from repl_rl.errors import ReplRLError
from repl_rl.sandbox import open_sandbox

async def main():
    async with open_sandbox("local", warm=0) as sandbox, sandbox.session() as session:
        return [(await session.push(line)).text for line in json.loads(sys.argv[1])]

try:
    print(json.dumps(asyncio.run(main())))
except ReplRLError as error:
    print(json.dumps(str(error)))
"""


def base_python(folder: Path) -> Path:
    """A copy of this Python with its standard library at `folder`; returns its interpreter."""
    binary = Path(os.path.realpath(sys._base_executable))
    stdlib = Path(sysconfig.get_path("stdlib"))
    (folder / "bin").mkdir(parents=True)
    copied = folder / "bin" / f"python3.{sys.version_info.minor}"
    shutil.copy(binary, copied)
    shutil.copytree(stdlib, folder / "lib" / stdlib.name, ignore=shutil.ignore_patterns(*_UNUSED))
    return copied


def environment(folder: Path, base: Path | None = None) -> Path:
    """A virtual environment at `folder` that finds this one's packages through a `.pth` file; its interpreter."""
    subprocess.run([base or sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def ask(
    python: Path, lines: Sequence[str], *, checkout: Path = ROOT, user: int | None = None, **more: str
) -> list[str] | str:
    """What a `local` console of that Python prints for each line; or why there is none."""
    variables: Mapping[str, str] = {"PATH": os.environ["PATH"], "PYTHONPATH": str(checkout), "HOME": "/", **more}
    done = subprocess.run(
        [python, "-B", "-c", _ASK, json.dumps(lines)],
        env=variables,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: list[str] | str = json.loads(done.stdout)
    return said
