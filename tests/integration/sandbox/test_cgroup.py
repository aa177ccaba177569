"""A control group bounds all consoles of a sandbox together, where one can be made; where not, `doctor` says why."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from repl_rl.sandbox import Limits, open_sandbox
from repl_rl.sandbox.cgroup import CgroupUnavailable, ControlGroup, _make_locked, create_group
from repl_rl.sandbox.isolated_subprocess import Local
from repl_rl.trajectory.trajectory import LineStatus
from tests.support.processes import descendants, wait_for

_LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")
_KILLED_HOST = """
import asyncio, os
from repl_rl.sandbox import open_sandbox

async def main():
    async with open_sandbox("local", warm=0):
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""


def _group() -> ControlGroup | None:
    try:
        group = create_group()
    except CgroupUnavailable:
        return None
    asyncio.run(group.remove())
    return group


here = _group()
needs_group = pytest.mark.skipif(here is None, reason="no control group can be made here; the other tests say so")


def _folders(pid: int) -> set[str]:
    return {line.split(":", 2)[2] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()}


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _limit(group: ControlGroup) -> Path:
    """The file with the memory limit of the one sandbox that this process has open."""
    above = {folder.parent for folder in group.folders}
    made = [path for parent in above for path in parent.glob(f"repl-rl-{os.getpid()}-*")]
    (found,) = (path / name for path in made for name in _LIMIT_FILES if (path / name).exists())
    return found


@needs_group
def test_all_that_a_sandbox_starts_is_in_one_group_that_ends_with_it() -> None:
    assert here is not None
    above = {folder.parent for folder in here.folders}

    def made() -> set[str]:
        return {path.name for parent in above for path in parent.glob(f"repl-rl-{os.getpid()}-*")}

    async def main() -> None:
        others = dict(descendants(os.getpid()))  # of tests before this one
        async with open_sandbox("local", warm=0) as sandbox, sandbox.session() as session:
            await session.push("import subprocess, time; p = subprocess.Popen(['sleep', '99'])")
            (name,) = made()
            page = os.sysconf("SC_PAGE_SIZE")  # the kernel keeps whole pages
            assert int(_limit(here).read_text()) == here.memory_bytes // page * page
            below = [pid for pid, _ in descendants(os.getpid()) if pid not in others]
            assert len(below) >= 5
            outside = [pid for pid in below if not any(path.endswith(name) for path in _folders(pid))]
            assert [_command(pid) for pid in outside] == []

    before = _folders(os.getpid())
    asyncio.run(main())
    assert not made()
    assert _folders(os.getpid()) == before


@needs_group
def test_consoles_that_take_more_together_than_their_group_may_are_killed_and_nothing_else() -> None:
    assert here is not None

    async def main() -> tuple[LineStatus, str]:
        limits = Limits(memory_mb=1024, line_timeout_s=60)
        async with open_sandbox("local", limits=limits, warm=0) as sandbox:
            async with sandbox.session() as session:
                _limit(here).write_text(str(200 << 20))
                status = (await session.push("x = b'x' * (500 << 20)")).status
            async with sandbox.session() as after:
                return status, (await after.push("6 * 7")).text

    assert asyncio.run(main()) == (LineStatus.KILLED, "42\n")


@needs_group
def test_a_group_that_a_killed_process_left_is_swept_by_the_next_sandbox() -> None:
    assert here is not None
    above = here.folders[0].parent
    host = subprocess.Popen([sys.executable, "-c", _KILLED_HOST])
    host.wait()
    assert list(above.glob(f"repl-rl-{host.pid}-*"))

    def swept() -> bool:
        asyncio.run(create_group().remove())
        return not list(above.glob(f"repl-rl-{host.pid}-*"))

    wait_for(swept, None)  # its processes end by themselves, a little later


@needs_group
def test_a_group_is_swept_by_nobody_while_its_owner_lives_in_whatever_container() -> None:
    """The owner's number says nothing: in another PID namespace it is nobody's, or somebody else's."""
    assert here is not None
    gone = subprocess.Popen(["true"])
    gone.wait()
    folders = [folder.with_name(f"repl-rl-{gone.pid}-0") for folder in here.folders]
    locks = [_make_locked(folder) for folder in folders]
    asyncio.run(create_group().remove())
    assert all(folder.exists() for folder in folders)
    for lock in locks:
        os.close(lock)
    asyncio.run(create_group().remove())
    assert not any(folder.exists() for folder in folders)


def test_doctor_says_what_a_group_bounds_or_why_there_is_none() -> None:
    said = asyncio.run(Local().describe_status())
    assert said.startswith("a console answers; ")
    assert ("a cgroup bounds its consoles together to" in said) == (here is not None)
    assert ("no cgroup bounds its consoles: " in said) == (here is None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_user_to_whom_no_group_is_delegated_is_told_why(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os.setresuid(65534, 65534, 65534)
        try:
            create_group()
        except CgroupUnavailable as reason:
            os._exit("may not be written to; run it as root" in str(reason) or "systemd-run --user" in str(reason))
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
