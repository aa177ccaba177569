"""Calls of host functions that the lines of one console make: taken, answered, and ended with their line.

What a console says is a claim. A call is bound to the line that runs, is one of few that may wait at once, and is
answered by whoever was offered as `Host`; this module reads nothing of it.
"""

import asyncio
from collections.abc import Callable

from repl_rl.sandbox.base import Host
from repl_rl.sandbox.wire import Call, Wire

_WAITING = 64
"""Calls that may wait at once: more than a console has threads. What a console sends beyond is dropped."""
_CALLS_A_LINE = 16_384
"""After so many a line's calls are dropped, and it ends by its deadline: answers must not keep the host busy."""
_CLEANUP_S = 10.0
"""How long what was cancelled may take to end: a rollout within a rollout gives its session and console back."""
_WAITS = 10
"""Parts of a line's time that its clock waits for one after the other."""
_TOO_LATE = b'{"error": "the time of the line is over"}'


class LineClock:
    """The deadline of a line. It stands still while the host works for the line.

    The time is counted in short waits. Where this process stood still, as all of a machine that was paused, the line
    did too: no more than two of the waits count, and a line is not blamed for a pause.
    """

    def __init__(self, strike: Callable[[], None]) -> None:
        """`strike` is called when the time is over."""
        self._strike = strike
        self._left_s = self._wait_s = 0.0
        self._begun_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def start(self, seconds: float) -> None:
        """Begin to count."""
        self._left_s, self._wait_s = seconds, seconds / _WAITS
        self.go()

    def hold(self) -> None:
        """Stand still."""
        if self._timer is not None:
            self._count()
            self.stop()

    def go(self) -> None:
        """Go on."""
        self._begun_s = self._loop.time()
        self._timer = self._loop.call_later(min(self._left_s, self._wait_s), self._over)

    def stop(self) -> None:
        """Count no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count(self) -> None:
        self._left_s = max(0.0, self._left_s - min(self._loop.time() - self._begun_s, 2 * self._wait_s))

    def _over(self) -> None:
        self._timer = None
        self._count()
        if self._left_s:
            self.go()
        else:
            self._strike()


class Calls:
    """What one console asks of its host."""

    def __init__(
        self,
        wire: Wire,
        send: Callable[[list[bytes]], bool],
        clock: LineClock,
        fail: Callable[[BaseException], None],
    ) -> None:
        """`fail` is told what the host raised: an error of ours, which ends the line."""
        self.host: Host | None = None
        """None: it is offered no function, so whatever looks like a call is dropped."""
        self._wire, self._send, self._clock, self._fail = wire, send, clock, fail
        self._tasks: set[asyncio.Task[None]] = set()
        self._line = b""
        self._late = False
        self._count = 0

    def begin(self, line: bytes) -> None:
        """A line runs whose request has this header."""
        self._line, self._late, self._count = line, False, 0

    def refuse(self) -> None:
        """The time of the line is over: what it calls from now on is refused, and its clock stays as it is."""
        self._late = True

    def take(self, call: Call) -> None:
        """Have a call answered."""
        if self.host is None or call.line != self._line:
            return
        self._count += 1
        if len(self._tasks) >= _WAITING or self._count > _CALLS_A_LINE:
            return
        if not self._tasks and not self._late:
            self._clock.hold()
        task = asyncio.create_task(self._answer(self.host, call))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def _answer(self, host: Host, call: Call) -> None:
        reply = _TOO_LATE if self._late else await host.answer(call.content)
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
        """The line is over, and so is what it had asked for."""
        self._line = b""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLEANUP_S)
