"""Host function calls of one console's lines: accepted, answered, and cancelled when their line ends.

The content of a console's messages is untrusted, and this module does not parse it. Each call belongs to the running
line. Only a few calls may wait at once, and the console's `Host` answers them.
"""

import asyncio
from collections.abc import Callable

from repl_rl.sandbox.base import Host
from repl_rl.sandbox.wire import Call, Wire

_WAITING = 64
"""Maximum concurrent calls, more than a console has threads. Further calls are dropped."""
_CALLS_A_LINE = 16_384
"""Maximum calls per line, so that answers do not keep the host busy. Later calls are dropped until the timeout."""
_CLEANUP_S = 10.0
"""Time for cancelled calls to end, seconds. A nested rollout releases its session and console in this time."""
_WAITS = 10
"""Number of consecutive waits into which the clock splits a line's time."""
_TOO_LATE = b'{"error": "the time of the line is over"}'


class LineClock:
    """Deadline of a line. It is paused while the host works for the line.

    The clock counts in short waits. If this process is suspended, as on a paused machine, so is the line. At most two
    waits count then, so the line does not time out because of the pause.
    """

    def __init__(self, strike: Callable[[], None]) -> None:
        """Create a stopped clock that calls `strike` when the time is over."""
        self._strike = strike
        self._left_s = self._wait_s = 0.0
        self._begun_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def start(self, seconds: float) -> None:
        """Start to count `seconds` down."""
        self._left_s, self._wait_s = seconds, seconds / _WAITS
        self.go()

    def hold(self) -> None:
        """Pause the clock."""
        if self._timer is not None:
            self._count()
            self.stop()

    def go(self) -> None:
        """Resume the clock."""
        self._begun_s = self._loop.time()
        self._timer = self._loop.call_later(min(self._left_s, self._wait_s), self._over)

    def stop(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count(self) -> None:
        # Count at most two waits, in case this process was suspended.
        self._left_s = max(0.0, self._left_s - min(self._loop.time() - self._begun_s, 2 * self._wait_s))

    def _over(self) -> None:
        self._timer = None
        self._count()
        if self._left_s:
            self.go()
        else:
            self._strike()


class Calls:
    """Host function calls of one console."""

    def __init__(
        self,
        wire: Wire,
        send: Callable[[list[bytes]], bool],
        clock: LineClock,
        fail: Callable[[BaseException], None],
    ) -> None:
        """`fail` receives an exception of the host. It is an internal error and ends the line."""
        self.host: Host | None = None
        """Handler of the calls. None means that no function is offered, so calls are dropped."""
        self._wire, self._send, self._clock, self._fail = wire, send, clock, fail
        self._tasks: set[asyncio.Task[None]] = set()
        self._line = b""
        self._late = False
        self._count = 0

    def begin(self, line: bytes) -> None:
        """Start the line whose request has the header `line`."""
        self._line, self._late, self._count = line, False, 0

    def refuse(self) -> None:
        """Refuse further calls, because the time of the line is over. The clock is no longer paused or resumed."""
        self._late = True

    def take(self, call: Call) -> None:
        """Answer a call in the background."""
        if self.host is None or call.line != self._line:
            return
        self._count += 1
        if len(self._tasks) >= _WAITING or self._count > _CALLS_A_LINE:
            return
        # The first of several concurrent calls pauses the clock; `_done` of the last one resumes it.
        if not self._tasks and not self._late:
            self._clock.hold()
        task = asyncio.create_task(self._answer(self.host, call))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def _answer(self, host: Host, call: Call) -> None:
        reply = _TOO_LATE if self._late else await host.answer(call.content)
        # The line may have ended while the host worked.
        if call.line == self._line:
            self._send(self._wire.host_reply(call, reply))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)
        elif not self._tasks and self._line and not self._late:
            self._clock.go()

    async def end(self) -> None:
        """End the line, and cancel its pending calls."""
        self._line = b""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLEANUP_S)
