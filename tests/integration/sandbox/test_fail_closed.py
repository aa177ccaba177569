"""Where isolation cannot be had, a sandbox refuses and names the fix; nothing weaker is used instead."""

import asyncio
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from repl_rl.errors import ConfigError, SandboxFault, SandboxUnavailable
from repl_rl.sandbox import Limits, open_sandbox
from repl_rl.sandbox.console_pool import ConsolePool, SharedForkServer
from repl_rl.sandbox.fork_server_client import ForkServer, ProcessLauncher
from repl_rl.utils.package_data import find_asset


def test_without_bubblewrap_local_refuses_and_names_three_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        SandboxUnavailable, match=r"apt-get install bubblewrap.*--sandbox docker.*--sandbox unsafe"
    ) as info:
        open_sandbox("local")
    assert info.value.exit_code == 2


def test_a_bubblewrap_that_fails_is_a_refusal_with_its_own_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    async def main() -> None:
        async with open_sandbox("local"):
            pass

    with pytest.raises(SandboxUnavailable, match="No permissions to create new namespace"):
        asyncio.run(main())


WITHOUT_SECCOMP = """#!/bin/sh
'''exec' {python} "$0" "$@"
'''
import os, struct, sys
sys.path.insert(0, {package!r})
from repl_kernel import libc_calls
PRCTL, SET_SECCOMP, EINVAL = {prctl}, 22, 22
program = [(0x20, 0, 0, 0), (0x15, 0, 3, PRCTL), (0x20, 0, 0, 16), (0x15, 0, 1, SET_SECCOMP),
           (0x06, 0, 0, 0x50000 | EINVAL), (0x06, 0, 0, 0x7FFF0000)]
libc_calls.forbid_new_privileges()
packed = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
libc_calls.install_seccomp_filter(libc_calls.Filter(packed))
os.execv({bwrap!r}, [{bwrap!r}, *sys.argv[1:]])
"""
"""A bubblewrap on a kernel that knows no seccomp filters: it refuses them with EINVAL. The interpreter's path may hold
spaces, which no first line of a script can; so a shell reads the second one, and Python a string."""


def test_a_machine_without_seccomp_is_refused_at_the_start_and_not_at_the_first_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "bwrap"
    script = WITHOUT_SECCOMP.format(
        python=shlex.quote(sys.executable),
        package=str(find_asset("sandbox")),
        prctl={"x86_64": 157, "aarch64": 167}[platform.machine()],
        bwrap=shutil.which("bwrap"),
    )
    fake.write_text(script)
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    async def main() -> None:
        async with open_sandbox("local"):
            pass

    with pytest.raises(SandboxUnavailable, match=r"cannot isolate a console here.*prctl\(22\).*--sandbox docker"):
        asyncio.run(main())


def test_a_module_that_cannot_be_preloaded_is_named_at_the_start() -> None:
    async def main() -> None:
        async with open_sandbox("local", preload=("no_such_module",)):
            pass

    with pytest.raises(SandboxUnavailable) as refused:
        asyncio.run(main())
    assert str(refused.value) == (
        "the sandbox did not start: module 'no_such_module' cannot be preloaded: No module named 'no_such_module'; "
        "install it where the console runs, or leave it out"
    )


def test_a_program_that_is_not_there_is_refused_with_the_remedy_and_leaves_nothing_open() -> None:
    launch = ProcessLauncher(
        ("/no/such/program", "{fd}"), isolates_consoles=False, uses_own_uids=False, find_remedy=lambda _: "install it"
    )
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(SandboxUnavailable, match=r"^/no/such/program cannot be started: .*; install it$"):
        asyncio.run(launch.start())
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_fork_server_that_cannot_be_replaced_is_a_fault_for_who_waits_for_a_console(tmp_path: Path) -> None:
    program = tmp_path / "server"
    gone = tmp_path / "gone"
    full, python = f"[ -e {shlex.quote(str(gone))} ] && echo no room left && exit 1", shlex.quote(sys.executable)
    program.write_text(f'#!/bin/sh\n{full}\nexec {python} "$@"\n')
    program.chmod(0o755)
    options = json.dumps({"isolate": False, "preload": []})
    command = (str(program), str(find_asset("sandbox/repl_kernel/fork_server_main.py")), "{fd}", options)
    launch = ProcessLauncher(command, isolates_consoles=False, uses_own_uids=False, find_remedy=lambda _: "make room")

    async def main() -> None:
        server = await ForkServer.start(launch)
        pool = ConsolePool(SharedForkServer(launch, Limits(), server, patience_s=()).open_console, warm=0, starting=1)
        async with pool.lease() as session:
            assert (await session.push("6 * 7")).text == "42\n"
        gone.touch()
        await server.stop()
        async with asyncio.timeout(60):
            with pytest.raises(SandboxFault, match="did not start: no room left; make room"):
                async with pool.lease():
                    pass
        await pool.close()

    asyncio.run(main())


def test_an_unknown_kind_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="choose one of local, docker"):
        open_sandbox("vm")


@pytest.mark.parametrize("field", ["line_timeout_s", "memory_mb", "output_bytes", "processes"])
def test_a_limit_of_zero_is_a_config_error(field: str) -> None:
    with pytest.raises(ConfigError, match=f"limits.{field}"):
        Limits(**{field: 0})


FEW = """
import asyncio, resource, sys
from repl_rl.sandbox import open_sandbox

async def main():
    async with open_sandbox("unsafe", warm=2):
        pass

soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
asyncio.run(main())
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_too_few_open_files_are_one_error_and_not_an_abort_of_the_socket_library() -> None:
    done = subprocess.run([sys.executable, "-c", FEW, "16", "16"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    expected = (
        "SandboxUnavailable: this process may open 16 files, and its consoles need 176; raise the limit (ulimit -n 176)"
    )
    assert done.stderr.splitlines()[-1].endswith(expected), done.stderr


def test_a_soft_limit_of_open_files_is_raised_to_what_consoles_need() -> None:
    """The usual soft limit of a user, 1,024, is too low for the consoles of a training by default."""
    done = subprocess.run([sys.executable, "-c", FEW, "16", "512"], capture_output=True, text=True, check=False)
    assert done.stdout == "176 512\n", done.stderr
