"""Isolation probes: lines that test, from inside a console, which parts of the host it can see or change."""

import asyncio
import json
import os
import platform
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from repl_rl.sandbox.base import Sandbox
from repl_rl.sandbox.isolated_subprocess import ENVIRONMENT
from repl_rl.utils.package_data import find_asset

_REFUSED = "refused\n"
_VARIABLES = {*ENVIRONMENT, "LC_CTYPE", "PWD", "TMPDIR"}
_LIBRARY = "import ctypes; c = ctypes.CDLL(None, use_errno=True)"
_HARMLESS_CALLS = (
    "mount(b'none', b'/no/such/place', b'tmpfs', 0, 0)",
    "umount2(b'/no/such/place', 0)",
    "unshare(0)",
    "setns(-1, 0)",
    "ptrace(16, 4194304, 0, 0)",
    "chroot(b'/no/such/place')",
    "syscall(321, 999, 0, 0)",
    "syscall(425, 0, 0)",
    "fcntl(-1, 1024, 1)",
    "fcntl(-1, 1040, 0)",
    "fcntl(-1, 1026, 1)",
    "fcntl(-1, 1031, 4096)",
    "socketpair(2, 1, 0, None)",
    "sched_setscheduler(1, 5, None)",
    "sched_setparam(1, None)",
    "sched_setaffinity(1, 8, None)",
    "setpriority(-1, 1, 0)",
    "setpriority(2, -2, 0)",
)
"""System calls that a filter refuses by their number, or by numbers among their arguments. Without a filter they fail
with another error, or do nothing: probes must not change a machine that turns out not to be isolated."""
_MACHINE_WIDE = (
    *("semget", "semctl", "semop", "semtimedop", "io_setup", "io_destroy", "io_submit", "io_cancel", "io_getevents"),
    *("io_pgetevents", "inotify_init1", "inotify_add_watch", "inotify_rm_watch", "cachestat", "listns"),
    *("open_tree_attr", "statmount", "listmount", "lsm_get_self_attr", "lsm_set_self_attr", "lsm_list_modules"),
    *("set_mempolicy_home_node", "syncfs"),
)
"""Calls on resources that are counted per machine or user, and newer calls that a filter must know by number. Each is
made with arguments of -1, which no kernel accepts."""
HOMES = (
    "import os, sys",
    "pythons = {os.path.abspath(prefix) for prefix in (sys.prefix, sys.base_prefix)}",
    "def others(folder):",
    "    if folder in pythons: return []",
    "    if not any(python.startswith(folder + '/') for python in pythons): return [folder]",
    "    return [other for name in os.listdir(folder) for other in others(folder + '/' + name)]",
    "",
    "[other for name in (os.listdir('/home') if os.path.exists('/home') else ()) for other in others('/home/' + name)]",
)
"""Lines that list what is in home folders, except this Python, which may be installed in a home folder."""
_TERMINALS = 16
"""Maximum pseudo terminals of one console."""
_SPACES = ("pid", "ipc", "mnt", "net", "user", "uts")


@dataclass(frozen=True, slots=True)
class IsolationProbe:
    """One guarantee: after `lines`, the last one prints `expected`."""

    name: str
    lines: tuple[str, ...]
    expected: str


@dataclass(frozen=True, slots=True)
class HostSecrets:
    """Objects of the host that a console must not find."""

    secret_file: Path
    port: int
    pid: int
    secret: str


@asynccontextmanager
async def open_host_secrets() -> AsyncIterator[HostSecrets]:
    """Yield a file, a listening socket and a process with a secret in its environment, within the context."""
    secret = secrets.token_hex(16)
    with tempfile.NamedTemporaryFile("w", prefix="canary-") as file, socket.create_server(("127.0.0.1", 0)) as server:
        file.write(secret)
        file.flush()
        process = await asyncio.create_subprocess_exec("sleep", "1000", env={"SECRET": secret})
        try:
            yield HostSecrets(Path(file.name), server.getsockname()[1], process.pid, secret)
        finally:
            process.kill()
            await process.wait()


def build_probes(outside: HostSecrets) -> list[IsolationProbe]:
    """Return every guarantee of isolation that can be checked from inside one console."""
    return [
        *_build_privilege_probes(),
        *_build_network_probes(outside),
        *_build_other_process_probes(outside),
        *_build_file_probes(outside),
    ]


def _build_privilege_probes() -> list[IsolationProbe]:
    zero = "['0000000000000000']\n"
    return [
        # User, groups and capabilities.
        IsolationProbe(
            "uid is not 0", ("import os, sys, socket, time", "0 in (*os.getresuid(), *os.getresgid())"), "False\n"
        ),
        IsolationProbe("no supplementary group of root", ("import os", "0 in os.getgroups()"), "False\n"),
        *(
            IsolationProbe(f"no capabilities ({name})", (_make_status_line(name),), zero)
            for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
        ),
        IsolationProbe("no new privileges", (_make_status_line("NoNewPrivs"),), "['1']\n"),
        # System calls that the filter refuses.
        IsolationProbe("seccomp filter is on", (_make_status_line("Seccomp"),), "['2']\n"),
        *(
            # A filter refuses with errno 1 (EPERM). Without a filter, a call fails with another error, or succeeds.
            IsolationProbe(f"refused: {call}", (_LIBRARY, f"c.{call}, ctypes.get_errno() == 1"), "(-1, True)\n")
            for call in _HARMLESS_CALLS
        ),
        *(
            IsolationProbe(
                f"refused: {name}",
                (_LIBRARY, f"c.syscall({number}, {', '.join(['ctypes.c_long(-1)'] * 5)}), ctypes.get_errno() == 1"),
                "(-1, True)\n",
            )
            for name, number in _list_machine_wide_calls()
        ),
        # Choice of the process that the Linux kernel ends if memory is out.
        IsolationProbe("first to go where memory is out", ("open('/proc/self/oom_score_adj').read()",), "'1000\\n'\n"),
        IsolationProbe(
            "stays the first to go",
            _make_refused_lines("f = open('/proc/self/oom_score_adj', 'w'); f.write('0'); f.close()"),
            _REFUSED,
        ),
    ]


def _list_machine_wide_calls() -> list[tuple[str, int]]:
    """Return the names in `_MACHINE_WIDE` and their numbers on this machine, which are valid inside, too."""
    table = json.loads(find_asset("sandbox/repl_kernel/denied_syscalls.json").read_text())["syscalls"]
    return [(name, table[name][platform.machine()]) for name in _MACHINE_WIDE]


def _build_loopback_probe(address: str) -> IsolationProbe:
    lines = (
        "import socket",
        f"s = socket.create_server(({address!r}, 0), family=socket.{'AF_INET6' if ':' in address else 'AF_INET'})",
        "c = socket.create_connection(s.getsockname()[:2], 2); n = c.send(b'hello')",
        "s.accept()[0].recv(9)",
    )
    return IsolationProbe(f"own loopback is up ({address})", lines, "b'hello'\n")


def _build_network_probes(outside: HostSecrets) -> list[IsolationProbe]:
    # Consoles have ::1 only if the kernel has IPv6.
    addresses = ("127.0.0.1", "::1") if os.path.exists("/proc/net/if_inet6") else ("127.0.0.1",)
    return [
        *map(_build_loopback_probe, addresses),
        IsolationProbe("no route", ("open('/proc/net/route').read().count(chr(10)) <= 1",), "True\n"),
        IsolationProbe(
            "DNS fails fast",
            (
                "import socket, time; t = time.time()",
                *_make_refused_lines("socket.getaddrinfo('example.org', 80)"),
                "time.time() - t < 1",
            ),
            "True\n",
        ),
        # 192.0.2.1 is reserved for documentation, so no machine answers there.
        IsolationProbe(
            "no way out",
            ("import socket", *_make_refused_lines("socket.create_connection(('192.0.2.1', 80), 2)")),
            _REFUSED,
        ),
        IsolationProbe(
            "host's loopback is not ours",
            ("import socket", *_make_refused_lines(f"socket.create_connection(('127.0.0.1', {outside.port}), 2)")),
            _REFUSED,
        ),
        IsolationProbe(
            "no other socket families",
            ("import socket", *_make_refused_lines("socket.socket(40, socket.SOCK_STREAM)")),
            _REFUSED,
        ),
    ]


def _build_other_process_probes(outside: HostSecrets) -> list[IsolationProbe]:
    return [
        # Processes of the host and of siblings, and the supervisor.
        IsolationProbe(
            "few processes are visible", ("import os", "sum(n.isdigit() for n in os.listdir('/proc')) <= 3"), "True\n"
        ),
        IsolationProbe(
            "no process of the host", (f"import os; p = '/proc/{outside.pid}'", "os.path.exists(p)"), "False\n"
        ),
        IsolationProbe(
            "no secret in any environment",
            (
                "import glob",
                "def r(p):",
                "    try: return open(p, 'rb').read()",
                "    except OSError: return b''",
                "",
                f"a, b = b'{outside.secret[:16]}', b'{outside.secret[16:]}'",
                "any(a in r(p) and b in r(p) for p in glob.glob('/proc/*/environ'))",
            ),
            "False\n",
        ),
        IsolationProbe(
            "cannot read the supervisor's memory", _make_refused_lines("open('/proc/1/mem', 'rb')"), _REFUSED
        ),
        # Names of the machine and of its paths.
        IsolationProbe(
            "host name is the console's",
            ("import os, platform, socket", "{os.uname().nodename, platform.node(), socket.gethostname()}"),
            "{'console'}\n",
        ),
        IsolationProbe(
            "arguments name nothing of the host",
            (
                "import sys",
                "words = [open(f'/proc/{p}/cmdline').read() for p in (1, 'self')] + sys.orig_argv",
                "any('/' in word.replace(sys.executable, '') for word in words)",
            ),
            "False\n",
        ),
        # Pseudo terminals.
        IsolationProbe("no terminal of others", ("import os", "{*os.listdir('/dev/pts')} - {'ptmx'}"), "set()\n"),
        IsolationProbe(
            "terminals work",
            ("import os", "a, b = os.openpty()", "os.ttyname(b), os.write(a, b'x\\n'), os.read(b, 9)"),
            "('/dev/pts/0', 2, b'x\\n')\n",
        ),
        IsolationProbe(
            "terminals are few",
            (
                "import os",
                "taken = []",
                "try:",
                "    while True: taken.append(os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY))",
                "except OSError: pass",
                "",
                f"0 < len(taken) <= {_TERMINALS}",
            ),
            "True\n",
        ),
        IsolationProbe("environment is cleared", ("import os", f"sorted(set(os.environ) - {_VARIABLES!r})"), "[]\n"),
    ]


def _build_file_probes(outside: HostSecrets) -> list[IsolationProbe]:
    return [
        # Folders that no console may write to.
        *(
            IsolationProbe(f"read-only: {place}", ("import os", f"os.access({place!r}, os.W_OK)"), "False\n")
            for place in ("/", "/usr", "/usr/lib", "/etc", "/dev", "/opt", "/run", "/proc/sys/kernel/hostname")
        ),
        IsolationProbe("read-only: Python itself", ("import os", "os.access(os.__file__, os.W_OK)"), "False\n"),
        # Files that no console may see.
        IsolationProbe(
            "no file of the host", ("import os", f"os.path.exists({str(outside.secret_file)!r})"), "False\n"
        ),
        IsolationProbe("home folders hold nothing but this Python", HOMES, "[]\n"),
        IsolationProbe(
            "no answers of built-in tasks",
            _make_refused_lines("from repl_rl.tasks.generated_tasks import generate", "ImportError"),
            _REFUSED,
        ),
        IsolationProbe("no passwords", _make_refused_lines("open('/etc/shadow')"), _REFUSED),
        IsolationProbe(
            "no block device",
            ("import os, stat", "any(stat.S_ISBLK(os.lstat('/dev/' + n).st_mode) for n in os.listdir('/dev'))"),
            "False\n",
        ),
        IsolationProbe("no device memory", ("import os", "os.path.exists('/dev/mem')"), "False\n"),
        # The only folder to write to.
        IsolationProbe(
            "scratch folder is empty and ours", ("import os", "os.listdir(), os.access('.', os.W_OK)"), "([], True)\n"
        ),
    ]


def _make_status_line(field: str) -> str:
    return f"[l.split()[1] for l in open('/proc/self/status') if l.startswith('{field}:')]"


def _make_refused_lines(code: str, error: str = "OSError") -> tuple[str, ...]:
    return ("try:", f"    {code}; print('DONE')", f"except {error}: print('refused')", "")


async def run_probe(sandbox: Sandbox, probe: IsolationProbe) -> str:
    """Return an empty string if the guarantee holds, else the text that was printed instead."""
    async with sandbox.session() as session:
        text = ""
        for line in probe.lines:
            text = (await session.push(line)).text
            if session.ended:
                return f"the session ended at {line!r}: {text}"
    return "" if text == probe.expected else text or "(nothing)"


async def check_foreign_terminal(sandbox: Sandbox) -> str:
    """Return an empty string if a console cannot reach the terminal of a sibling, else the text that it printed."""
    async with sandbox.session() as first, sandbox.session() as second:
        for session in (first, second):
            await session.push("import os")
        path = (await first.push("a, b = os.openpty(); print(os.ttyname(b))")).text.strip()
        terminals = (await second.push("{*os.listdir('/dev/pts')} - {'ptmx'}")).text
        if terminals != "set()\n":
            return f"a sibling's terminals are seen: {terminals}"
        # Write to the sibling's terminal by its path; the first console must read nothing.
        await second.push("a, b = os.openpty()")
        await second.push(f"_ = os.write(os.open({path!r}, os.O_RDWR | os.O_NOCTTY), b'secret')")
        await first.push("os.set_blocking(a, False)")
        for line in _make_refused_lines("print(os.read(a, 9))"):
            output = (await first.push(line)).text
    return "" if output == _REFUSED else output


def read_host_namespaces() -> dict[str, str]:
    """Return the namespaces of this process."""
    return {space: os.readlink(f"/proc/self/ns/{space}") for space in _SPACES}


async def read_console_namespaces(sandbox: Sandbox, count: int) -> list[dict[str, str]]:
    """Return the namespaces of `count` consoles that live at the same time."""

    async def read_one(barrier: asyncio.Barrier) -> dict[str, str]:
        async with sandbox.session() as session:
            await session.push("import os")
            names = [
                (await session.push(f"print(os.readlink('/proc/self/ns/{space}'))")).text.strip() for space in _SPACES
            ]
            # Keep the console open until all have answered: ids of namespaces can be reused.
            await barrier.wait()
        return dict(zip(_SPACES, names, strict=True))

    barrier = asyncio.Barrier(count)
    return await asyncio.gather(*(read_one(barrier) for _ in range(count)))


def find_shared_namespaces(namespaces: Sequence[dict[str, str]]) -> list[str]:
    """Return the kinds of namespaces that a console shares with another one or with the host."""
    everybody = [read_host_namespaces(), *namespaces]
    return [space for space in _SPACES if len({console[space] for console in everybody}) < len(everybody)]
