"""One console on another machine, as whoever plays its rollout sees it: one call a line."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from repl_rl.errors import ConfigError
from repl_rl.sandbox.base import Host, PushResult, refuse_unfit
from repl_rl.sandbox.nodes.messages import Hosting, HostLost, Offered, Turn

_CLEANUP_S = 10.0
"""How long host functions whose line is over may take to end."""


class HostedSession:
    """A console that a host holds. Not for use by two tasks at once."""

    def __init__(self, host: Hosting, number: int, lost: Callable[[str], None]) -> None:
        """`lost` is told where the host is gone."""
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
        """As `SandboxSession.push`; what the way there takes is part of `elapsed_s`.

        Raises:
            SandboxLost: the console died with what had made it, or the process or machine that held it is gone.
        """
        refuse_unfit(line, ended=self._ended)
        started = time.perf_counter()
        self._ended = True  # until the line is back: a cancelled push leaves a console that nobody can follow
        offered, self._told = self._offered(), True
        answering: set[asyncio.Task[None]] = set()
        try:
            turn = await self._hosting.push(self._number, line, offered)
            while turn.result is None:
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
        """The next turn of the line. Raises what an answer raised: an error of ours, which ends the line."""
        following = asyncio.create_task(self._hosting.turn(self._number))
        try:
            while not following.done():
                done, _ = await asyncio.wait({following, *answering}, return_when=asyncio.FIRST_COMPLETED)
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
        """The lease is over."""
        self._ended = True


async def _cancelled(tasks: "set[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CLEANUP_S)
