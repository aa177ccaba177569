"""What a console closes, replaces or remembers of its connection reaches no sibling and no socket of the host."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from repl_rl.sandbox import Limits, LineResult, SandboxSession, open_sandbox
from repl_rl.trajectory.trajectory import LineStatus

KERNEL = "import sys; k = sys._getframe(4).f_locals['self']"
HANG_UP = (
    "import os, socket, threading, time",
    "def hang_up():",
    "  for name in os.listdir('/proc/self/fd'):",
    "    try:",
    "      with socket.socket(fileno=os.dup(int(name))) as s: s.getpeername(); s.shutdown(2)",
    "    except OSError: pass",
    "",
)
"""Defines a function that closes the connection to the host, whichever of the console's sockets it is."""
LISTENER = "/run/console/shell"
LIMITS = replace(Limits(), line_timeout_s=2.0, interrupt_grace_s=0.4)


async def say(session: SandboxSession, *lines: str) -> LineResult:
    for line in lines:
        result = await session.push(line)
    return result


SNIFF = (
    KERNEL,
    "heard = []",
    "def route(frames): heard.append(frames[-1])",
    "",
    "k._handle_other_message = route",
)
"""Keeps what a console is sent and does not believe, as a line with another's signature."""


def test_a_line_of_a_console_that_hung_up_is_given_to_no_sibling() -> None:
    async def main() -> None:
        async with (
            open_sandbox("local", limits=LIMITS, warm=0) as sandbox,
            sandbox.session() as clock,
            sandbox.session() as first,
        ):
            await say(clock, "import time")
            await say(first, *HANG_UP)
            async with (
                sandbox.session() as one,
                sandbox.session() as two,
                sandbox.session() as three,
                sandbox.session() as four,
            ):
                siblings = (one, two, three, four)
                await say(first, "threading.Timer(0.05, hang_up).start()")
                await say(clock, "time.sleep(0.5)")  # a reconnection takes a millisecond
                for sibling in siblings:
                    await say(sibling, *SNIFF)
                result = await first.push("secret = 42")
                heard = [(await sibling.push("heard")).text for sibling in siblings]
                assert heard == ["[]\n"] * 4
                assert (result.status, first.ended) == (LineStatus.KILLED, True)
                assert result.elapsed_s < 2, "not only at its deadline"

    asyncio.run(main())


def test_a_console_that_hangs_up_in_its_line_ends_with_it() -> None:
    async def main() -> None:
        async with open_sandbox("local", limits=LIMITS, warm=0) as sandbox, sandbox.session() as session:
            result = await say(session, *HANG_UP, "hang_up()")
            assert result.status in (LineStatus.KILLED, LineStatus.TIMEOUT)
            assert session.ended

    asyncio.run(main())


def test_a_console_has_the_host_connect_to_nothing_that_it_chose(tmp_path: Path) -> None:
    target = str(tmp_path / "host")
    replace = f"os.unlink({LISTENER!r}); os.symlink({target!r}, {LISTENER!r}); hang_up(); time.sleep(1)"
    program = "\n".join([*HANG_UP, replace])

    async def main() -> None:
        async with open_sandbox("local", limits=LIMITS, warm=0) as sandbox, sandbox.session() as session:
            result = await session.push(f"exec({program!r})")  # in its first line
            assert result.status in (LineStatus.KILLED, LineStatus.TIMEOUT)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(target)
        listener.listen()
        listener.setblocking(False)
        asyncio.run(main())
        with pytest.raises(BlockingIOError):
            listener.accept()


REMEMBERS = (
    "import re; own = k._key.decode(); found = set()",
    "m = open('/proc/self/mem', 'rb', 0)",
    "for l in open('/proc/self/maps'):",
    "  a, b = (int(v, 16) for v in l.split()[0].split('-'))",
    "  if l.split()[1][0] == 'r' and '[v' not in l:",
    "    try: m.seek(a); d = m.read(b - a)",
    "    except OSError: continue",
    "    found |= {each.decode() for each in re.findall(rb'[0-9a-f]{64}', d)}",
    "",
)
"""Finds what looks like a key in a console's whole memory."""


@pytest.mark.parametrize("kind", ["local", "unsafe"])
def test_a_console_remembers_the_key_of_no_sibling(kind: str) -> None:
    async def main() -> None:
        async with open_sandbox(kind, warm=0) as sandbox, sandbox.session() as one, sandbox.session() as two:
            keys = [(await say(each, KERNEL, "print(k._key.decode())")).text.strip() for each in (one, two)]
            async with sandbox.session() as last:
                assert (await say(last, KERNEL, *REMEMBERS, "own in found")).text == "True\n"
                found = (await say(last, "print(*found)")).text.split()
        assert not {*keys} & {*found}

    asyncio.run(main())
