"""Graceful shutdown on SIGTERM, SIGUSR1 and SIGHUP, as on Ctrl-C: resources are closed and last messages are printed.

Clusters send the first two some time before they take a machine away. A closed terminal and a lost ssh connection send
the third. The first signal starts the shutdown; another one, at least a second later, ends the process at once.
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
"""Signals that shut a program down."""
QUIET_S = 1.0
"""Signals within this time after the first count as the same, seconds. A sender may address a process group and its
leader."""
_LATE_SIGNAL_S = 3.0
"""Time to wait for a signal after our engine's process ended, seconds."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, SIGUSR1 or SIGHUP arrived. Code that lets `KeyboardInterrupt` pass lets this pass, too."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal_number = number
        """Number of the signal."""


class _SignalHandler:
    """Signal handler that raises an interrupt in the main thread, at once or when no caller holds it back any more."""

    def __init__(self) -> None:
        self._holders = 0
        self._first_signal_s = float("-inf")
        self._pending: KeyboardInterrupt | None = None
        self._waited = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        # A second signal ends the process, unless it is a copy of the first.
        if self._first_signal_s > float("-inf"):
            if now_s - self._first_signal_s >= QUIET_S:
                os._exit(128 + number)
            return
        self._first_signal_s = now_s
        if number == signal.SIGHUP:
            _detach_from_terminal()
        stop = KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)
        if not self._holders:
            raise stop
        self._pending = stop

    def wait_for_signal(self) -> Terminated | None:
        """Wait for a signal that may follow shortly, but only on the first call."""
        if not self._waited:
            self._waited = True
            try:
                threading.Event().wait(_LATE_SIGNAL_S)
            except Terminated as stop:
                return stop
        return None

    def hold(self) -> None:
        """Hold back signals, including Ctrl-C, until `release` was called as often."""
        self._holders += 1
        if self._holders == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self)

    def release(self) -> None:
        """Undo one `hold`; the last one raises the signal that arrived meanwhile."""
        self._holders -= 1
        if self._holders:
            return
        if signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        stop, self._pending = self._pending, None
        if stop is not None:
            raise stop


def _detach_from_terminal() -> None:
    """Redirect standard streams of a closed terminal to /dev/null, because every write to them would fail."""
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        try:
            is_device = stat.S_ISCHR(os.fstat(stream).st_mode)
        except OSError:
            # The stream was closed before the program started.
            continue
        # A closed terminal is still a character device, but no longer a tty.
        if is_device and not os.isatty(stream):
            os.dup2(devnull, stream)
    os.close(devnull)


@contextmanager
def handle_stop_signals() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM, SIGUSR1 and SIGHUP within the block. An ignored signal stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread can set signal handlers.
        yield
        return
    handler = _SignalHandler()
    previous = {number: signal.getsignal(number) for number in STOPS}
    for number in STOPS:
        if previous[number] is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, previous_handler)


def hold_signals() -> None:
    """Hold back signals until `release_signals` was called as often.

    The caller is in a step that an interrupt would leave half-done.
    """
    if (handler := _get_handler()) is not None:
        handler.hold()


def release_signals() -> None:
    """Undo one `hold_signals`; the last one raises the signal that arrived meanwhile."""
    if (handler := _get_handler()) is not None:
        handler.release()


@contextmanager
def defer_signals() -> Iterator[None]:
    """Hold back signals during a short block that must not be left half-way, and raise them at its end."""
    hold_signals()
    try:
        yield
    finally:
        release_signals()


def _get_handler() -> _SignalHandler | None:
    """Return the installed handler of `handle_stop_signals`, or None outside its block and outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return next((handler for number in STOPS if isinstance(handler := signal.getsignal(number), _SignalHandler)), None)


def explain_error(error: BaseException) -> BaseException:
    """Return the `Terminated` that caused an engine's death, or `error` itself.

    A signal to a process group may reach the engine's process before this one.
    """
    handler = _get_handler()
    if isinstance(error, EngineDied) and handler is not None:
        return handler.wait_for_signal() or error
    return error
