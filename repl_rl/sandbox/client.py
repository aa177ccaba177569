"""One console, seen from the host: lines go in, results come out, deadlines are kept. Trusts nothing that it reads."""

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
"""How often it is looked whether a console that was killed died with what had made it, and at what distance."""
_LAST_REPLY_S = 0.05
"""A reply that was sent just before a death may arrive just after the news of it."""
_DEATH_NEWS_S = 1.0
"""How long a supervisor may take to report a death that we asked for, before it is killed as well."""
_MESSAGES_A_WAKE = 64
_QUEUED_MESSAGES = 64
_NEVER = -1
"""A console listens before it is ready, so a lost connection is its end: what listens there next is another one."""

# Plain numbers: combining and converting the library's enumerations takes longer than sending a frame.
_DONTWAIT = int(zmq.DONTWAIT)
_MORE_FOLLOWS = int(zmq.DONTWAIT | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_READABLE = int(zmq.POLLIN)


class ConsoleSession:
    """A console that runs in another process. Not for use by two tasks at once."""

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
        """`decide`: host and console run the same Python, so the host may judge whether a cell is complete.

        `lost`: what made this console is gone.
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
        self._socket.rcvhwm = _QUEUED_MESSAGES
        self._socket.maxmsgsize = (1 << 20) + 8 * limits.output_bytes
        self._socket.connect(address)
        self._loop.add_reader(self._socket.fileno(), self._drain)
        link.on_death = self._on_death
        self.on_close: Callable[[], None] = _nothing
        """Called once, when this console has been let go."""

    @property
    def ended(self) -> bool:
        """True once no further line can be pushed."""
        return self._ended

    @property
    def dead(self) -> bool:
        """True once its process is gone: a console that waited for its lease can be."""
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
        """As `SandboxSession.push`. The deadline of a line stands still while the host works for it.

        Raises:
            SandboxLost: the console died because what had made it did.
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
        """The console's reply, or its death; None: it answered with nonsense."""
        if self._socket.closed:
            self._ended = True
            raise SandboxLost(_GONE)
        self._ended = True  # until the line is back: a cancelled push leaves a console that nobody can follow
        self._interrupting = None
        self._header, frames = self._wire.request(code, self._offer(), self._afresh)
        self._afresh = False
        self._pending = self._loop.create_future()
        self._calls.begin(self._header)
        self._clock.start(self._limits.line_timeout_s)
        try:
            if not self._send(frames):  # it let go of the connection: nothing of it can be heard any more
                self._kill()
            if self._link.death is not None:
                self._on_death()
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
        """What the first request says of the host's functions."""
        host, told, self._told = self._calls.host, self._told, True
        if host is None or told:
            return None
        return {"functions": dict(host.functions), "argument_bytes": host.argument_bytes}

    async def _signal_is_out(self) -> None:
        """An interrupt must have been delivered before the next line starts, or it would hit that one."""
        if self._interrupting is not None:
            await self._interrupting

    def _send(self, frames: list[bytes]) -> bool:
        """Send a message; False: nobody takes it."""
        if self._socket.closed:
            return False
        try:
            for frame in frames[:-1]:
                self._socket.send(frame, _MORE_FOLLOWS)
            self._socket.send(frames[-1], _DONTWAIT)
        except zmq.Again:
            return False
        self._drain()  # the descriptor tells of changes only, and sending swallows them
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
        """Take every message that has arrived; all but what the line that runs now says are dropped."""
        if self._socket.closed:
            return
        for _ in range(_MESSAGES_A_WAKE):
            if not int(self._socket.getsockopt(_EVENTS)) & _READABLE:
                return
            frames = self._socket.recv_multipart(_DONTWAIT)
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
        self._loop.call_soon(self._drain)

    def _of_reply(self, reply: Reply, elapsed_s: float) -> PushResult:
        self._link.forget_address()
        result = of_reply(reply, self._limits, elapsed_s, interrupted=self._interrupting is not None)
        self._ended = self._typed.ends_with(result)
        self._answered = result.status is LineStatus.ANSWERED
        return result

    async def _refuse_lost(self, death: Death) -> None:
        """Raise SandboxLost where what made this console died with it. That may be seen a little later than its end."""
        unexplained = death.code in (None, -_SIGKILL) and self._interrupting is None  # not by us, at its deadline
        for look in range(_LOOKS if unexplained else 1):
            if look:
                await asyncio.sleep(_LOOK_S)
            if self._lost():
                raise SandboxLost(_GONE)

    def abandon(self) -> None:
        """What made this console is gone: whoever uses it learns that, now or with the next line."""
        self._fail(SandboxLost(_GONE))
        self._leave()

    def _leave(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _of_death(self, death: Death, elapsed_s: float) -> PushResult:
        return of_death(death, self._limits, elapsed_s, interrupted=self._interrupting is not None)

    def close(self) -> None:
        """Kill the console and let go of everything."""
        self._ended = True
        self._leave()
        self._link.close()
        on_close, self.on_close = self.on_close, _nothing
        on_close()


def _nothing() -> None:
    pass
