"""Where isolation cannot be had, a sandbox refuses and names the fix; nothing weaker is used instead."""

import asyncio
import platform
import shutil
import sys
from pathlib import Path

import pytest

from repl_rl.assets import asset
from repl_rl.errors import ConfigError, SandboxUnavailable
from repl_rl.sandbox import DockerOptions, Limits, open_sandbox


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


WITHOUT_SECCOMP = """#!{python}
import os, struct, sys
sys.path.insert(0, {package!r})
from repl_kernel import system
PRCTL, SET_SECCOMP, EINVAL = {prctl}, 22, 22
program = [(0x20, 0, 0, 0), (0x15, 0, 3, PRCTL), (0x20, 0, 0, 16), (0x15, 0, 1, SET_SECCOMP),
           (0x06, 0, 0, 0x50000 | EINVAL), (0x06, 0, 0, 0x7FFF0000)]
system.no_new_privileges()
system.install_filter(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
os.execv({bwrap!r}, [{bwrap!r}, *sys.argv[1:]])
"""
"""A bubblewrap on a kernel that knows no seccomp filters: it refuses them with EINVAL."""


def test_a_machine_without_seccomp_is_refused_at_the_start_and_not_at_the_first_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "bwrap"
    script = WITHOUT_SECCOMP.format(
        python=sys.executable,
        package=str(asset("sandbox")),
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

    with pytest.raises(SandboxUnavailable, match="No module named 'no_such_module'"):
        asyncio.run(main())


def test_containers_of_another_sandbox_than_docker_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no effect on the sandbox 'local'"):
        open_sandbox("local", containers=DockerOptions())


def test_an_unknown_kind_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="choose one of local, docker"):
        open_sandbox("vm")


@pytest.mark.parametrize("field", ["line_timeout_s", "memory_mb", "output_bytes", "processes"])
def test_a_limit_of_zero_is_a_config_error(field: str) -> None:
    with pytest.raises(ConfigError, match=f"limits.{field}"):
        Limits(**{field: 0})
