"""Host functions on the sandbox's own channel: whatever a console asks ends in a documented way, and in time."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from repl_rl.errors import ConfigError
from repl_rl.sandbox import Limits, LineResult, open_sandbox
from repl_rl.sandbox.base import SandboxSession
from repl_rl.sandbox.conformance import SandboxCheckResult, check_host_calls
from repl_rl.sandbox.console_client import ConsoleSession
from repl_rl.trajectory.trajectory import LineStatus

LIMITS = replace(Limits(), line_timeout_s=1.0, interrupt_grace_s=0.4)
FORGE = (
    "import gc, zmq, sys; from repl_kernel import wire, host_function_stubs",
    "c = [o for o in gc.get_objects() if isinstance(o, host_function_stubs.HostChannel)][0]",
)
"""A line finds the channel and the key of its own console."""


class Adder:
    """A host that adds numbers, or waits for an event that the test sets."""

    functions = {"add": "add(a, b)", "wait": "wait()"}  # noqa: RUF012
    argument_bytes = 4096

    def __init__(self) -> None:
        self.calls = 0
        self.cancelled = 0
        self.open = asyncio.Event()

    async def answer_call(self, call: bytes) -> bytes:
        self.calls += 1
        told = json.loads(call)
        if told["name"] == "wait":
            try:
                await self.open.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if not all(isinstance(each, int) for each in told["args"]):
            return b'{"error": "numbers, please"}'
        return json.dumps({"answer": sum(told["args"])}).encode()


@dataclass
class Talk:
    """A console with a host, and a sibling beside it."""

    session: SandboxSession
    host: Adder
    sibling: SandboxSession

    async def say(self, *lines: str) -> LineResult:
        for line in lines:
            result = await self.session.push(line)
        return result


@asynccontextmanager
async def talk(kind: str = "unsafe", limits: Limits = LIMITS) -> AsyncIterator[Talk]:
    async with (
        open_sandbox(kind, limits=limits, warm=0) as sandbox,
        sandbox.session() as session,
        sandbox.session() as sibling,
    ):
        assert isinstance(session, ConsoleSession)
        host = Adder()
        session.offer_functions(host)
        yield Talk(session, host, sibling)
        assert (await sibling.push("6 * 7")).text == "42\n"


@pytest.mark.parametrize("kind", ["unsafe", "local"])
def test_a_sandbox_passes_the_conformance_suite_of_host_functions(kind: str) -> None:
    async def main() -> list[SandboxCheckResult]:
        async with open_sandbox(kind, warm=0) as sandbox:
            return await check_host_calls(sandbox)

    rows = asyncio.run(main())
    assert len(rows) == 5
    assert [row for row in rows if not row.passed] == []


def test_a_line_calls_a_function_of_the_host_and_waits_for_its_answer() -> None:
    async def main() -> None:
        async with talk() as t:
            assert (await t.say("add(1, 2) + add(3)")).text == "6\n"
            assert (await t.say("try: add('x')", "except HostError as error: print(error)", "")).text == (
                "numbers, please\n"
            )
            assert "add" not in (await t.say("dir()")).text
            assert (await t.sibling.push("add")).status is LineStatus.EXCEPTION

    asyncio.run(main())


def test_threads_of_a_line_call_at_the_same_time_and_each_gets_its_own_answer() -> None:
    async def main() -> None:
        async with talk() as t:
            await t.say("from concurrent.futures import ThreadPoolExecutor as Pool")
            assert (await t.say("list(Pool(4).map(add, range(64))) == list(range(64))")).text == "True\n"

    asyncio.run(main())


def test_the_clock_of_a_line_stands_still_while_the_host_works_and_goes_on_after_it() -> None:
    async def main() -> None:
        async with talk(limits=replace(LIMITS, line_timeout_s=0.5)) as t:
            asyncio.get_running_loop().call_later(1.0, t.host.open.set)
            slow = await t.say("wait()")
            assert (slow.status, slow.elapsed_s > 0.9) == (LineStatus.OK, True)
            late = await t.say("add(1)", "import time", "add(1); time.sleep(9)")
            assert (late.status, late.elapsed_s < 3) == (LineStatus.TIMEOUT, True)

    asyncio.run(main())


def test_an_interrupt_in_a_call_that_has_no_end_leaves_a_channel_that_works() -> None:
    """The deadline cannot pass in a call, so the program interrupts itself."""

    async def main() -> None:
        async with talk() as t:
            await t.say("import signal, threading, os")
            interrupt = "threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()"
            struck = await t.say(f"{interrupt}; wait()")
            assert (
                struck.text
                == 'Traceback (most recent call last):\n  File "<stdin>", line 1, in <module>\nKeyboardInterrupt\n'
            )
            assert (await t.say("add(1, 2)")).text == "3\n"
            assert t.host.cancelled == 1

    asyncio.run(main())


HOSTILE: Sequence[tuple[str, Sequence[str], LineStatus, str]] = (
    ("100 MB of arguments", ("add('x' * 10**8)",), LineStatus.EXCEPTION, "at most 4096 are allowed"),
    ("many small arguments", ("add(*range(10**5))",), LineStatus.EXCEPTION, "at most 4096 are allowed"),
    ("no JSON", ("add({1})",), LineStatus.EXCEPTION, "must be JSON values"),
    ("not a number", ("add(float('nan'))",), LineStatus.EXCEPTION, "must be JSON values"),
    ("a list in itself", ("x = []; x.append(x)", "add(x)"), LineStatus.EXCEPTION, "must be JSON values"),
    (
        "calls without end, up to the deadline",
        ("while True: add(1)", "", "add(1)"),
        LineStatus.OK,
        "1",
    ),
    (
        "a call from a child process",
        (
            "import os, sys",
            "def f():",
            "  try: add(1)",
            "  except HostError as error: print(error); sys.stdout.flush()",
            "",
            "if os.fork() == 0: f(); os._exit(0)",
            "else: _ = os.wait()",
            "",
        ),
        LineStatus.OK,
        "cannot be called from a child process",
    ),
    (
        "a thread that goes on after its line",
        (
            "import threading, time; go = threading.Event(); told = []",
            "def f():",
            "  go.wait(); time.sleep(0.05)",
            "  try: add(1)",
            "  except HostError as error: told.append(str(error))",
            "",
            "t = threading.Thread(target=f); t.start(); go.set()",
            "# nothing runs meanwhile",
        ),
        LineStatus.OK,
        "",
    ),
    (
        "a thread whose call the end of the line overtakes",
        (
            "import threading, time; told = []",
            "def f():",
            "  try: wait()",
            "  except HostError as error: told.append(str(error))",
            "",
            "t = threading.Thread(target=f); t.start(); time.sleep(0.2)",
            "t.join(); told",
        ),
        LineStatus.OK,
        "the line ended before wait() was answered",
    ),
    (
        "a call after the deadline",
        (
            "import time",
            "def f():",
            "  try: time.sleep(9)",
            "  except KeyboardInterrupt: add(1)",
            "",
            "f()",
        ),
        LineStatus.TIMEOUT,
        "HostError: the time of the line is over",
    ),
    (
        "an interrupt that is ignored",
        ("import signal; _ = signal.signal(2, signal.SIG_IGN)", "while True: add(1)", ""),
        LineStatus.TIMEOUT,
        "",
    ),
    (
        "a forged answer to its own call",
        (
            *FORGE,
            "reply = [wire.DELIMITER, b'', wire.CALL_HEADER, c._line.header, b'0', b'{\"answer\": 7}']",
            "reply[1] = c._signer.sign(reply[2:])",
            "_ = [c._shell.send_multipart([*c._line.identities, *reply]) for _ in range(200)]; add(2)",
        ),
        LineStatus.OK,
        "2",
    ),
    (
        "calls of another line, and rubbish",
        (
            *FORGE,
            "old = c._line",
            "def send(header, number, content):",
            "  body = [wire.CALL_HEADER, header, number, content]",
            "  c._shell.send_multipart([*old.identities, wire.DELIMITER, c._signer.sign(body), *body])",
            "",
            "send(old.header, b'1', b'{}'); send(c._line.header, b'x', b'{}'); send(c._line.header, b'9' * 99, b'')",
            "add(4)",
        ),
        LineStatus.OK,
        "4",
    ),
    (
        "a message that is too large for the socket",
        (
            *FORGE,
            "c._shell.send_multipart([*c._line.identities, b'x' * 10**8])",
        ),
        LineStatus.TIMEOUT,
        "",
    ),
)


@pytest.mark.parametrize(("name", "lines", "status", "shows"), HOSTILE, ids=[case[0] for case in HOSTILE])
def test_hostile_use_of_the_channel_ends_as_documented_and_a_sibling_does_not_notice(
    name: str, lines: Sequence[str], status: LineStatus, shows: str
) -> None:
    ends_at_deadline = status is LineStatus.TIMEOUT or "deadline" in name
    # However slow the machine is: 100 MB take their time, and the sibling's line has the same limit.
    limits = LIMITS if ends_at_deadline else replace(LIMITS, line_timeout_s=20.0)

    async def main() -> LineResult:
        async with talk(limits=limits) as t:
            return await t.say(*lines)

    result = asyncio.run(main())
    assert result.status is status, result
    assert shows in result.text


def test_calls_that_nobody_waits_for_are_cancelled_with_their_line() -> None:
    async def main() -> None:
        async with talk() as t:
            await t.say("import threading, time")
            await t.say("threading.Thread(target=wait, daemon=True).start(); time.sleep(0.2)")
            assert (t.host.cancelled, t.host.calls) == (1, 1)

    asyncio.run(main())


def test_an_error_of_the_host_itself_ends_the_push_that_met_it() -> None:
    class Broken(Adder):
        async def answer_call(self, call: bytes) -> bytes:
            raise ConfigError("host", "broken", "correct it")

    async def main() -> None:
        async with open_sandbox("unsafe", limits=LIMITS, warm=0) as sandbox, sandbox.session() as session:
            assert isinstance(session, ConsoleSession)
            session.offer_functions(Broken())
            with pytest.raises(ConfigError, match="correct it"):
                await session.push("add(1)")
            assert session.ended

    asyncio.run(main())


def test_functions_are_offered_before_the_first_line_or_not_at_all() -> None:
    async def main() -> None:
        async with open_sandbox("unsafe", limits=LIMITS, warm=0) as sandbox, sandbox.session() as session:
            assert isinstance(session, ConsoleSession)
            await session.push("1")
            with pytest.raises(ConfigError, match="before the first line"):
                session.offer_functions(Adder())

    asyncio.run(main())
