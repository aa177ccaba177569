"""Console on another machine, as its rollout sees it: one call per line."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from repl_rl.errors import ConfigError
from repl_rl.sandbox.base import Host, PushResult, refuse_unfit
from repl_rl.sandbox.nodes.messages import Hosting, HostLost, Offered, Turn

_CLEANUP_S = 10.0
"""Time for host functions to end after their line, seconds."""


class HostedSession:
    """Console that a host holds. Two tasks must not use it at once."""

    def __init__(self, host: Hosting, number: int, lost: Callable[[str], None]) -> None:
        """`lost` is called if the host is gone."""
        self._hosting, self._number, self._lost = host, number, lost
        self._host: Host | None = None
        self._told = self._ended = False

    @property
    def ended(self) -> bool:
        """True once no further line can be pushed."""
        return self._ended

    def offer(self, host: Host) -> None:
        """As `Calling.offer`."""
        if self._told:
            raise ConfigError("session.offer()", "after a line ran", "offer host functions before the first line")
        self._host = host

    async def push(self, line: str) -> PushResult:
        """As `SandboxSession.push`. `elapsed_s` includes the latency of the network.

        Raises:
            SandboxLost: the console died with its fork server or container, or its process or machine is gone.
        """
        refuse_unfit(line, ended=self._ended)
        started = time.perf_counter()
        # True until the reply comes: after a cancelled push, the state of the console is unknown.
        self._ended = True
        offered, self._told = self._offered(), True
        answering: set[asyncio.Task[None]] = set()
        try:
            turn = await self._hosting.push(self._number, line, offered)
            while turn.result is None:
                # Answer the calls of host functions while the line runs on.
                answering |= {asyncio.create_task(self._answer(*call)) for call in turn.calls}
                turn = await self._next(answering)
        except HostLost as lost:
            self._lost(str(lost))
            raise
        finally:
            await _cancelled(answering)
        self._ended = turn.ended
        return replace(turn.result, elapsed_s=time.perf_counter() - started)

    def _offered(self) -> Offered | None:
        host = self._host
        return None if host is None or self._told else Offered(dict(host.functions), host.argument_bytes)

    async def _next(self, answering: "set[asyncio.Task[None]]") -> Turn:
        """Return the next turn of the line. An exception of an answer is an internal error, which ends the line."""
        following = asyncio.create_task(self._hosting.turn(self._number))
        try:
            while not following.done():
                done, _ = await asyncio.wait({following, *answering}, return_when=asyncio.FIRST_COMPLETED)
                # `result` raises the exception of a failed answer.
                for task in done & answering:
                    answering.discard(task)
                    task.result()
            return following.result()
        finally:
            following.cancel()

    async def _answer(self, call: int, content: bytes) -> None:
        if self._host is not None:
            await self._hosting.reply(self._number, call, await self._host.answer(content))

    def leave(self) -> None:
        """End the lease."""
        self._ended = True


async def _cancelled(tasks: "set[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CLEANUP_S)
