"""Console behind a Jupyter kernel. All data from there is untrusted, and checked field by field."""

import asyncio
import base64
import json
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from functools import partial

from repl_rl.errors import ConfigError, SandboxFault, SetupError
from repl_rl.record.setup import Setup
from repl_rl.record.trajectory import LineStatus
from repl_rl.sandbox.base import INODES, OPEN_FILES, Host, Limits, PushResult, refuse_unfit
from repl_rl.sandbox.gateway.link import KernelDied, KernelLink, parsed
from repl_rl.sandbox.typed import Typed, of_death, of_reply
from repl_rl.sandbox.wire import MalformedReply, claimed, plain_text

ASK = "_repl_ask"
"""Name of the function that the set-up cell defines."""
_SLACK_S = 30.0
"""Time that a network and a busy server may add to a request, seconds."""
_WORKSPACE_BYTES = 4 << 20
"""Maximum compressed size of a workspace. Servers close a websocket that receives more than 10 MiB at once."""
_TOO_LONG = b'{"error": "the call is longer than is allowed"}'


@dataclass(frozen=True, slots=True)
class _Died:
    """Implementation of `Ended`."""

    code: int | None
    text: str
    cut: bool


class GatewaySession:
    """Console that is reached through its relay next to a Jupyter kernel. Two tasks must not use it at once."""

    def __init__(self, link: KernelLink, threads: Executor, limits: Limits, let_go: Callable[[], None]) -> None:
        """`let_go` ends its kernel."""
        self._link, self._threads, self._limits, self._let_go = link, threads, limits, let_go
        self._typed = Typed(decide=False)
        self._host: Host | None = None
        self._told = self._ended = self._closed = False
        self.python_version = (0, 0, 0)

    @property
    def ended(self) -> bool:
        """True once no further line can be pushed."""
        return self._ended

    @property
    def dead(self) -> bool:
        """True once the connection is lost or closed."""
        return not self._link.open

    def offer(self, host: Host) -> None:
        """As `Calling.offer`."""
        if self._told:
            raise ConfigError("session.offer()", "after a line ran", "offer host functions before the first line")
        self._host = host

    async def begin(self, setup: Setup | None = None) -> None:
        """Start the console. If one runs already, replace it.

        Raises:
            SetupError: the workspace cannot be made.
            SandboxFault: no console could be started.
            SandboxLost: its server is gone.
        """
        chosen = asdict(self._limits)
        names = ("cpu_s", "memory_mb", "output_bytes", "processes", "disk_mb")
        request = {name: chosen[name] for name in names} | {"open_files": OPEN_FILES, "inodes": INODES, "uid": 0}
        packed = None if setup is None else _packed(setup)
        asked = {"do": "begin", "limits": json.dumps(request), "content": packed}
        try:
            said = await self._ask(asked, self._limits.cpu_s)
        except KernelDied:
            raise SandboxFault("a kernel died before its console was born") from None
        refused = said.get("refused")
        if setup is not None and isinstance(refused, dict):
            place, value, problem = (plain_text(str(refused.get(name))) for name in ("place", "value", "problem"))
            raise SetupError(f"workspace {setup.digest[:12]}, {place}", value, f"{problem}; correct the workspace")
        # The reply is untrusted: check the shape of the version.
        version = said.get("python")
        if not (isinstance(version, list) and len(version) == 3 and all(isinstance(part, int) for part in version)):
            raise SandboxFault(f"no console could be started: {plain_text(str(said.get('fault')))[-2000:]}")
        self.python_version = (version[0], version[1], version[2])
        self._typed = Typed(decide=self.python_version[:2] == sys.version_info[:2])

    async def push(self, line: str) -> PushResult:
        """As `SandboxSession.push`."""
        refuse_unfit(line, ended=self._ended)
        started = time.perf_counter()
        code = self._typed.add(line)
        if isinstance(code, PushResult):
            return code
        # True until the reply comes: after a cancelled push, the state of the console is unknown.
        self._ended = True
        limit_s = self._limits.line_timeout_s + self._limits.interrupt_grace_s
        grace_s = self._limits.interrupt_grace_s
        asked = {"do": "line", "code": code, "timeout_s": self._limits.line_timeout_s, "grace_s": grace_s}
        try:
            said = await self._ask({**asked, "offer": self._offer()}, limit_s)
        except KernelDied:
            # A line can end its kernel, because only the server isolates the two.
            return PushResult("", False, LineStatus.KILLED, None, time.perf_counter() - started)
        return self._result(said, time.perf_counter() - started)

    def _offer(self) -> str | None:
        host, told, self._told = self._host, self._told, True
        if host is None or told:
            return None
        return json.dumps({"functions": dict(host.functions), "argument_bytes": host.argument_bytes})

    def _result(self, said: dict[str, object], elapsed_s: float) -> PushResult:
        interrupted, reply, code = said.get("interrupted") is True, said.get("reply"), said.get("death")
        if isinstance(reply, dict):
            try:
                result = of_reply(claimed(reply), self._limits, elapsed_s, interrupted=interrupted)
            except (MalformedReply, KeyError, TypeError):
                return PushResult("", False, LineStatus.SANDBOX_FAULT, None, elapsed_s)
            self._ended = self._typed.ends_with(result)
            return result
        text = said.get("text")
        if "death" not in said or not isinstance(text, str) or not (code is None or isinstance(code, int)):
            return PushResult("", False, LineStatus.SANDBOX_FAULT, None, elapsed_s)
        died = _Died(code, plain_text(text), said.get("cut") is True)
        return of_death(died, self._limits, elapsed_s, interrupted=interrupted)

    async def _ask(self, asked: Mapping[str, object], limit_s: float) -> dict[str, object]:
        """Send a request to the relay. The timeout is `limit_s` plus slack for the network."""
        code = f"_repl_said = {ASK}({json.dumps(asked)!r})"
        loop = asyncio.get_running_loop()
        calls: set[asyncio.Future[bytes]] = set()

        def answer(prompt: str) -> str:
            # This runs in the thread that waits for the reply.
            call = asyncio.run_coroutine_threadsafe(self._answered(prompt, calls), loop)
            return base64.b64encode(call.result()).decode()

        work = partial(self._link.ask, code, "_repl_said", limit_s + _SLACK_S, answer)
        try:
            return parsed(await loop.run_in_executor(self._threads, work))
        finally:
            for call in calls:
                call.cancel()

    async def _answered(self, prompt: str, calls: "set[asyncio.Future[bytes]]") -> bytes:
        """Return the host's answer to a call of one of its functions."""
        host = self._host
        try:
            content = base64.b64decode(prompt, validate=True)
        except ValueError:
            content = b""
        if host is None or len(content) > host.argument_bytes:
            return _TOO_LONG
        call = asyncio.ensure_future(host.answer(content))
        calls.add(call)
        return await call

    def close(self) -> None:
        """End its kernel, and release its resources."""
        self._ended = True
        if not self._closed:
            self._closed = True
            self._threads.submit(self._link.close)
            self._let_go()


def _packed(setup: Setup) -> str:
    packed = zlib.compress(setup.content)
    if len(packed) > _WORKSPACE_BYTES:
        remedy = f"a gateway takes {_WORKSPACE_BYTES}; make it smaller, or use another sandbox"
        raise SetupError(f"workspace {setup.digest[:12]}, its size", f"{len(packed)} bytes, compressed", remedy)
    return base64.b64encode(packed).decode()
