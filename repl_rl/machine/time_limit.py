"""CPU time limit for foreign Python code that may never return."""

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_LOOK_S = 0.2
"""Interval between two checks of the limited calls, seconds."""


class _Overdue(BaseException):
    """Raised in a thread that is over its limit. A handler for `Exception` does not catch it."""


@dataclass(eq=False)
class _Call:
    thread: int
    clock: int
    until_s: float


class _Watch:
    """A thread that checks all limited calls; it sleeps if no call is active."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        self._work = threading.Event()
        self._begun = False

    def enter(self, seconds: float) -> _Call:
        """Start to watch the calling thread."""
        thread = threading.get_ident()
        # CPU time rather than wall time, so that a busy machine ends no call.
        clock = time.pthread_getcpuclockid(thread)
        call = _Call(thread, clock, time.clock_gettime(clock) + seconds)
        with self._lock:
            self._calls.add(call)
            if not self._begun:
                self._begun = True
                threading.Thread(target=self._look, name="time limits", daemon=True).start()
        self._work.set()
        return call

    def leave(self, call: _Call) -> None:
        """Stop watching a call. An exception that was raised in its thread and is still pending is delivered here."""
        with self._lock:
            self._calls.discard(call)
        # CPython delivers pending exceptions at the end of each loop turn. Withdrawing the exception is no alternative:
        # CPython then takes its slow path at every check for events, for good, and under sys.setprofile never leaves
        # the first such check of a function (3.11).
        for _ in range(2):
            pass

    def _look(self) -> None:
        while True:
            self._work.wait()
            time.sleep(_LOOK_S)
            with self._lock:
                for call in [each for each in self._calls if time.clock_gettime(each.clock) > each.until_s]:
                    # Remove the call, so that the exception is raised only once.
                    self._calls.discard(call)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(call.thread), ctypes.py_object(_Overdue))
                if not self._calls:
                    self._work.clear()


_WATCH = _Watch()


def limited(call: Callable[[], T], seconds: float) -> T:
    """Return the result of `call`, which may use `seconds` of CPU time of its thread. A single C operation is not
    interrupted.

    Raises:
        TimeoutError: the call used more.
    """
    try:
        watched = _WATCH.enter(seconds)
        try:
            return call()
        finally:
            _WATCH.leave(watched)
    except _Overdue:
        raise TimeoutError(f"it took more than {seconds:g} s") from None
