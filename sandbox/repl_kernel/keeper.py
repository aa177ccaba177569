"""Supervisor of one console: process 1 of its namespaces.

It holds one end of a socket, and the host holds the other. The host sends orders to interrupt or to kill. The
supervisor reports how the console died, and its last output. If the host is gone, the supervisor ends, and everything
in its namespaces with it.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import time
from dataclasses import dataclass

from repl_kernel.capture import Capture, Printed
from repl_kernel.cpu_time import CpuTime

INTERRUPT, KILL = b"I", b"K"
"""Orders of the host."""
BORN, READY, STRUCK, TEXT, DIED = b"B", b"R", b"S", b"T", b"D"
"""Reports to the host: the first byte of each packet."""

_PACKET_BYTES = 32_768
_REMOVED_WITHIN_S = 2.0
_SOONEST_S, _LATEST_S = 0.25, 1.0
"""Seconds between two looks at the CPU time: while the console has other processes, and while it has none."""


@dataclass(frozen=True)
class Place:
    """Folders of a console."""

    folder: str
    """Folder of its socket and its output file."""
    scratch: str
    """Its working directory."""
    temporary: bool
    """True if the folder is in the machine's file system and must be removed at the end."""
    loopback: int = -1
    """Descriptor of an event that is set when the console's loopback interface is up. -1 means the machine's
    interface."""


def announce(host: socket.socket, place: Place) -> None:
    """Send the host a handle on this process, and one on the folder in which the console will listen."""
    pidfd = os.pidfd_open(os.getpid())
    folder = os.open(place.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    socket.send_fds(host, [BORN], [pidfd, folder])
    os.close(pidfd)
    os.close(folder)


class Keeper:
    """Watcher of one console until its end."""

    def __init__(
        self, host: socket.socket, console: int, capture: Capture, place: Place, *, owns_all: bool, cpu_s: float | None
    ) -> None:
        """`owns_all`: this is the first process of a namespace, so a signal to all processes reaches only its console.

        `cpu_s`: CPU time that its processes may use together; None disables the limit.
        """
        self._host = host
        self._console = console
        self._capture = capture
        self._place = place
        self._owns_all = owns_all
        self._status: int | None = None
        self._cpu_s = cpu_s
        self._cpu = CpuTime()

    def watch(self) -> None:
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
        self._reap()
        pause_s = _SOONEST_S
        look_s = time.monotonic() + pause_s
        while self._status is None:
            if self._cpu_s is not None and time.monotonic() >= look_s:
                if self._is_over(self._cpu_s):
                    self._status = signal.SIGXCPU
                    break
                pause_s = _SOONEST_S if self._cpu.others else min(2 * pause_s, _LATEST_S)
                # The time is random, because a program that knew it could hide its processes from the look.
                look_s = time.monotonic() + pause_s * (0.75 + os.getrandom(1)[0] / 510)
            wait_ms = None if self._cpu_s is None else max(0.0, look_s - time.monotonic()) * 1000
            for fd, _ in poller.poll(wait_ms):
                if fd == reader:
                    os.read(reader, 4096)
                    self._reap()
                elif not self._obey():
                    self._end()
                    return
        self._end()
        self._report(self._status)

    def _is_over(self, cpu_s: float) -> bool:
        """Return True if the processes of the console have used more CPU time than allowed."""
        try:
            return self._cpu.exceeds(cpu_s)
        except OSError:
            # The console has lowered the limits of this process.
            return True

    def _reap(self) -> None:
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._console:
                self._status = status
                over = self._cpu_s is not None and used.ru_utime + used.ru_stime >= self._cpu_s
                if over and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                    # A console that ignores SIGXCPU is killed by the system a second of CPU time later.
                    self._status = signal.SIGXCPU

    def _obey(self) -> bool:
        """Execute an order of the host. Return False if the host is gone."""
        try:
            order = self._host.recv(16)
        except OSError:
            return False
        if order == INTERRUPT:
            self._signal_group(signal.SIGINT)
            self._tell(STRUCK)
        elif order == KILL:
            self._signal_group(signal.SIGKILL)
        return bool(order)

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._console, number)
        except ProcessLookupError:
            return

    def _end(self) -> None:
        """Kill all processes of the console."""
        if self._owns_all:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            self._signal_group(signal.SIGKILL)
        if self._place.temporary:
            shutil.rmtree(self._place.folder, ignore_errors=True)

    def _report(self, status: int) -> None:
        printed = self._last_words()
        data = printed.text.encode("utf-8", "replace")
        for start in range(0, len(data), _PACKET_BYTES):
            self._tell(TEXT + data[start : start + _PACKET_BYTES])
        code = os.waitstatus_to_exitcode(status)
        self._tell(DIED + json.dumps({"code": code, "cut": printed.cut}).encode())

    def _last_words(self) -> Printed:
        try:
            return self._capture.rest()
        except OSError:
            # The program closed or moved a file that it shares with this process.
            return Printed("", False)

    def _tell(self, packet: bytes) -> None:
        try:
            self._host.settimeout(_REMOVED_WITHIN_S)
            self._host.send(packet)
            self._host.settimeout(None)
        except OSError:
            # The host is gone; the next poll notices.
            return


def keep(
    host: socket.socket, console: int, capture: Capture, place: Place, *, owns_all: bool, cpu_s: float | None
) -> None:
    """Watch a console to its end, then end this process."""
    try:
        Keeper(host, console, capture, place, owns_all=owns_all, cpu_s=cpu_s).watch()
    finally:
        os._exit(0)
