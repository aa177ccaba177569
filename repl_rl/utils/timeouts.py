"""Calls that may never return: daemon threads, and a limit of CPU time for foreign Python code.

A daemon thread does not keep the process alive.
"""

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
_CHECK_INTERVAL_S = 0.2
"""Interval between two checks of the calls with a time limit, seconds."""


class DaemonThread(threading.Thread, Generic[T]):
    """A daemon thread that calls a function at once. `join` waits for it; it may also be left running."""

    def __init__(self, function: Callable[[], T], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._function = function
        self.future: Future[T] = Future()
        """The function's result or exception, including `SystemExit`."""
        # A caller that stops waiting must not cancel the future, because the thread keeps running.
        self.future.set_running_or_notify_cancel()
        self.start()

    def run(self) -> None:
        try:
            value = self._function()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


async def run_in_thread(function: Callable[[], object], name: str) -> object:
    """Return the result of `function`, run in a daemon thread. If the wait is cancelled, the thread keeps running."""
    return await wait_for_thread(DaemonThread(function, name))


async def wait_for_thread(thread: DaemonThread[object]) -> object:
    """Return the result of the thread's function, or raise its exception. The wait can be cancelled.

    An exception that an event loop cannot pass on becomes a `RuntimeError`.
    """
    finished = asyncio.Event()
    loop = asyncio.get_running_loop()

    def set_event(_: Future[object]) -> None:
        # The loop may be closed by now, so that no coroutine is waiting.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(finished.set)

    thread.future.add_done_callback(set_event)
    await finished.wait()
    error = thread.future.exception()
    # A coroutine cannot raise StopIteration, and SystemExit would end the event loop.
    if isinstance(error, StopIteration) or not isinstance(error, Exception | None):
        raise RuntimeError(repr(error)) from error
    return thread.future.result()


class _TimeLimitExceeded(BaseException):
    """Raised in a thread that is over its limit. A handler for `Exception` does not catch it."""


@dataclass(eq=False)
class _TimedCall:
    """A running call: its thread, the CPU clock of that thread, and the time on that clock at which to stop it."""

    thread: int
    clock: int
    deadline_s: float


class _CpuTimeWatchdog:
    """A thread that checks all calls with a time limit; it sleeps if no call is active."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[_TimedCall] = set()
        self._work = threading.Event()
        self._started = False

    def start_watching(self, seconds: float) -> _TimedCall:
        """Start to watch the calling thread, which may use `seconds` of CPU time."""
        thread = threading.get_ident()
        # CPU time rather than wall time, so that a busy machine ends no call.
        clock = time.pthread_getcpuclockid(thread)
        call = _TimedCall(thread, clock, time.clock_gettime(clock) + seconds)
        with self._lock:
            self._calls.add(call)
            if not self._started:
                self._started = True
                threading.Thread(target=self._check_calls, name="time limits", daemon=True).start()
        self._work.set()
        return call

    def stop_watching(self, call: _TimedCall) -> None:
        """Stop watching a call. An exception that was raised in its thread and is still pending is delivered here."""
        with self._lock:
            self._calls.discard(call)
        # CPython delivers pending exceptions at the end of each loop turn. Withdrawing the exception is no alternative:
        # CPython then takes its slow path at every check for events, for good, and under sys.setprofile never leaves
        # the first such check of a function (3.11).
        for _ in range(2):
            pass

    def _check_calls(self) -> None:
        while True:
            self._work.wait()
            time.sleep(_CHECK_INTERVAL_S)
            with self._lock:
                for call in [
                    candidate for candidate in self._calls if time.clock_gettime(candidate.clock) > candidate.deadline_s
                ]:
                    # Remove the call, so that the exception is raised only once.
                    self._calls.discard(call)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(call.thread), ctypes.py_object(_TimeLimitExceeded)
                    )
                if not self._calls:
                    self._work.clear()


_WATCH = _CpuTimeWatchdog()


def call_with_time_limit(call: Callable[[], T], seconds: float) -> T:
    """Return the result of `call`, which may use `seconds` of CPU time of its thread. A single C operation is not
    interrupted.

    Raises:
        TimeoutError: the call used more.
    """
    try:
        timed_call = _WATCH.start_watching(seconds)
        try:
            return call()
        finally:
            _WATCH.stop_watching(timed_call)
    except _TimeLimitExceeded:
        raise TimeoutError(f"it took more than {seconds:g} s") from None
