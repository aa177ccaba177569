"""CPU time of all processes of one console together, read by its supervisor, which is process 1 of their namespace.

Two figures are kept. One adds up the times that the system reports for live processes and for those that were waited
for; it is exact for ordinary programs. Of a process whose parent ignores SIGCHLD, the system keeps nothing once it has
ended. The other figure samples: a process that is new to a look counts as if it ran since the previous look, at its own
rate. Short processes are seen as rarely as they are short, so this is right on average, and the figures agree.

A console that has started no process is bounded by its own limit (RLIMIT_CPU). As long as the number of the youngest
process of the namespace stays the same, a look reads only that number. A whole look touches memory that the
consoles share, and each touched page becomes the supervisor's own.
"""

import os
import resource
import time

_TICKS = os.sysconf("SC_CLK_TCK")
_MOST_S = 0.5
"""Maximum time that is counted for a process that is new to a look, seconds, per core that it uses."""
_TRUST = 0.8
"""Weight of the sampled figure, which scatters."""
_WHOLE_EVERY = 10
"""Period of whole looks, in looks. They are needed because process numbers are reused."""
_LAST_PID = "/proc/loadavg"
"""File whose last word is the number of the youngest process or thread of the namespace."""


class CpuTime:
    """CPU time of a console's processes, measured from time to time."""

    def __init__(self) -> None:
        self._looked_s = time.monotonic()
        self._sampled_s = 0.0
        self._known: dict[tuple[bytes, bytes], float] = {}
        self._youngest = 0
        self._looks = 0
        self.others = 0
        """Processes other than the supervisor and the console, at the last look."""

    def exceeds(self, limit_s: float) -> bool:
        """Return True if the console and its other processes used more than `limit_s` seconds of CPU.

        A console without other processes is not measured: RLIMIT_CPU bounds it.

        Raises:
            OSError: the console has taken away a resource that this process needs to look.
        """
        before, self._youngest = self._youngest, _youngest_process()
        self._looks += 1
        if before == 0:
            # At most two processes are the supervisor and the console.
            alone = sum(map(str.isdecimal, os.listdir("/proc"))) <= 2
        else:
            alone = self.others == 0 and self._youngest == before and self._looks % _WHOLE_EVERY != 0
        return not alone and self.look() > limit_s

    def look(self) -> float:
        """Return the CPU time used so far, seconds.

        Raises:
            OSError: as in `exceeds`.
        """
        now_s = time.monotonic()
        since_s, self._looked_s = min(now_s - self._looked_s, _MOST_S), now_s
        reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
        exact_s = reaped.ru_utime + reaped.ru_stime
        up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
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
            own_s, children_s = (sum(map(int, fields[at : at + 2])) / _TICKS for at in (11, 13))
            key = (name.encode(), fields[19])
            known[key] = own_s
            exact_s += own_s + children_s
            if key in self._known:
                self._sampled_s += own_s - self._known[key]
            else:
                age_s = max(up_s - int(fields[19]) / _TICKS, 1 / _TICKS)
                # The system rounds down, so a running process may show 0.
                used_s = own_s or (0.5 / _TICKS if fields[0] == b"R" else 0.0)
                self._sampled_s += used_s if age_s > since_s else since_s * used_s / age_s
        self._known = known
        self.others = len(known) - 1
        return max(exact_s, _TRUST * self._sampled_s)


def _youngest_process() -> int:
    file = os.open(_LAST_PID, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(file, 100).rpartition(b" ")[2])
    finally:
        os.close(file)
