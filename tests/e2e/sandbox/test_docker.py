"""The `docker` sandbox: hardened as `docker inspect` shows, and held to the same suite as `local`."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from repl_rl.errors import ConfigError, SandboxLost, SandboxUnavailable
from repl_rl.sandbox import Docker, LineResult, open_sandbox
from repl_rl.sandbox.conformance import (
    SandboxCheckResult,
    check_fidelity,
    check_host_calls,
    check_isolation,
    check_limits,
    load_doctest_transcripts,
    load_edge_transcripts,
)
from repl_rl.sandbox.conformance.limits_and_workspaces import CHECK_LIMITS
from repl_rl.sandbox.conformance.python_console_fidelity import SCRIPT, join_statements, wrap_in_blocks
from repl_rl.sandbox.docker import (
    ContainerLauncher,
    ContainerState,
    RunningContainer,
    accept_from_container,
    build_if_missing,
    build_image,
    get_default_image,
    make_image_name,
    validate_hardening,
)
from repl_rl.utils.package_data import find_asset
from tests.support.sandbox.docker import needs_docker
from tests.support.sandbox.environments import NOBODY


def _docker(*words: str) -> str:
    return subprocess.run(["docker", *words], capture_output=True, text=True, check=True).stdout


def _containers() -> list[str]:
    return _docker("ps", "-aq", "--filter", f"ancestor={get_default_image()}").split()


def _inspect() -> dict[str, object]:
    found: dict[str, object] = json.loads(_docker("inspect", *_containers()))[0]
    return found


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = _containers()
    yield
    assert (_containers(), os.listdir(tmp_path)) == (before, [])


def _failed(rows: list[SandboxCheckResult]) -> str:
    return "\n".join(f"{row.name}: {row.detail}" for row in rows if not row.passed)


@needs_docker
def test_inspect_shows_every_hardening(nothing_left: None) -> None:
    async def main() -> dict[str, object]:
        async with open_sandbox("docker", warm=0) as sandbox, sandbox.session() as session:
            assert (await session.push("6 * 7")).text == "42\n"
            return await asyncio.to_thread(_inspect)

    found = asyncio.run(main())
    host = found["HostConfig"]
    assert isinstance(host, dict)
    assert host["NetworkMode"] == "none"
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert host["CapAdd"] in (None, [])
    assert host["Privileged"] is False
    assert "no-new-privileges" in host["SecurityOpt"]
    assert any(option.startswith("seccomp={") for option in host["SecurityOpt"])
    assert host["Memory"] == host["MemorySwap"] > 0
    assert host["PidsLimit"] > 0
    assert host["NanoCpus"] > 0
    assert host["Init"] is True
    assert host["OomScoreAdj"] == 1000
    assert "nr_inodes" in host["Tmpfs"]["/tmp"]
    assert "size=" in host["Tmpfs"]["/tmp"]
    assert str(found["Config"]["User"]).split(":")[0] not in ("", "0", "root")  # type: ignore[index]


@needs_docker
def test_a_docker_console_is_isolated_and_limited(nothing_left: None) -> None:
    async def main() -> list[SandboxCheckResult]:
        async with open_sandbox("docker", limits=CHECK_LIMITS, warm=1) as sandbox:
            return [*await check_isolation(sandbox), *await check_limits(sandbox), *await check_host_calls(sandbox)]

    assert not _failed(asyncio.run(main()))


@pytest.mark.heavy
@needs_docker
def test_a_docker_console_prints_what_the_reference_prints(nothing_left: None) -> None:
    cases = load_doctest_transcripts()
    variants = [
        variant for case in cases[:20] for variant in (wrap_in_blocks(case), join_statements(case)) if variant.lines
    ]

    async def main() -> list[SandboxCheckResult]:
        async with open_sandbox("docker") as sandbox:
            transcripts = [*load_edge_transcripts(), *cases[:20], *variants]
            return await check_fidelity(sandbox, transcripts, "cases", Docker().build_reference_command(SCRIPT))

    rows = asyncio.run(main())
    assert int(rows[0].detail.split()[0]) >= 1000
    assert not _failed(rows)


@needs_docker
@pytest.mark.heavy
def test_an_image_of_another_python_prints_what_its_own_reference_prints() -> None:
    kind = Docker(image="repl-rl-sandbox:other-python")
    build_image(base="repl-rl-base:3.13", tag=kind.image)  # `scripts/docker up` makes the base

    async def main() -> list[SandboxCheckResult]:
        async with open_sandbox(kind) as sandbox:
            assert sandbox.python_version[:2] == (3, 13)
            cases = [*load_edge_transcripts(), *load_doctest_transcripts(20)]
            return await check_fidelity(sandbox, cases, "cases", kind.build_reference_command(SCRIPT))

    rows = asyncio.run(main())
    assert not _failed(rows)
    assert rows[0].detail.endswith(", 0 not reproducible left out")


@pytest.mark.heavy
@needs_docker
def test_with_isolation_by_container_each_console_has_one_of_its_own_that_ends_with_it(nothing_left: None) -> None:
    before = len(_containers())

    async def main() -> list[SandboxCheckResult]:
        chosen = Docker(isolation="container")
        async with open_sandbox(chosen, limits=CHECK_LIMITS, warm=0) as sandbox:
            async with sandbox.session() as one, sandbox.session() as other:
                await one.push("x = 1")
                assert (await other.push("'x' in dir()")).text == "False\n"
                assert await asyncio.to_thread(lambda: len(_containers())) == before + 2
                await asyncio.to_thread(_docker, "kill", _containers()[0])
                ends = await asyncio.gather(one.push("7"), other.push("7"), return_exceptions=True)
                (lost,) = (end for end in ends if isinstance(end, BaseException))
                assert isinstance(lost, SandboxLost)  # nobody's line did that
                assert [end.text for end in ends if isinstance(end, LineResult)] == ["7\n"]
            return await check_limits(sandbox)

    assert not _failed(asyncio.run(main()))


@needs_docker
def test_a_temporary_folder_with_a_long_name_and_spaces_is_as_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "größer als gedacht" / ("x" * 100)
    folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    async def main() -> None:
        async with open_sandbox("docker", warm=0) as sandbox, sandbox.session() as session:
            assert (await session.push("6 * 7")).text == "42\n"

    asyncio.run(main())


@needs_docker
def test_a_container_that_is_killed_is_replaced(nothing_left: None) -> None:
    async def main() -> None:
        async with open_sandbox("docker", warm=0) as sandbox:
            async with sandbox.session() as session:
                await session.push("1")
                await asyncio.to_thread(_docker, "kill", *_containers())
                with pytest.raises(SandboxLost, match="the fork server of the console is gone"):
                    await session.push("2")
                assert session.ended
            async with sandbox.session() as session:
                assert (await session.push("3")).text == "3\n"

    asyncio.run(main())


def test_without_a_daemon_docker_refuses_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")

    async def main() -> None:
        async with open_sandbox("docker"):
            pass

    with pytest.raises(SandboxUnavailable, match=r"no daemon answers; start it.*--sandbox local"):
        asyncio.run(main())


@needs_docker
def test_another_image_that_is_missing_is_refused_with_the_command_that_fetches_it() -> None:
    async def main() -> None:
        launch = ContainerLauncher(CHECK_LIMITS, Docker(image="repl-rl-no-such-image"), ())
        await launch.start()

    with pytest.raises(SandboxUnavailable, match=r"no image 'repl-rl-no-such-image'; docker pull repl-rl-no-such-im"):
        asyncio.run(main())


@pytest.mark.heavy
@needs_docker
def test_its_own_image_is_built_when_it_is_missing_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    _docker("tag", get_default_image(), "repl-rl-kept")
    _docker("rmi", get_default_image())

    async def main() -> None:
        async with open_sandbox("docker", warm=0) as sandbox, sandbox.session() as session:
            assert (await session.push("6 * 7")).text == "42\n"

    try:
        asyncio.run(main())
    finally:
        _docker("tag", "repl-rl-kept", get_default_image())
        _docker("rmi", "repl-rl-kept")
    assert f"building the image {get_default_image()} on" in caplog.messages[0]
    assert any(message.startswith("Step 2/") for message in caplog.messages)


@needs_docker
def test_a_build_that_is_cancelled_ends_and_says_nothing_more() -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            building = asyncio.create_task(build_if_missing())
            await asyncio.sleep(0)  # it begins
            building.cancel()
            with pytest.raises(asyncio.CancelledError):
                await building

    asyncio.run(main())


@needs_docker
def test_a_base_that_cannot_be_had_is_named_with_one_command_that_helps(tmp_path: Path) -> None:
    (tmp_path / "ipykernel-7.4.0-py3-none-any.whl").touch()
    with pytest.raises(
        SandboxUnavailable, match=r"built on repl-rl-no-such-base: .*; ('.*scripts/docker' up|repl-rl s)"
    ):
        build_image(base="repl-rl-no-such-base", wheels=tmp_path)


@needs_docker
def test_a_build_that_fails_on_its_base_leaves_no_container_and_tells_how_to_give_the_wheels(tmp_path: Path) -> None:
    before = _containers()
    (tmp_path / "ipykernel-7.4.0-py3-none-any.whl").touch()
    with pytest.raises(
        SandboxUnavailable, match=r"could not be built on repl-rl-sandbox:.*; repl-rl sandbox build --wheels"
    ):
        build_image(base=get_default_image(), wheels=tmp_path, tag="repl-rl-never")
    assert _containers() == before


def test_an_image_of_other_files_is_another_image() -> None:
    assert make_image_name(b"FROM a", b"ipykernel==7.4.*") != make_image_name(b"FROM a", b"ipykernel==7.5.*")
    assert get_default_image() == make_image_name(
        *(find_asset(f"sandbox/{name}").read_bytes() for name in ("Dockerfile", "requirements.txt"))
    )


SOUND = {
    "SecurityOptions": ["name=seccomp,profile=default"], "MemoryLimit": True, "PidsLimit": True, "CpuCfsQuota": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"SecurityOptions": ["name=apparmor"]}, "no seccomp; use a kernel with"),
        ({"SecurityOptions": None}, "no seccomp"),
        ({"MemoryLimit": False}, "do not limit memory; enable that cgroup controller"),
        ({"PidsLimit": False}, "do not limit processes"),
        ({"CpuCfsQuota": False}, "do not limit processors"),
    ],
)
def test_a_daemon_that_would_leave_out_a_hardening_is_refused(missing: dict[str, object], message: str) -> None:
    validate_hardening(SOUND)
    with pytest.raises(SandboxUnavailable, match=message):
        validate_hardening(SOUND | missing)


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wheels"):
        build_image(wheels=tmp_path)


CONNECTS = """
import socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
    line.connect(sys.argv[1])
    line.send(b"hello")
    sys.stdin.read()
"""
CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
"""Runs its first argument as a program in a child process, as a container's init does."""


@dataclass
class Started:
    """A container of the daemon whose first process is one of this machine."""

    attrs: Mapping[str, ContainerState]
    status: str = "running"

    def start(self) -> None: ...
    def reload(self) -> None: ...
    def logs(self, *, tail: int) -> bytes:
        return b""

    def remove(self, *, force: bool) -> None: ...
    def wait(self, *, condition: str, timeout: int) -> dict[str, object]:
        return {}


def test_only_a_process_of_the_container_is_accepted_on_its_socket(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = str(tmp_path / "line")

    async def main(listener: socket.socket, first: "subprocess.Popen[bytes]") -> None:
        with await accept_from_container(
            listener, RunningContainer(Started({"State": {"Pid": first.pid}}))
        ) as accepted:
            accepted.settimeout(30)
            assert await asyncio.to_thread(accepted.recv, 16) == b"hello"

    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger,
    ):
        listener.bind(address)
        listener.listen(4)
        listener.setblocking(False)
        stranger.connect(address)
        command = [sys.executable, "-c", CHILD, CONNECTS, address]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as first:
            asyncio.run(main(listener, first))
            assert stranger.recv(16) == b"", "it was hung up on"
            first.communicate()
    assert f"refused: process {os.getpid()} of user {os.geteuid()} connected in place of" in caplog.text


def test_a_container_that_has_ended_lets_nobody_in(tmp_path: Path) -> None:
    async def main(listener: socket.socket) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(str(tmp_path / "line"))
            await accept_from_container(listener, RunningContainer(Started({"State": {"Pid": 0}}, status="exited")))

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "line"))
        listener.listen(4)
        listener.setblocking(False)
        with pytest.raises(SandboxUnavailable, match="the container did not start"):
            asyncio.run(main(listener))


SQUATS = """
import glob, json, os, socket, sys
parent = os.getppid()
if user := int(sys.argv[1]):
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
while os.getppid() == parent:
    for path in glob.glob("/tmp/repl-rl-*/**/line", recursive=True):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            try:
                line.connect(path)
                line.send(json.dumps({"python": [3, 11, 7], "pid": 1}).encode())
                print("asked", line.recv(65536)[:60], flush=True)
            except OSError as error:
                print(type(error).__name__, flush=True)
"""
"""Connects in place of the container wherever it finds its socket, until the test ends it."""


@needs_docker
@pytest.mark.parametrize("user", [0, NOBODY] if os.geteuid() == 0 else [0])
def test_no_other_process_of_the_machine_takes_the_place_of_the_container(
    user: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> str:
        async with open_sandbox("docker", warm=0) as sandbox, sandbox.session() as session:
            await session.push("secret = 42")
            return (await session.push("secret")).text

    command = [sys.executable, "-c", SQUATS, str(user)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as squatter:
        said = asyncio.run(main())
        squatter.kill()
        found, _ = squatter.communicate()
    assert said == "42\n"
    assert not re.search(r"asked b'.+'", found), "it was hung up on, or never got in"
    if user:
        assert found == "", "it cannot even connect"
    else:
        assert f"refused: process {squatter.pid} of user" in caplog.text
