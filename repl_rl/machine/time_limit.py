"""A limit on the CPU time of Python code that somebody else wrote and that may come to no end."""

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_LOOK_S = 0.2
"""How often the watching thread looks at what is at work."""


class _Overdue(BaseException):
    """Raised in a thread that is over its limit. No handler for `Exception` keeps it."""


@dataclass(eq=False)
class _Call:
    thread: int
    clock: int
    until_s: float


class _Watch:
    """One thread that looks at all limited calls; it sleeps where there are none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        self._work = threading.Event()
        self._begun = False

    def enter(self, seconds: float) -> _Call:
        """Begin to watch the calling thread."""
        thread = threading.get_ident()
        # CPU time, so that a machine that is busy with other things ends nothing.
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
        """Stop watching it. An exception that was raised in its thread and has not arrived yet arrives here."""
        with self._lock:
            self._calls.discard(call)
        # To take it back is no way: CPython then takes its slow path at every check for events, for good, and under
        # sys.setprofile never leaves the first such check of a function (3.11).
        for _ in range(2):
            pass  # a check at the end of each turn

    def _look(self) -> None:
        while True:
            self._work.wait()
            time.sleep(_LOOK_S)
            with self._lock:
                for call in [each for each in self._calls if time.clock_gettime(each.clock) > each.until_s]:
                    self._calls.discard(call)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(call.thread), ctypes.py_object(_Overdue))
                if not self._calls:
                    self._work.clear()


_WATCH = _Watch()


def limited(call: Callable[[], T], seconds: float) -> T:
    """The result of `call`, which may take so much CPU time of its thread. One operation within C is not interrupted.

    Raises:
        TimeoutError: it took more.
    """
    try:
        watched = _WATCH.enter(seconds)
        try:
            return call()
        finally:
            _WATCH.leave(watched)
    except _Overdue:
        raise TimeoutError(f"it took more than {seconds:g} s") from None
