"""Calls that may never return: each in a daemon thread, which does not keep the process alive."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
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
