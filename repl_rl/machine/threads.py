"""Calls that may never return. Each runs in a daemon thread, which does not keep the process alive."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class InThread(threading.Thread, Generic[T]):
    """A daemon thread that calls a function at once. `join` waits for it; it may also be left running."""

    def __init__(self, function: Callable[[], T], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._function = function
        self.outcome: Future[T] = Future()
        """The function's result or exception, including `SystemExit`."""
        # A caller that stops waiting must not cancel the future, because the thread keeps running.
        self.outcome.set_running_or_notify_cancel()
        self.start()

    def run(self) -> None:
        try:
            value = self._function()
        except BaseException as error:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(value)


async def in_thread(function: Callable[[], object], name: str) -> object:
    """Return the result of `function`, run in a daemon thread. If the wait is cancelled, the thread keeps running."""
    return await settled(InThread(function, name))


async def settled(thread: InThread[object]) -> object:
    """Return the result of the thread's function, or raise its exception. The wait can be cancelled.

    An exception that an event loop cannot pass on becomes a `RuntimeError`.
    """
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wake(_: Future[object]) -> None:
        # The loop may be closed by now, so that no coroutine is waiting.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    thread.outcome.add_done_callback(wake)
    await done.wait()
    error = thread.outcome.exception()
    # A coroutine cannot raise StopIteration, and SystemExit would end the event loop.
    if isinstance(error, StopIteration) or not isinstance(error, Exception | None):
        raise RuntimeError(repr(error)) from error
    return thread.outcome.result()
