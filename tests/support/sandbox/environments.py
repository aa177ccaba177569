"""Small environments with a base Python of their own, made anywhere, and what a console says in each."""

import errno
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
NOBODY = 65_534
VERSION = f"python3.{sys.version_info.minor}"
PACKAGES = Path(sysconfig.get_path("purelib"))
_UNUSED = ("test", "site-packages", "idlelib", "tkinter", "config-*", "lib2to3", "ensurepip", "turtledemo")
_ASK = """
import asyncio, json, os, sys
from repl_rl.errors import ReplRLError
from repl_rl.sandbox import open_sandbox

async def main(first, preload, lines):
    exec(first)
    async with open_sandbox("local", warm=0, preload=preload) as sandbox, sandbox.session() as session:
        return [(await session.push(line)).text for line in lines]

try:
    print(json.dumps(asyncio.run(main(*json.loads(sys.argv[1])))))
except ReplRLError as error:
    print(json.dumps(str(error)))
"""


def _cheap_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM):
            raise
        shutil.copy2(source, target)


def base_python(folder: Path) -> Path:
    """A copy of this Python with its standard library at `folder`; returns its interpreter."""
    (folder / "bin").mkdir(parents=True)
    copied = folder / "bin" / VERSION
    shutil.copy(os.path.realpath(sys.executable), copied)
    stdlib = Path(sysconfig.get_path("stdlib"))
    unused = shutil.ignore_patterns(*_UNUSED)
    shutil.copytree(stdlib, folder / "lib" / VERSION, ignore=unused, copy_function=_cheap_copy)
    return copied


def environment(folder: Path, base: Path | None = None) -> Path:
    """A virtual environment at `folder` that finds this one's packages through a `.pth` file; its interpreter."""
    subprocess.run([base or sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site_packages(folder) / "others.pth").write_text(f"{PACKAGES}\n")
    return folder / "bin" / "python"


def site_packages(folder: Path) -> Path:
    """Of the environment at `folder`."""
    return folder / "lib" / VERSION / "site-packages"


def ask(
    python: Path,
    lines: Sequence[str],
    *,
    checkout: Path = ROOT,
    user: int | None = None,
    preload: Sequence[str] = (),
    first: str = "",
    tmpdir: str = "/tmp",
) -> list[str] | str:
    """What a `local` console of that Python prints for each line; or the message that there is none.

    `first` is run on the host, in the process that opens the sandbox.
    """
    done = subprocess.run(
        [python, "-B", "-c", _ASK, json.dumps([first, preload, lines])],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(checkout), "HOME": "/", "TMPDIR": tmpdir},
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
