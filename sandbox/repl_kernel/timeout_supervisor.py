"""Supervisor of one console: process 1 of its namespaces.

It holds one end of a socket, and the host holds the other. The host sends orders to interrupt or to kill. The
supervisor reports how the console died, and its last output. If the host is gone, the supervisor ends, and everything
in its namespaces with it.

`CpuTimeSampler` measures the CPU time of all processes of the console together, in two figures. One adds up the times
that the system reports for live processes and for those that were waited for; it is exact for ordinary programs. Of a
process whose parent ignores SIGCHLD, the system keeps nothing once it has ended. The other figure samples: a process
that is new to a look counts as if it ran since the previous look, at its own rate. Short processes are seen as rarely
as they are short, so this is right on average, and the figures agree.
"""

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import time
from dataclasses import dataclass

from repl_kernel.output_capture import CapturedOutput, OutputCapture

INTERRUPT, KILL = b"I", b"K"
"""Orders of the host."""
FORKED, READY, INTERRUPTED, TEXT, DIED = b"B", b"R", b"S", b"T", b"D"
"""Reports to the host: the first byte of each packet."""
_PACKET_BYTES = 32_768
_SEND_TIMEOUT_S = 2.0
"""Time for the host to take a packet, seconds."""
_MIN_LOOK_S, _MAX_LOOK_S = 0.25, 1.0
"""Seconds between two looks at the CPU time: while the console has other processes, and while it has none."""

# Constants of the CPU time.

_TICKS = os.sysconf("SC_CLK_TCK")
_MAX_NEW_PROCESS_S = 0.5
"""Maximum time that is counted for a process that is new to a look, seconds, per core that it uses."""
_SAMPLE_WEIGHT = 0.8
"""Weight of the sampled figure, which scatters."""
_FULL_LOOK_PERIOD = 10
"""Period of whole looks, in looks. They are needed because process numbers are reused."""
_LAST_PID = "/proc/loadavg"
"""File whose last word is the number of the youngest process or thread of the namespace."""


@dataclass(frozen=True)
class ConsoleFolders:
    """Folders of a console."""

    folder: str
    """Folder of its socket and its output file."""
    scratch: str
    """Its working directory."""
    is_temporary: bool
    """True if the folder is in the machine's file system and must be removed at the end."""
    loopback_ready_fd: int = -1
    """Descriptor of an event that is set when the console's loopback interface is up. -1 means the machine's
    interface."""


def send_handles(host: socket.socket, folders: ConsoleFolders) -> None:
    """Send the host a handle on this process, and one on the folder in which the console will listen."""
    pidfd = os.pidfd_open(os.getpid())
    folder = os.open(folders.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    socket.send_fds(host, [FORKED], [pidfd, folder])
    os.close(pidfd)
    os.close(folder)


class Supervisor:
    """Watcher of one console until its end."""

    def __init__(
        self,
        host: socket.socket,
        console: int,
        capture: OutputCapture,
        folders: ConsoleFolders,
        *,
        owns_all: bool,
        cpu_s: float | None,
    ) -> None:
        """`owns_all`: this is the first process of a namespace, so a signal to all processes reaches only its console.

        `cpu_s`: CPU time that its processes may use together; None disables the limit.
        """
        self._host = host
        self._console = console
        self._capture = capture
        self._place = folders
        self._owns_all = owns_all
        self._status: int | None = None
        self._cpu_s = cpu_s
        self._cpu = CpuTimeSampler()

    def run(self) -> None:
        """Return when the console is dead or the host is gone. No process of the console lives then."""
        for number in (signal.SIGINT, signal.SIGTERM):
            # Such a signal goes to a whole process group. The supervisor ends when its host does.
            signal.signal(number, signal.SIG_IGN)
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # The end of a child wakes the poll through this pipe.
        signal.set_wakeup_fd(writer)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poller = select.poll()
        poller.register(reader, select.POLLIN)
        poller.register(self._host, select.POLLIN)
        self._reap_children()
        pause_s = _MIN_LOOK_S
        next_look_s = time.monotonic() + pause_s
        while self._status is None:
            if self._cpu_s is not None and time.monotonic() >= next_look_s:
                if self._is_over_cpu_limit(self._cpu_s):
                    self._status = signal.SIGXCPU
                    break
                pause_s = _MIN_LOOK_S if self._cpu.process_count else min(2 * pause_s, _MAX_LOOK_S)
                # The time is random, because a program that knew it could hide its processes from the look.
                next_look_s = time.monotonic() + pause_s * (0.75 + os.getrandom(1)[0] / 510)
            wait_ms = None if self._cpu_s is None else max(0.0, next_look_s - time.monotonic()) * 1000
            for fd, _ in poller.poll(wait_ms):
                if fd == reader:
                    os.read(reader, 4096)
                    self._reap_children()
                elif not self._handle_order():
                    self._kill_all()
                    return
        self._kill_all()
        self._report_death(self._status)

    def _is_over_cpu_limit(self, cpu_s: float) -> bool:
        """Return True if the processes of the console have used more CPU time than allowed."""
        try:
            return self._cpu.exceeds(cpu_s)
        except OSError:
            # The console has lowered the limits of this process.
            return True

    def _reap_children(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._console:
                self._status = status
                is_over_limit = self._cpu_s is not None and usage.ru_utime + usage.ru_stime >= self._cpu_s
                if is_over_limit and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                    # A console that ignores SIGXCPU is killed by the system a second of CPU time later.
                    self._status = signal.SIGXCPU

    def _handle_order(self) -> bool:
        """Execute an order of the host. Return False if the host is gone."""
        try:
            order = self._host.recv(16)
        except OSError:
            return False
        if order == INTERRUPT:
            self._signal_process_group(signal.SIGINT)
            self._send_packet(INTERRUPTED)
        elif order == KILL:
            self._signal_process_group(signal.SIGKILL)
        return bool(order)

    def _signal_process_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._console, number)
        except ProcessLookupError:
            return

    def _kill_all(self) -> None:
        """Kill all processes of the console."""
        if self._owns_all:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            self._signal_process_group(signal.SIGKILL)
        if self._place.is_temporary:
            shutil.rmtree(self._place.folder, ignore_errors=True)

    def _report_death(self, status: int) -> None:
        printed = self._read_last_output()
        data = printed.text.encode("utf-8", "replace")
        for start in range(0, len(data), _PACKET_BYTES):
            self._send_packet(TEXT + data[start : start + _PACKET_BYTES])
        code = os.waitstatus_to_exitcode(status)
        self._send_packet(DIED + json.dumps({"code": code, "cut": printed.truncated}).encode())

    def _read_last_output(self) -> CapturedOutput:
        try:
            return self._capture.take_rest()
        except OSError:
            # The program closed or moved a file that it shares with this process.
            return CapturedOutput("", False)

    def _send_packet(self, packet: bytes) -> None:
        try:
            self._host.settimeout(_SEND_TIMEOUT_S)
            self._host.send(packet)
            self._host.settimeout(None)
        except OSError:
            # The host is gone; the next poll notices.
            return


def supervise(
    host: socket.socket,
    console: int,
    capture: OutputCapture,
    folders: ConsoleFolders,
    *,
    owns_all: bool,
    cpu_s: float | None,
) -> None:
    """Watch a console to its end, then end this process."""
    try:
        Supervisor(host, console, capture, folders, owns_all=owns_all, cpu_s=cpu_s).run()
    finally:
        os._exit(0)


class CpuTimeSampler:
    """CPU time of a console's processes, measured from time to time.

    A console that has started no process is bounded by its own limit (RLIMIT_CPU). As long as the number of the
    youngest process of the namespace stays the same, a look reads only that number. A whole look touches memory that
    the consoles share, and each touched page becomes the supervisor's own.
    """

    def __init__(self) -> None:
        self._last_look_s = time.monotonic()
        self._sampled_s = 0.0
        self._known: dict[tuple[bytes, bytes], float] = {}
        self._youngest_pid = 0
        self._looks = 0
        self.process_count = 0
        """Processes other than the supervisor and the console, at the last look."""

    def exceeds(self, limit_s: float) -> bool:
        """Return True if the console and its other processes used more than `limit_s` seconds of CPU.

        A console without other processes is not measured: RLIMIT_CPU bounds it.

        Raises:
            OSError: the console has taken away a resource that this process needs to look.
        """
        previous_youngest, self._youngest_pid = self._youngest_pid, _read_youngest_pid()
        self._looks += 1
        if previous_youngest == 0:
            # At most two processes are the supervisor and the console.
            is_alone = sum(map(str.isdecimal, os.listdir("/proc"))) <= 2
        else:
            is_alone = (
                self.process_count == 0
                and self._youngest_pid == previous_youngest
                and self._looks % _FULL_LOOK_PERIOD != 0
            )
        return not is_alone and self.sample() > limit_s

    def sample(self) -> float:
        """Return the CPU time used so far, seconds.

        Raises:
            OSError: as in `exceeds`.
        """
        now_s = time.monotonic()
        interval_s, self._last_look_s = min(now_s - self._last_look_s, _MAX_NEW_PROCESS_S), now_s
        # The exact figure begins with the processes that this one has waited for.
        children_usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        exact_s = children_usage.ru_utime + children_usage.ru_stime
        uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        known: dict[tuple[bytes, bytes], float] = {}
        for name in os.listdir("/proc"):
            if not name.isdecimal() or name == "1":
                continue
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                # The process has ended.
                continue
            # Fields 14 to 17 of proc(5): user and system time of the process, and of its children that were waited for.
            own_s, children_s = (sum(map(int, fields[index : index + 2])) / _TICKS for index in (11, 13))
            key = (name.encode(), fields[19])
            known[key] = own_s
            exact_s += own_s + children_s
            # The sampled figure adds the difference to the last look, or an estimate for a new process.
            if key in self._known:
                self._sampled_s += own_s - self._known[key]
            else:
                age_s = max(uptime_s - int(fields[19]) / _TICKS, 1 / _TICKS)
                # The system rounds down, so a running process may show 0.
                used_s = own_s or (0.5 / _TICKS if fields[0] == b"R" else 0.0)
                self._sampled_s += used_s if age_s > interval_s else interval_s * used_s / age_s
        self._known = known
        self.process_count = len(known) - 1
        return max(exact_s, _SAMPLE_WEIGHT * self._sampled_s)


def _read_youngest_pid() -> int:
    file = os.open(_LAST_PID, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(file, 100).rpartition(b" ")[2])
    finally:
        os.close(file)
