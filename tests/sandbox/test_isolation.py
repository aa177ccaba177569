"""Isolation is asserted from inside a live console; and without it, the same probes fail."""

import asyncio
import os
from pathlib import Path

import pytest

from repl_rl.record.line import LineStatus
from repl_rl.sandbox import Limits, open_sandbox
from repl_rl.sandbox.base import PushResult
from repl_rl.sandbox.conformance import Row, isolation, limits
from repl_rl.sandbox.conformance.limits import CHECK_LIMITS
from tests.processes import descendants, wait_for
from tests.sandbox.places import ask, environment, site_packages

STILL_WORK = (
    ("import multiprocessing as mp, asyncio, os, pty, socket, subprocess, sys, threading, urllib.request", ""),
    ("with mp.Pool(2) as pool: pool.map(abs, [-1, -2])\n", "[1, 2]\n"),
    ("lock = mp.Lock(); lock.acquire(), lock.acquire(timeout=0.01), lock.release()", "(True, False, None)\n"),
    ("queue = mp.Queue(); queue.put(6); queue.get()", "6\n"),
    ("with mp.Manager() as manager: len(manager.list([1, 2]))\n", "2\n"),
    ("from multiprocessing.managers import BaseManager, SharedMemoryManager", ""),
    ("manager = BaseManager(('127.0.0.1', 0), b'x'); manager.start(); manager.shutdown()", ""),
    ("from http.server import HTTPServer, BaseHTTPRequestHandler as Base", ""),
    ("class Page(Base):", ""),
    ("    def do_GET(self): self.send_response(200); self.end_headers(); self.wfile.write(b'page')", ""),
    ("    def log_message(self, *_): pass", ""),
    ("", ""),
    ("server = HTTPServer(('localhost', 0), Page)", ""),
    ("threading.Thread(target=server.serve_forever, daemon=True).start()", ""),
    ("urllib.request.urlopen(f'http://localhost:{server.server_port}/').read()", "b'page'\n"),
    ("async def echo(reader, writer): writer.write(await reader.read(9)); writer.close()\n", ""),
    ("async def main():", ""),
    ("    server = await asyncio.start_server(echo, '127.0.0.1', 0)", ""),
    ("    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])", ""),
    ("    writer.write(b'hello'); return await reader.read()", ""),
    ("", ""),
    ("asyncio.run(main())", "b'hello'\n"),
    ("def talk():", ""),
    ("    pid, terminal = pty.fork()", ""),
    ("    if pid == 0: os.execv('/bin/sh', ['sh', '-c', 'tty; read x; echo got $x'])", ""),
    ("    os.write(terminal, b'mine\\n'); text = b''", ""),
    ("    while b'got' not in text: text += os.read(terminal, 99)", ""),
    ("    return text.replace(b'mine\\r\\n', b''), os.waitpid(pid, 0)[1]", ""),
    ("", ""),
    ("b'/dev/pts/' in talk()[0]", "True\n"),
    ("p = subprocess.Popen([sys.executable, '-c', 'print(input())'], stdin=-1, stdout=-1)", ""),
    ("p.communicate(b'later')", "(b'later\\n', None)\n"),
)
"""What ordinary programs do with what the probes are about: locks, loopback, terminals, processes kept across lines."""

WATCHER = """
import ctypes, os
libc = ctypes.CDLL(None)
forked = []
os.register_at_fork(before=lambda: forked.append(libc.prctl(3, 0, 0, 0, 0)))  # PR_GET_DUMPABLE
"""


def _failed(rows: list[Row]) -> str:
    return "\n".join(f"{row.name}: {row.detail}" for row in rows if not row.passed)


def test_a_local_console_sees_and_reaches_nothing_of_the_host_or_of_a_sibling() -> None:
    async def main() -> list[Row]:
        async with open_sandbox("local", warm=2) as sandbox:
            return await isolation(sandbox)

    rows = asyncio.run(main())
    assert len(rows) >= 75
    assert not _failed(rows)


def test_a_supervisor_is_closed_to_its_console_before_that_console_exists(tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    (site_packages(tmp_path / "env") / "watcher.py").write_text(WATCHER)
    lines = ["import watcher", "watcher.forked[-1], watcher.libc.prctl(3, 0, 0, 0, 0)"]
    assert ask(python, lines, preload=["watcher"]) == ["", "(0, 1)\n"]


def test_ordinary_programs_still_work() -> None:
    async def main() -> list[tuple[str, str]]:
        limits = Limits(line_timeout_s=60)
        async with open_sandbox("local", limits=limits, warm=0) as sandbox, sandbox.session() as session:
            said = []
            for cell, _ in STILL_WORK:
                for line in cell.split("\n"):
                    text = (await session.push(line)).text
                said.append((cell, text))
        return said

    assert asyncio.run(main()) == list(STILL_WORK)


def test_the_probes_notice_a_sandbox_that_isolates_nothing() -> None:
    async def main() -> list[Row]:
        async with open_sandbox("unsafe", warm=2) as sandbox:
            return await isolation(sandbox)

    failed = [row.name for row in asyncio.run(main()) if not row.passed]
    assert {"no new privileges", "seccomp filter is on", "no process of the host", "no file of the host"} <= {*failed}
    assert {"host's loopback is not ours", "namespaces of its own", "refused: unshare(0)"} <= {*failed}
    assert {"refused: semget", "refused: io_setup", "refused: inotify_init1", "refused: statmount"} <= {*failed}
    assert {"terminals of its own", "terminals are few", "stays the first to go"} <= {*failed}
    assert {"host name is the console's", "arguments name nothing of the host"} <= {*failed}


HIDE = """
import os, signal, time
def hide():
    os.setsid(); signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for n in range(10**9):
        open('n', 'w').write(str(n))
        pid = os.fork()
        while pid == 0 and time.process_time() < SECONDS: pass
        if pid == 0: os._exit(0)
        while os.path.exists(f'/proc/{pid}'): time.sleep(0.001)

os.fork() or hide()
"""


SPIN = [
    "threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()",
    "0 in (os.fork(), os.fork()) and [None for _ in iter(int, 1)]",
]
"""Work for ever, on no line's time: in the console's own process, and in three other ones. The system ends each process
at the limit, so one other process alone never makes the console exceed it."""


@pytest.mark.parametrize(("seconds", "most_s"), [(0.1, 4.0), (0.005, 2.0)])
def test_processes_that_hide_from_the_count_use_up_the_cpu_time_too(seconds: float, most_s: float) -> None:
    """The system counts in steps of 0.01 s, and keeps nothing of what ended where SIGCHLD is ignored."""

    async def main() -> tuple[PushResult, float]:
        limits, used_s = Limits(cpu_s=1), 0.0
        async with open_sandbox("local", limits=limits, warm=0) as sandbox, sandbox.session() as session:
            for line in HIDE.replace("SECONDS", str(seconds)).split("\n")[1:]:
                result = await session.push(line)
            while not session.ended:
                result = await session.push("time.sleep(0.2); print(open('n').read() or 0)")
                used_s = seconds * int(result.text) if result.text.strip().isdigit() else used_s
        return result, used_s

    result, used_s = asyncio.run(main())
    assert result.status is LineStatus.TIMEOUT
    assert used_s < most_s  # 22.6 and 2.8 s where nothing but the system's own count is added up


@pytest.mark.parametrize("spin", SPIN)
def test_a_console_that_works_between_its_lines_is_ended_while_nobody_sends_one(spin: str) -> None:
    async def main() -> tuple[PushResult, PushResult]:
        limits = Limits(cpu_s=1)
        async with open_sandbox("local", limits=limits, warm=0) as sandbox, sandbox.session() as session:
            before = {*descendants(os.getpid())}
            started = [await session.push(line) for line in ("import os, threading", spin)][-1]
            await asyncio.to_thread(wait_for, lambda: before - {*descendants(os.getpid())}, None, 60)
            return started, await session.push("1")

    started, result = asyncio.run(main())
    assert started.status is LineStatus.OK
    assert result.status is LineStatus.TIMEOUT


def test_every_limit_ends_in_its_own_status() -> None:
    async def main() -> list[Row]:
        async with open_sandbox("local", limits=CHECK_LIMITS, warm=2) as sandbox:
            return await limits(sandbox)

    assert not _failed(asyncio.run(main()))
