"""The host's end of a console's supervisor, which believes no process that is handed over by another one."""

import asyncio
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from repl_rl.sandbox.console_client import SupervisorClient


@pytest.fixture
def victim() -> Iterator["subprocess.Popen[bytes]"]:
    """A process of this user that is no console."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


async def told(packet: bytes, *handed: int) -> SupervisorClient:
    """A link that its supervisor, this process, told of its birth."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = SupervisorClient(ours, isolated=True, max_text_bytes=4096)
    with theirs:
        socket.send_fds(theirs, [packet], list(handed))
        theirs.send(b"R")
        await link.ready
    return link


def test_a_process_that_is_not_the_sender_is_neither_believed_nor_killed(
    victim: "subprocess.Popen[bytes]", caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        handle, folder = os.pidfd_open(victim.pid), os.open("/tmp", os.O_PATH)
        link = await told(b"B", handle, folder)
        link.destroy()
        link.close()
        assert link.exit_info is not None
        os.close(folder)
        assert not select.select([handle], [], [], 0.2)[0], "it still lives"
        os.close(handle)

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(main())
    assert f"refused: process {os.getpid()} handed over process {victim.pid}" in caplog.text
    assert len(os.listdir("/proc/self/fd")) == before


SUPERVISOR = """
import os, socket, sys
host = socket.socket(fileno=int(sys.argv[1]))
socket.send_fds(host, [b"B"], [os.pidfd_open(os.getpid()), os.open("/tmp", os.O_PATH)])
host.send(b'D{"code": 3, "cut": false}')
"""


def test_a_process_that_has_ended_before_its_birth_is_read_has_its_own_status(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, True)
    with theirs:
        command = [sys.executable, "-c", SUPERVISOR, str(theirs.fileno())]
        subprocess.run(command, pass_fds=[theirs.fileno()], check=True)

    async def main() -> None:
        link = SupervisorClient(ours, isolated=True, max_text_bytes=4096)
        await link.ready
        assert link.exit_info is not None
        assert link.exit_info.code == 3
        link.destroy()
        link.close()

    asyncio.run(main())
    assert "refused" not in caplog.text


def test_a_handle_of_a_process_that_has_ended_is_not_believed_from_one_that_lives(
    victim: "subprocess.Popen[bytes]", caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        handle, folder = os.pidfd_open(victim.pid), os.open("/tmp", os.O_PATH)
        victim.kill()
        victim.wait()
        link = await told(b"B", handle, folder)
        assert link.exit_info is not None
        link.close()
        os.close(handle)
        os.close(folder)

    asyncio.run(main())
    assert f"refused: process {os.getpid()} handed over process -1" in caplog.text


@pytest.mark.parametrize("count", [0, 1])
def test_a_birth_without_both_handles_is_a_death(count: int) -> None:
    async def main() -> None:
        handles = [os.open("/tmp", os.O_PATH) for _ in range(count)]
        link = await told(b"B", *handles)
        assert link.exit_info is not None
        link.close()
        for handle in handles:
            os.close(handle)

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/tmp", "/dev/null", "/proc/self/status"])
def test_what_is_no_handle_of_a_process_is_a_death(path: str) -> None:
    async def main() -> None:
        handle, folder = os.open(path, os.O_RDONLY), os.open("/tmp", os.O_PATH)
        link = await told(b"B", handle, folder)
        assert link.exit_info is not None
        link.destroy()
        link.close()
        os.close(handle)
        os.close(folder)

    asyncio.run(main())


@pytest.mark.parametrize("packets", [[b"X"], [b"TX"] + [b"S"] * 300, [b"T"] * 300], ids=["unknown", "struck", "empty"])
def test_packets_that_no_supervisor_sends_are_a_death(packets: list[bytes]) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link = SupervisorClient(ours, isolated=True, max_text_bytes=4096)
        died = asyncio.Event()
        link.on_death = died.set
        with theirs:
            for packet in packets:
                theirs.send(packet)
                link._read_packets()
            await asyncio.wait_for(died.wait(), 30)
        assert link.exit_info is not None
        assert link.exit_info.code is None
        link.close()

    asyncio.run(main())


def test_a_supervisor_that_sends_for_ever_leaves_the_loop_to_others() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link = SupervisorClient(ours, isolated=True, max_text_bytes=4096)
        with theirs:
            for packet in [b"S"] * 100 + [b"R"]:
                theirs.send(packet)
            link._read_packets()
            assert not link.ready.done(), "it reads a part, and returns to the loop"
            await link.ready
        assert link.exit_info is None
        link.close()

    asyncio.run(main())
