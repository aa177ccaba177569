"""Host end of one console: sends lines, checks replies, enforces deadlines. All data that it reads is untrusted."""

import asyncio
import time
from collections.abc import Callable

import zmq

from repl_rl.errors import ConfigError, SandboxLost
from repl_rl.record.trajectory import LineStatus
from repl_rl.sandbox.base import Host, Limits, PushResult, refuse_unfit
from repl_rl.sandbox.calls import Calls, LineClock
from repl_rl.sandbox.keeper import Death, KeeperLink
from repl_rl.sandbox.typed import Typed, of_death, of_reply
from repl_rl.sandbox.wire import MalformedReply, Reply, Wire

_SIGKILL = 9
_GONE = "what made the console is gone, and the console with it"
_LOOKS, _LOOK_S = 4, 0.05
"""Number of checks, and seconds between them, for whether a killed console died together with its fork server."""
_LAST_REPLY_S = 0.05
"""Time to wait for a last reply after the notice of a death, seconds. The two may arrive in either order."""
_DEATH_NEWS_S = 1.0
"""Time for a supervisor to report a requested death, seconds. After it, the supervisor is killed as well."""
_MESSAGES_A_WAKE = 64
_QUEUED_MESSAGES = 64
_NEVER = -1
"""Disables reconnecting. A lost connection ends the console, and another console may listen at its address next."""

# Plain numbers: combining and converting the library's enumerations takes longer than sending a frame.
_DONTWAIT = int(zmq.DONTWAIT)
_MORE_FOLLOWS = int(zmq.DONTWAIT | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_READABLE = int(zmq.POLLIN)


class ConsoleSession:
    """Console that runs in another process. Two tasks must not use it at once."""

    def __init__(
        self,
        link: KeeperLink,
        key: str,
        limits: Limits,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *,
        decide: bool,
        lost: Callable[[], bool],
    ) -> None:
        """`decide`: host and console run the same Python, so the host may decide whether a cell is complete.

        `lost`: returns True if the fork server of this console is gone.
        """
        self._link = link
        self._lost = lost
        self._limits = limits
        self._wire = Wire(key)
        self._typed = Typed(decide=decide)
        self._ended = False
        self._interrupting: asyncio.Future[None] | None = None
        self._pending: asyncio.Future[Reply | Death | None] | None = None
        self._header = b""
        self._timer: asyncio.TimerHandle | None = None
        self._clock = LineClock(self._interrupt)
        self._calls = Calls(self._wire, self._send, self._clock, self._fail)
        self._told = False
        self._answered = self._afresh = False
        self._loop = asyncio.get_running_loop()
        address = link.open_address()
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.reconnect_ivl = _NEVER
        # Bound the memory that a console's messages can use on the host.
        self._socket.rcvhwm = _QUEUED_MESSAGES
        self._socket.maxmsgsize = (1 << 20) + 8 * limits.output_bytes
        self._socket.connect(address)
        self._loop.add_reader(self._socket.fileno(), self._drain)
        link.on_death = self._on_death
        self.on_close: Callable[[], None] = _nothing
        """Called once, when this console is released."""

    @property
    def ended(self) -> bool:
        """True once no further line can be pushed."""
        return self._ended

    @property
    def dead(self) -> bool:
        """True once its process has ended. This can happen while the console waits for its lease."""
        return self._socket.closed or self._link.death is not None

    def offer(self, host: Host) -> None:
        """As `Calling.offer`."""
        if self._told:
            raise ConfigError("session.offer()", "after a line ran", "offer host functions before the first line")
        self._calls.host = host

    def go_on(self) -> None:
        """As `Continuing.go_on`."""
        if self._ended and not self._answered:
            raise ConfigError("session.go_on()", "ended", "only an answer can be followed by further lines")
        self._afresh = self._afresh or self._answered
        self._ended = self._answered = False

    async def push(self, line: str) -> PushResult:
        """As `SandboxSession.push`. The line's clock is paused while the host works for it.

        Raises:
            SandboxLost: the console died because its fork server or container died.
        """
        refuse_unfit(line, ended=self._ended)
        started = time.perf_counter()
        code = self._typed.add(line)
        if isinstance(code, PushResult):
            return code
        outcome = await self._run(code)
        elapsed_s = time.perf_counter() - started
        if outcome is None:
            return PushResult("", False, LineStatus.SANDBOX_FAULT, None, elapsed_s)
        if isinstance(outcome, Reply):
            return self._of_reply(outcome, elapsed_s)
        await self._refuse_lost(outcome)
        return self._of_death(outcome, elapsed_s)

    async def _run(self, code: str) -> Reply | Death | None:
        """Return the console's reply or its death. None means that the reply was malformed."""
        if self._socket.closed:
            self._ended = True
            raise SandboxLost(_GONE)
        # True until the reply comes: after a cancelled push, the state of the console is unknown.
        self._ended = True
        self._interrupting = None
        self._header, frames = self._wire.request(code, self._offer(), self._afresh)
        self._afresh = False
        self._pending = self._loop.create_future()
        self._calls.begin(self._header)
        self._clock.start(self._limits.line_timeout_s)
        try:
            if not self._send(frames):
                # The console closed its connection, so no reply can come any more.
                self._kill()
            if self._link.death is not None:
                self._on_death()
            # `_drain`, `_on_death` or `_destroy` sets the result.
            outcome = await self._pending
            await self._signal_is_out()
        finally:
            self._clock.stop()
            if self._timer is not None:
                self._timer.cancel()
            self._pending = None
            await self._calls.end()
        return outcome

    def _offer(self) -> dict[str, object] | None:
        """Return the description of the host functions for the first request, and None after it."""
        host, told, self._told = self._calls.host, self._told, True
        if host is None or told:
            return None
        return {"functions": dict(host.functions), "argument_bytes": host.argument_bytes}

    async def _signal_is_out(self) -> None:
        """Wait until a requested interrupt is delivered, because a later one would hit the next line."""
        if self._interrupting is not None:
            await self._interrupting

    def _send(self, frames: list[bytes]) -> bool:
        """Send a message. Return False if the console does not accept it."""
        if self._socket.closed:
            return False
        try:
            for frame in frames[:-1]:
                self._socket.send(frame, _MORE_FOLLOWS)
            self._socket.send(frames[-1], _DONTWAIT)
        except zmq.Again:
            return False
        # ZeroMQ's descriptor is edge-triggered, and sending consumes edges: without this, a reply could stay unread.
        self._drain()
        return True

    def _interrupt(self) -> None:
        self._calls.refuse()
        self._interrupting = self._link.interrupt()
        self._timer = self._loop.call_later(self._limits.interrupt_grace_s, self._kill)

    def _kill(self) -> None:
        self._link.kill()
        self._timer = self._loop.call_later(_DEATH_NEWS_S, self._destroy)

    def _destroy(self) -> None:
        self._link.destroy()
        self._resolve(Death(None))

    def _on_death(self) -> None:
        if self._pending is not None and self._link.death is not None:
            self._loop.call_later(_LAST_REPLY_S, self._resolve_for, self._header, self._link.death)

    def _resolve_for(self, header: bytes, death: Death) -> None:
        if header == self._header:
            self._drain()
            self._resolve(death)

    def _resolve(self, outcome: Reply | Death | None) -> None:
        if self._pending is not None and not self._pending.done():
            self._pending.set_result(outcome)

    def _fail(self, error: BaseException) -> None:
        if self._pending is not None and not self._pending.done():
            self._pending.set_exception(error)

    def _drain(self) -> None:
        """Read every message that has arrived. Messages that are not about the running line are dropped."""
        if self._socket.closed:
            return
        for _ in range(_MESSAGES_A_WAKE):
            if not int(self._socket.getsockopt(_EVENTS)) & _READABLE:
                return
            frames = self._socket.recv_multipart(_DONTWAIT)
            # No line waits for this message.
            if self._pending is None or self._pending.done():
                continue
            call = self._wire.call(frames, self._header)
            if call is not None:
                self._calls.take(call)
                continue
            try:
                reply = self._wire.reply(frames, self._header)
            except MalformedReply:
                self._pending.set_result(None)
                continue
            if reply is not None:
                self._pending.set_result(reply)
        # More messages may wait; read them after other callbacks have run.
        self._loop.call_soon(self._drain)

    def _of_reply(self, reply: Reply, elapsed_s: float) -> PushResult:
        self._link.forget_address()
        result = of_reply(reply, self._limits, elapsed_s, interrupted=self._interrupting is not None)
        self._ended = self._typed.ends_with(result)
        self._answered = result.status is LineStatus.ANSWERED
        return result

    async def _refuse_lost(self, death: Death) -> None:
        """Raise SandboxLost if the console died with its fork server, whose end may become visible a little later."""
        # Killed, or without a known exit code, and not interrupted by the host at the deadline.
        unexplained = death.code in (None, -_SIGKILL) and self._interrupting is None
        for look in range(_LOOKS if unexplained else 1):
            if look:
                await asyncio.sleep(_LOOK_S)
            if self._lost():
                raise SandboxLost(_GONE)

    def abandon(self) -> None:
        """Fail the running line, or else the next one, because the fork server of this console is gone."""
        self._fail(SandboxLost(_GONE))
        self._leave()

    def _leave(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _of_death(self, death: Death, elapsed_s: float) -> PushResult:
        return of_death(death, self._limits, elapsed_s, interrupted=self._interrupting is not None)

    def close(self) -> None:
        """Kill the console and release its resources."""
        self._ended = True
        self._leave()
        self._link.close()
        on_close, self.on_close = self.on_close, _nothing
        on_close()


def _nothing() -> None:
    pass
