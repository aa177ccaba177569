"""However a console or its host ends, it is noticed soon, nothing wrong is said, and nothing is left behind."""

import asyncio
import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from repl_rl.sandbox import Limits, Sandbox, open_sandbox
from repl_rl.trajectory.trajectory import LineStatus
from tests.support.processes import call_in_new_process, wait_for

ROOT = Path(__file__).parents[3]
LIMITS = replace(Limits(), line_timeout_s=2.0, interrupt_grace_s=0.2)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


async def _turns(count: int) -> None:
    """Let the event loop turn so often, which takes some ten microseconds each."""
    for _ in range(count):
        await asyncio.sleep(0)


def _descendants() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _held() -> Counter[tuple[str, object]]:
    """What this process and its children hold. A later count less an earlier one is what was left in between."""
    gc.collect()  # what an earlier test dropped is not what this one leaves
    folder = tempfile.gettempdir()
    held: Counter[tuple[str, object]] = Counter()
    held["descriptors", ""] = len(os.listdir("/proc/self/fd"))
    held["sockets", folder] = Path("/proc/net/unix").read_text().count(folder)
    held.update(("shared memory", name) for name in os.listdir("/dev/shm") if name.startswith(("left", "repl-rl-")))
    held.update(("temporary files", name) for name in os.listdir(folder))
    held.update(("processes", pid) for pid in _descendants())
    return held


def _assert_nothing_left(before: Counter[tuple[str, object]]) -> None:
    """Poll: what the kernel and threads give back, they give back a little later."""
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not _held() - before, None, 10)
    assert _held() - before == Counter()


def _consoles(before: set[int]) -> list[int]:
    """Processes that are new and compute or print: the consoles, as the host sees them."""
    found = []
    for child in psutil.Process().children(recursive=True):
        if child.pid not in before and child.num_threads() >= 3:
            found.append(child.pid)
    return found


async def _kill_while_it_runs(sandbox: Sandbox, before: set[int], number: int) -> str:
    line = ("while True: pass", "while True: print('token')")[number % 2]
    async with sandbox.session() as session:
        assert (await session.push(f"print('mine-{number}')")).text == f"mine-{number}\n"
        victims = _consoles(before)
        await session.push(line)
        running = asyncio.create_task(session.push(""))
        await _turns(random.randrange(2000))  # when it dies is the point
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        killed = asyncio.get_running_loop().time()
        result = await running
        noticed_s = asyncio.get_running_loop().time() - killed
    if result.status is not LineStatus.KILLED or noticed_s > 1.0:
        return f"{result.status} after {noticed_s:.2f} s"
    if number % 2 == 0 and result.text:
        return f"printed {result.text[:80]!r}"
    return f"another line's output: {result.text[:80]!r}" if "mine" in result.text else ""


def _kills(count: int) -> list[str]:
    async def main() -> list[str]:
        async with open_sandbox("local", limits=LIMITS, warm=0) as sandbox:
            before = _descendants()
            return [await _kill_while_it_runs(sandbox, before, number) for number in range(count)]

    return [problem for problem in asyncio.run(main()) if problem]


def test_a_console_killed_while_it_computes_or_prints_is_noticed_within_a_second() -> None:
    assert _kills(20) == []


@pytest.mark.heavy
@pytest.mark.alone
def test_two_hundred_consoles_killed_while_they_compute_or_print_are_noticed_within_a_second() -> None:
    assert _kills(200) == []


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_thousand_consoles_killed_while_they_compute_or_print_are_noticed_within_a_second() -> None:
    assert _kills(1000) == []


_HOSTILE = (
    "import os; os.kill(os.getpid(), 9)",
    "import subprocess; p = subprocess.Popen(['sleep', '999'], start_new_session=True)",
    "import os; os.fork(); os.fork()",
    "x = bytearray(10**10)",
    "open('/dev/shm/left', 'w').write('x'); open('left', 'w').close()",
)


def _sessions(count: int) -> None:
    async def one(sandbox: Sandbox, number: int, gate: asyncio.Semaphore) -> None:
        async with gate, sandbox.session() as session:
            for line in (f"print({number})", _HOSTILE[number // 5 % len(_HOSTILE)] if number % 5 == 0 else "2"):
                if not session.ended:
                    await session.push(line)

    async def main() -> None:
        async with open_sandbox("local", limits=LIMITS) as sandbox:
            gate = asyncio.Semaphore(16)
            await asyncio.gather(*(one(sandbox, number, gate) for number in range(count)))

    asyncio.run(main())


@pytest.mark.heavy
def test_sessions_a_fifth_of_them_hostile_leave_nothing_behind() -> None:
    call_in_new_process(_compare_sessions, "60")


def _compare_sessions(count: str) -> None:
    _sessions(2)  # whatever the first use of a library opens for good
    before = _held()
    _sessions(int(count))
    _assert_nothing_left(before)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_two_thousand_sessions_leave_nothing_behind() -> None:
    call_in_new_process(_compare_sessions, "2000")


_HOST = """
import asyncio, os, sys
from repl_rl.sandbox import open_sandbox

async def main(kind):
    async with open_sandbox(kind, warm=3) as sandbox:
        async with sandbox.session() as first, sandbox.session() as second:
            await first.push("import subprocess; p = subprocess.Popen(['sleep', '4242'])")
            await asyncio.gather(second.push("while True: pass"), first.push("1"))
            running = asyncio.create_task(second.push(""))
            for _ in range(1000):
                await asyncio.sleep(0)  # the line is on its way, and runs
            print("up", flush=True)
            await running

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("kind", ["local", "unsafe"])
def test_a_host_that_is_killed_takes_everything_with_it(kind: str) -> None:
    call_in_new_process(_kill_host, kind)


def _kill_host(kind: str) -> None:
    before = _held()
    host = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_HOST), kind], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert host.stdout is not None
    with host, host.stdout:
        assert host.stdout.readline() == "up\n"
        family = psutil.Process(host.pid).children(recursive=True)
        assert len(family) >= 4
        host.kill()
    assert psutil.wait_procs(family, timeout=10)[1] == []
    _assert_nothing_left(before)


def test_a_cancelled_rollout_leaves_nothing_behind() -> None:
    call_in_new_process(_cancel_rollouts)


def _cancel_rollouts() -> None:
    async def main() -> None:
        async with open_sandbox("local", limits=LIMITS, warm=1) as sandbox:

            async def rollout() -> None:
                async with sandbox.session() as session:
                    await session.push("import time; time.sleep(100)")

            tasks = [asyncio.create_task(rollout()) for _ in range(6)]
            for task in tasks[::2]:
                await _turns(2000)  # some wait for a console, some run a line
                task.cancel()
            for task in tasks[1::2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)

    asyncio.run(main())
    before = _held()
    asyncio.run(main())
    _assert_nothing_left(before)


def _splices(lines: int, sessions: int) -> int:
    """Push unique tokens through many consoles at once, with threads that print late. Returns the lines compared."""

    async def one(sandbox: Sandbox, name: int, count: int) -> int:
        async with sandbox.session() as session:
            await session.push("import threading, sys")
            for number in range(count):
                token = f"{name}-{number}-{random.getrandbits(64):x}"
                late = f"; threading.Timer(0.001, print, ['[late-{name}]']).start()" if number % 10 == 0 else ""
                result = await session.push(f"print('{token}'){late}")
                # A thread's print is two writes, which may fall between the line's own text and its newline.
                assert result.text.replace(f"[late-{name}]", "").split() == [token], result
        return count

    async def main() -> int:
        async with open_sandbox("local", warm=4) as sandbox:
            return sum(await asyncio.gather(*(one(sandbox, name, lines // sessions) for name in range(sessions))))

    return asyncio.run(main())


def test_no_line_is_answered_with_another_lines_output() -> None:
    assert _splices(1600, 16) == 1600


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_no_line_of_a_hundred_thousand_is_answered_with_another_lines_output() -> None:
    assert _splices(100_000, 32) == 100_000
