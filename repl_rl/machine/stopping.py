"""SIGTERM ends a program like Ctrl-C does: what is open is closed, what is to be said is said."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from repl_rl.errors import EngineDied

QUIET_S = 10.0
"""So long after a SIGTERM, further ones are ignored: they would interrupt the end that the first one began."""
_TOLD_S = 3.0
"""How long a SIGTERM may come after that of our engine's process."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came. Whatever lets an interrupt pass lets this pass."""


class _Handler:
    """Raises `Terminated` in the main thread."""

    def __init__(self) -> None:
        self.holding = False
        self._came_s = float("-inf")
        self._pending = False
        self._waited = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - self._came_s < QUIET_S:
            return
        self._came_s = now_s
        self._pending = self.holding
        if not self.holding:
            raise Terminated

    def wait(self) -> Terminated | None:
        """Give a SIGTERM that is on its way the time to come, once."""
        if not self._waited:
            self._waited = True
            try:
                threading.Event().wait(_TOLD_S)
            except Terminated as told:
                return told
        return None

    def release(self) -> None:
        """Hold no longer; raise what has come meanwhile."""
        self.holding = False
        if self._pending:
            self._pending = False
            raise Terminated


@contextmanager
def terminable() -> Iterator[None]:
    """Within the block SIGTERM raises `Terminated`. Where whoever started us has it ignored, it stays ignored."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGTERM, _Handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A short block that is not to be left half-way: a SIGTERM is raised at its end."""
    handler = signal.getsignal(signal.SIGTERM)
    if not isinstance(handler, _Handler):
        yield
        return
    handler.holding = True
    try:
        yield
    finally:
        handler.release()


def explained(error: BaseException) -> BaseException:
    """`error`, or the `Terminated` behind it: who stops a group of processes may reach the engine's before this one."""
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(error, EngineDied) and isinstance(handler, _Handler):
        return handler.wait() or error
    return error
