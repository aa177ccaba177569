"""A process that is killed just before it writes for the nth time."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count

WRITING = frozenset({"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree", "shutil.move"})


class Doom:
    """Counts what this process writes, and kills it just before it does so for the nth time, or a little after."""

    def __init__(self, kill_at: int | None, after_s: float) -> None:
        self.count = 0
        self._kill_at, self._after_s = kill_at, after_s

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        """For `sys.addaudithook`."""
        if event == "open":
            flags = arguments[2]
            if not (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
                return
        elif event not in WRITING:
            return
        self.count += 1
        if self.count == self._kill_at and self._after_s:
            threading.Timer(self._after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif self.count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_at_each_write(work: Callable[[], object]) -> Iterator[int]:
    """Do `work` in a fork that is killed at its first write, in another at its second, and so on; 0: none was left.

    The last one, whose number is 0, was not killed.
    """
    for kill_at in count(1):
        pid = os.fork()
        if not pid:
            code = 70
            try:
                sys.addaudithook(Doom(kill_at, 0.0).hook)
                work()
                code = 0
            finally:
                os._exit(code)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert ended in (0, -signal.SIGKILL), ended
        yield kill_at if ended else 0
        if not ended:
            return
