"""Calls that may never return: each in a daemon thread, which does not keep the process alive."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class InThread(threading.Thread, Generic[T]):
    """Calls a function in a daemon thread, at once. `join` waits for it; it may be left behind."""

    def __init__(self, function: Callable[[], T], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._function = function
        self.outcome: Future[T] = Future()
        """What the function returned or raised, `SystemExit` included."""
        self.outcome.set_running_or_notify_cancel()  # who stops waiting must not cancel it: the thread goes on
        self.start()

    def run(self) -> None:
        try:
            value = self._function()
        except BaseException as error:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(value)


async def in_thread(function: Callable[[], object], name: str) -> object:
    """What `function` returns in a daemon thread, which is left behind when the wait for it is cancelled."""
    return await settled(InThread(function, name))


async def settled(thread: InThread[object]) -> object:
    """What the thread's function returned or raised, as far as an event loop bears it; the wait can be cancelled."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wake(_: Future[object]) -> None:
        with suppress(RuntimeError):  # the loop may be closed by now: then nobody waits
            loop.call_soon_threadsafe(done.set)

    thread.outcome.add_done_callback(wake)
    await done.wait()
    error = thread.outcome.exception()
    # StopIteration is none for a coroutine to raise, and SystemExit would end the event loop.
    if isinstance(error, StopIteration) or not isinstance(error, Exception | None):
        raise RuntimeError(repr(error)) from error
    return thread.outcome.result()
