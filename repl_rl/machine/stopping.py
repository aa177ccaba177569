"""SIGTERM, SIGUSR1 and SIGHUP end a program like Ctrl-C does: what is open is closed, what is to be said is said.

Clusters send the first two a while before they take a machine away. A closed terminal and a lost ssh connection send
the third. The first signal begins the end; a second one, a second later or more, leaves at once.
"""

import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from repl_rl.errors import EngineDied

STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""The signals that end a program here."""
QUIET_S = 1.0
"""Signals that come so soon after the first are taken for the same: who ends a group of processes and its leader sends
each of them one."""
_TOLD_S = 3.0
"""How long a signal may come after that of our engine's process."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, SIGUSR1 or SIGHUP came. Whatever lets an interrupt pass lets this pass."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        """The signal."""


class _Handler:
    """Raises an interrupt in the main thread: at once, or as soon as nobody holds it back."""

    def __init__(self) -> None:
        self._holders = 0
        self._came_s = float("-inf")
        self._pending: KeyboardInterrupt | None = None
        self._waited = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._came_s > float("-inf"):
            if now_s - self._came_s >= QUIET_S:
                os._exit(128 + number)
            return
        self._came_s = now_s
        if number == signal.SIGHUP:
            _leave_terminal()
        stop = KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)
        if not self._holders:
            raise stop
        self._pending = stop

    def wait(self) -> Terminated | None:
        """Give a signal that is on its way the time to come, once."""
        if not self._waited:
            self._waited = True
            try:
                threading.Event().wait(_TOLD_S)
            except Terminated as told:
                return told
        return None

    def hold(self) -> None:
        """Hold back what comes, Ctrl-C too, until `release` was called as often."""
        self._holders += 1
        if self._holders == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self)

    def release(self) -> None:
        """Hold no longer; raise what has come meanwhile."""
        self._holders -= 1
        if self._holders:
            return
        if signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        stop, self._pending = self._pending, None
        if stop is not None:
            raise stop


def _leave_terminal() -> None:
    """Let standard streams of a terminal that was closed lead nowhere: each write to it would be an error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        try:
            is_device = stat.S_ISCHR(os.fstat(stream).st_mode)
        except OSError:  # it was closed before the start
            continue
        if is_device and not os.isatty(stream):  # a closed terminal is none any more
            os.dup2(nowhere, stream)
    os.close(nowhere)


@contextmanager
def terminable() -> Iterator[None]:
    """Within the block SIGTERM, SIGUSR1 and SIGHUP raise `Terminated`. A signal that is ignored stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _Handler()
    before = {number: signal.getsignal(number) for number in STOPS}
    for number in STOPS:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, kept in before.items():
            signal.signal(number, kept)


def hold() -> None:
    """Let no signal interrupt what follows, until `release` was called as often: it would leave something half-done."""
    if (handler := _handler()) is not None:
        handler.hold()


def release() -> None:
    """Undo one `hold`; the last one raises what has come meanwhile."""
    if (handler := _handler()) is not None:
        handler.release()


@contextmanager
def undisturbed() -> Iterator[None]:
    """A short block that is not to be left half-way: what comes meanwhile is raised at its end."""
    hold()
    try:
        yield
    finally:
        release()


def _handler() -> _Handler | None:
    """Ours, in the main thread of a program that is `terminable`."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return next((found for number in STOPS if isinstance(found := signal.getsignal(number), _Handler)), None)


def explained(error: BaseException) -> BaseException:
    """`error`, or the `Terminated` behind it: who stops a group of processes may reach the engine's before this one."""
    handler = _handler()
    if isinstance(error, EngineDied) and handler is not None:
        return handler.wait() or error
    return error
