"""Isolation is asserted from inside a live console; and without it, the same probes fail."""

import asyncio
import errno
import json
import os
import runpy
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from repl_rl.sandbox import Limits, open_sandbox
from repl_rl.sandbox.base import LineResult
from repl_rl.sandbox.conformance import SandboxCheckResult, check_isolation
from repl_rl.trajectory.trajectory import LineStatus
from repl_rl.utils.package_data import find_asset
from tests.support.processes import descendants, wait_for
from tests.support.sandbox.environments import ask, environment, site_packages

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

STILL_ALLOWED = (
    ("import fcntl, os, socket", ""),
    ("f = open('f', 'w'); fcntl.lockf(f, fcntl.LOCK_EX); os.fsync(f.fileno()); os.fdatasync(f.fileno())", ""),
    ("fcntl.fcntl(os.pipe()[1], fcntl.F_GETPIPE_SZ) > 0, fcntl.fcntl(f, fcntl.F_GETFD)", "(True, 1)\n"),
    ("a, b = socket.socketpair(); a.send(b'pair'), b.recv(9)", "(4, b'pair')\n"),
    ("for pid in (0, os.getpid()): os.sched_setaffinity(pid, os.sched_getaffinity(0))\n", ""),
    ("for pid in (0, os.getpid()): os.setpriority(os.PRIO_PROCESS, pid, os.nice(0))\n", ""),
    ("for pid in (0, os.getpid()): os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))\n", ""),
    ("os.sync()", ""),
)
"""What remains allowed of calls that are refused for some arguments. `os.sync` cannot fail; it has no effect here."""

TOUCH_SUPERVISOR = (
    *("import os", "before = os.sched_getscheduler(1), os.sched_getaffinity(1), os.getpriority(0, 1)"),
    *("def attempt(call, *arguments):", "    try: call(*arguments); return 'DONE'"),
    *("    except PermissionError: return 'refused'", ""),
    "print(attempt(os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0)))",
    "print(attempt(os.sched_setaffinity, 1, {0}))",
    "print(attempt(os.setpriority, os.PRIO_PROCESS, 1, 19))",
    "print(attempt(os.setpriority, os.PRIO_USER, 0, 19))",
    "before == (os.sched_getscheduler(1), os.sched_getaffinity(1), os.getpriority(0, 1))",
)

OVERFLOW_SIGNALS = (
    *("import ctypes, os, signal", "c = ctypes.CDLL(None)", "_ = signal.pthread_sigmask(signal.SIG_BLOCK, {40})"),
    "[c.sigqueue(os.getpid(), 40, None) for _ in range(2000)].count(0)",
)

LEASE = (
    *("import fcntl, json", "f = open(json.__file__)"),
    # EPERM is the filter's. For a file of another owner, the Linux kernel itself would say EACCES.
    *("try: fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_RDLCK)", "except OSError as error: print(error.errno)", ""),
)

WATCHER = """
import ctypes, os
libc = ctypes.CDLL(None)
forked = []
os.register_at_fork(before=lambda: forked.append(libc.prctl(3, 0, 0, 0, 0)))  # PR_GET_DUMPABLE
"""


def _failed(rows: list[SandboxCheckResult]) -> str:
    return "\n".join(f"{row.name}: {row.detail}" for row in rows if not row.passed)


def test_a_local_console_sees_and_reaches_nothing_of_the_host_or_of_a_sibling() -> None:
    async def main() -> list[SandboxCheckResult]:
        async with open_sandbox("local", warm=2) as sandbox:
            return await check_isolation(sandbox)

    rows = asyncio.run(main())
    assert len(rows) >= 86
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


def _push_all(lines: Sequence[str], limits: Limits | None = None) -> list[LineResult]:
    async def main() -> list[LineResult]:
        async with (
            open_sandbox("local", limits=limits or Limits(line_timeout_s=60), warm=0) as sandbox,
            sandbox.session() as session,
        ):
            return [await session.push(line) for line in lines]

    return asyncio.run(main())


def test_calls_that_are_refused_for_some_arguments_remain_allowed_for_others() -> None:
    lines = [line for cell, _ in STILL_ALLOWED for line in cell.split("\n")]
    assert "".join(result.text for result in _push_all(lines)) == "".join(text for _, text in STILL_ALLOWED)


def test_a_console_cannot_slow_its_supervisor() -> None:
    assert "".join(result.text for result in _push_all(TOUCH_SUPERVISOR)) == 4 * "refused\n" + "True\n"


def test_a_console_cannot_delay_the_opening_of_a_package_file() -> None:
    assert "".join(result.text for result in _push_all(LEASE)) == f"{errno.EPERM}\n"


def test_signals_that_wait_are_few() -> None:
    assert 0 < int(_push_all(OVERFLOW_SIGNALS)[-1].text) <= 256


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filters_of_both_machines_and_of_docker_refuse_the_same_arguments(machine: str) -> None:
    ours = runpy.run_path(str(find_asset("sandbox/repl_kernel/seccomp.py")))
    refusals: dict[str, tuple[dict[str, int], dict[int, tuple[int, ...]]]] = ours["REFUSED_ARGUMENTS"]
    profile = json.loads(find_asset("sandbox/seccomp.json").read_text())["syscalls"]
    by_docker = {
        (name, rule["args"][0]["index"], rule["args"][0]["valueTwo"])
        for rule in profile
        for name in rule["names"]
        if "args" in rule and rule["args"][0]["op"] == "SCMP_CMP_MASKED_EQ"
    }
    here = [
        (name, argument, value)
        for name, (_, values) in refusals.items()
        for argument, listed in values.items()
        for value in listed
    ]
    assert by_docker == {*here}
    # Docker's own processes inside need these, before they apply the filter.
    needed = {"mount", "seccomp", "sethostname", "umount2", "unshare"}
    assert {*profile[0]["names"]} == {*ours["list_denied_calls"]()} - needed
    pair = next(rule for rule in profile if rule["names"] == ["socketpair"])
    assert pair["args"] == [{"index": 0, "value": 1, "op": "SCMP_CMP_NE"}]
    code = ours["build_filter"](machine)
    refused, allowed = 0x50001, 0x7FFF0000
    for name, argument, value in here:
        number = refusals[name][0][machine]
        assert _filter(code, machine, number, {argument: value}) == refused
        assert _filter(code, machine, number, {argument: value | 1 << 32}) == refused
        assert _filter(code, machine, number, {}) == allowed
    number = {"x86_64": 53, "aarch64": 199}[machine]
    assert [_filter(code, machine, number, {0: family}) for family in (1, 2, 16)] == [allowed, refused, refused]
    number = {"x86_64": 41, "aarch64": 198}[machine]
    assert [_filter(code, machine, number, {0: family}) for family in (1, 2, 16, 40)] == [*[allowed] * 3, refused]


def _filter(code: bytes, machine: str, number: int, arguments: dict[int, int]) -> int:
    """Return what a filter returns for a call: the instructions that ours use, as the Linux kernel executes them."""
    words = [arguments.get(at, 0) for at in range(6)]
    data = struct.pack("<IIQ6Q", number, {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine], 0, *words)
    at, loaded = 0, 0
    while True:
        kind, if_true, if_false, value = struct.unpack_from("<HBBI", code, 8 * at)
        at += 1
        if kind == 0x06:
            return int(value)
        if kind == 0x20:
            (loaded,) = struct.unpack_from("<I", data, value)
        else:
            met = {0x15: loaded == value, 0x35: loaded >= value, 0x45: loaded & value != 0}[kind]
            at += if_true if met else if_false


def test_a_console_that_ignores_the_signal_of_the_cpu_limit_times_out_too() -> None:
    lines = ("import signal; _ = signal.signal(signal.SIGXCPU, signal.SIG_IGN)", "while 1: pass", "")
    result = _push_all(lines, Limits(cpu_s=1, line_timeout_s=60))[-1]
    assert result.status is LineStatus.TIMEOUT


def test_the_probes_notice_a_sandbox_that_isolates_nothing() -> None:
    async def main() -> list[SandboxCheckResult]:
        async with open_sandbox("unsafe", warm=2) as sandbox:
            return await check_isolation(sandbox)

    failed = [row.name for row in asyncio.run(main()) if not row.passed]
    assert {"no new privileges", "seccomp filter is on", "no process of the host", "no file of the host"} <= {*failed}
    assert {"host's loopback is not ours", "namespaces of its own", "refused: unshare(0)"} <= {*failed}
    assert {"refused: semget", "refused: io_setup", "refused: inotify_init1", "refused: statmount"} <= {*failed}
    assert {"refused: syncfs", "refused: fcntl(-1, 1024, 1)", "refused: sched_setparam(1, None)"} <= {*failed}
    assert {"terminals of its own", "terminals are few", "stays the first to go"} <= {*failed}
    assert {"host name is the console's", "arguments name nothing of the host"} <= {*failed}


SPIN = [
    "threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()",
    "0 in (os.fork(), os.fork()) and [None for _ in iter(int, 1)]",
]
"""Work for ever, on no line's time: in the console's own process, and in three other ones. The system ends each process
at the limit, so one other process alone never makes the console exceed it."""


@pytest.mark.parametrize("spin", SPIN)
def test_a_console_that_works_between_its_lines_is_ended_while_nobody_sends_one(spin: str) -> None:
    async def main() -> tuple[LineResult, LineResult]:
        limits, others = Limits(cpu_s=1), {*descendants(os.getpid())}
        async with open_sandbox("local", limits=limits, warm=0) as sandbox, sandbox.session() as session:
            await session.push("import os, threading")
            # Processes that only start a console have ended after its first line.
            before = {*descendants(os.getpid())} - others
            started = await session.push(spin)
            await asyncio.to_thread(wait_for, lambda: before - {*descendants(os.getpid())}, None, 60)
            return started, await session.push("1")

    started, result = asyncio.run(main())
    assert started.status is LineStatus.OK
    assert result.status is LineStatus.TIMEOUT
