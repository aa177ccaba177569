"""Host side of the `gateway` sandbox: consoles behind the kernels of one Jupyter server, leased from a pool.

- the host end of the process that owns a run's kernels
- the websocket to one kernel, through Jupyter's own client
- the console behind a kernel
- the sandbox

All data from a kernel is untrusted, and checked field by field.
"""

import asyncio
import base64
import contextlib
import io
import itertools
import json
import logging
import sys
import time
import zipfile
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from queue import Empty
from typing import NotRequired, Self, TypeAlias, TypedDict

from jupyter_kernel_client.wsclient import KernelWebSocketClient

from repl_rl.errors import ConfigError, SandboxFault, SandboxLost, SandboxUnavailable, SetupError
from repl_rl.sandbox.base import INODES, OPEN_FILES, HostCallHandler, Limits, LineResult, SandboxOptions, validate_line
from repl_rl.sandbox.console_pool import PATIENCE_S, ConsolePool
from repl_rl.sandbox.isolated_subprocess import ENVIRONMENT
from repl_rl.sandbox.jupyter_gateway.gateway_address import TOKEN, URL, GatewayAddress
from repl_rl.sandbox.jupyter_kernelspec import NAME
from repl_rl.sandbox.jupyter_wire import (
    MalformedReply,
    PendingCell,
    replace_surrogates,
    validate_claim,
)
from repl_rl.sandbox.line_status import make_result_from_exit, make_result_from_reply
from repl_rl.trajectory.trajectory import LineStatus, WorkspaceContent
from repl_rl.utils.package_data import find_asset

log = logging.getLogger(__name__)
Content: TypeAlias = Mapping[str, object]

_OWNER = Path(__file__).with_name("kernel_lifetime.py")
"""Program that owns the kernels."""
_LINE_BYTES = 1 << 24
"""Maximum size of a line of the child process, which bounds the answers that it reads."""
_ENDING_S = 60.0
"""Time for the child process to end all kernels, seconds."""
_REFUSED = (401, 403)
"""HTTP statuses of a server that does not accept the token."""
_CONNECT_S = 30.0
_LOOK_S = 0.02
"""Interval at which a thread that waits for a reply checks for questions and for the end of the kernel, seconds."""
ASK = "_repl_ask"
"""Name of the function that the set-up cell defines."""
_SET_UP_S = 60.0
"""Time for the set-up cell, seconds."""
_SLACK_S = 30.0
"""Time that a network and a busy server may add to a request, seconds."""
_WORKSPACE_BYTES = 4 << 20
"""Maximum compressed size of a workspace. Servers close a websocket that receives more than 10 MiB at once."""
_TOO_LONG = b'{"error": "the call is longer than is allowed"}'
_THREADS = 1024
"""Maximum lines that run at once. Each waits in a thread."""


class _OwnerLine(TypedDict):
    """Line of the process that owns the kernels: the answer to a request."""

    number: int
    status: int
    said: NotRequired[object]
    error: NotRequired[str]


@dataclass(frozen=True, slots=True)
class GatewayResponse:
    """Answer of the server."""

    status: int
    """HTTP status. 0 means that the server cannot be reached."""
    content: object
    error: str

    @property
    def is_token_refused(self) -> bool:
        """True if the server does not accept the token."""
        return self.status in _REFUSED


class GatewayKernels:
    """Client that starts and ends kernels on one server. Its child process ends them all when this process is gone."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[GatewayResponse]] = {}
        self._reader = asyncio.create_task(self._read_responses())

    @classmethod
    async def connect(cls, address: GatewayAddress) -> Self:
        """Start the child process for a server. It sends no request yet."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", str(_OWNER)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            # A Ctrl-C in the terminal must not end this process before its kernels.
            start_new_session=True,
            limit=_LINE_BYTES,
        )
        kernels = cls(process)
        kernels._write_line({"url": address.url, "token": address.token})
        return kernels

    async def list_specs(self) -> GatewayResponse:
        """Return the kernelspecs of the server."""
        return await self._send_request("get", "kernelspecs")

    async def start_kernel(self, kernel: str) -> str:
        """Start a kernel, and return its id.

        Raises:
            SandboxLost: the server cannot be reached, or does not accept the token any more.
            SandboxFault: the server cannot start a kernel.
        """
        answer = await self._send_request("start", kernel)
        if answer.status == 0 or answer.is_token_refused:
            raise SandboxLost(f"the Jupyter server starts no kernel: {answer.error}")
        if not isinstance(answer.content, Mapping) or not isinstance(answer.content.get("id"), str):
            raise SandboxFault(f"the Jupyter server starts no kernel (status {answer.status}): {answer.error}")
        return str(answer.content["id"])

    def end_kernel(self, kernel_id: str) -> None:
        """End a kernel in the background."""
        if not self._reader.done():
            self._write_line({"do": "end", "what": kernel_id, "number": next(self._numbers)})

    async def close(self) -> None:
        """End all kernels."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_ENDING_S):
                await self._finish()
        except TimeoutError:
            self._process.kill()
            await self._finish()
        await self._reader

    async def _finish(self) -> None:
        """Wait for the end of the process."""
        assert self._process.stdout is not None
        await asyncio.wait([self._reader])
        # If `_read_responses` ended early, the process may wait until the rest of its output is read.
        await self._process.stdout.read()
        await self._process.wait()

    async def _send_request(self, action: str, argument: str) -> GatewayResponse:
        if self._reader.done():
            raise SandboxLost("the process that owns the kernels is gone")
        number = next(self._numbers)
        self._pending[number] = response = asyncio.get_running_loop().create_future()
        self._write_line({"do": action, "what": argument, "number": number})
        try:
            answer: GatewayResponse = await response
            return answer
        finally:
            del self._pending[number]

    def _write_line(self, line: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            # The process is gone; `_read_responses` reports it.
            self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def _read_responses(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                self._handle_response(json.loads(line))
        except (ValueError, RecursionError) as error:
            # A line that is too long or nested too deeply: the request that it answers is unknown.
            log.warning("the process that owns the kernels cannot be understood: %s", error)
        finally:
            # No further line is read, so the remaining requests get no answer.
            for response in self._pending.values():
                if not response.done():
                    response.set_exception(SandboxLost("the process that owns the kernels is gone"))

    def _handle_response(self, response: _OwnerLine) -> None:
        """Give an answer to its request."""
        pending, content = self._pending.get(response["number"]), response.get("said")
        if pending is None and isinstance(content, Mapping) and "id" in content:
            # The request was cancelled, but the kernel has started.
            self._end_abandoned_kernel(content["id"])
        elif pending is not None and not pending.done():
            pending.set_result(GatewayResponse(response["status"], content, response.get("error", "")))

    def _end_abandoned_kernel(self, kernel_id: str) -> None:
        """End a kernel whose request was cancelled before it started."""
        self._write_line({"do": "end", "what": kernel_id, "number": next(self._numbers)})


class KernelDied(Exception):
    """Error for a kernel whose own process ended while its server lives."""


class KernelWebSocket:
    """Connection to one kernel. All methods except `close` block, so call them in a thread, one by one."""

    def __init__(self, address: GatewayAddress, kernel_id: str) -> None:
        channels = f"ws{address.url.removeprefix('http')}/api/kernels/{kernel_id}/channels"
        headers = {"Authorization": f"token {address.token}"} if address.token else {}
        self._client = KernelWebSocketClient(channels, headers=headers, timeout=_CONNECT_S, log=log)
        self._closed = False

    @property
    def is_open(self) -> bool:
        """False once the connection is lost or closed."""
        return not self._closed and bool(self._client.connection_ready.is_set())

    def connect(self) -> None:
        """Open the websocket.

        Raises:
            SandboxLost: the server cannot be reached.
        """
        self._client.start_channels()
        if not self.is_open:
            raise SandboxLost("the Jupyter server accepts no websocket to its kernel")

    def run_and_read(self, code: str, value: str, limit_s: float, answer: Callable[[str], str]) -> str:
        """Run `code`, then return the `repr` of the expression `value`.

        `answer` receives the prompt of each `input()` call in the kernel, and returns the input.

        Raises:
            SandboxLost: the connection is gone, or no reply came in time.
            KernelDied: the kernel's process ended meanwhile.
            SandboxFault: the code raised an exception.
        """
        if not self.is_open:
            raise SandboxLost("the connection to the Jupyter server is gone, and the console with it")
        request_id = self._client.execute(code, silent=True, user_expressions={"said": value}, allow_stdin=True)
        content = self._wait_for_reply(request_id, limit_s, answer)
        # The part that reports an error: the reply itself, or the result of the expression in it.
        failure = content
        if content.get("status") == "ok":
            failure = _get_table(_get_table(content, "user_expressions"), "said")
            if failure.get("status") == "ok":
                return str(_get_table(failure, "data").get("text/plain"))
        raise SandboxFault(f"the kernel says {failure.get('ename')}: {failure.get('evalue')}")

    def _wait_for_reply(self, request_id: str, limit_s: float, answer: Callable[[str], str]) -> Content:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                reply = self._client.shell_channel.get_msg(timeout=_LOOK_S)
            except Empty:
                self._raise_if_closed()
            else:
                if _get_table(reply, "parent_header").get("msg_id") == request_id:
                    return _get_table(reply, "content")
            # Questions of the kernel are calls of host functions.
            for question in self._client.stdin_channel.get_msgs():
                if _get_table(question, "parent_header").get("msg_id") == request_id:
                    prompt = _get_table(question, "content").get("prompt")
                    if not isinstance(prompt, str):
                        raise SandboxFault("the kernel asks without a prompt")
                    # The time of the host's answer does not count towards the limit.
                    start = time.monotonic()
                    self._client.input(answer(prompt))
                    deadline += time.monotonic() - start
            if time.monotonic() > deadline:
                raise SandboxLost(f"the Jupyter server has not answered for {limit_s:g} s")

    def _raise_if_closed(self) -> None:
        """Raise an exception if no reply can come any more.

        Raises:
            SandboxLost: the connection is gone.
            KernelDied: the kernel's process ended.
        """
        for message in self._client.iopub_channel.get_msgs():
            if _get_table(message, "content").get("execution_state") in ("restarting", "dead"):
                raise KernelDied
        if not self.is_open:
            raise SandboxLost("the connection to the Jupyter server is gone, and the console with it")

    def close(self) -> None:
        """Close the websocket. Do not call this in the websocket's own thread."""
        self._closed = True
        self._client.stop_channels()


def _get_table(content: Content, name: str) -> Content:
    """Return the JSON object `name` in `content`, which is a kernel's message or part of one.

    Raises:
        SandboxFault: the value is missing, or is not a JSON object.
    """
    table = content.get(name)
    if not isinstance(table, Mapping):
        raise SandboxFault(f"a message of the kernel has no table {name!r}")
    return table


def parse_relay_reply(reply: str) -> dict[str, object]:
    """Parse the reply of a relay.

    Raises:
        SandboxFault: it is not a JSON object.
    """
    try:
        value = json.loads(reply)
    except (ValueError, RecursionError) as error:
        raise SandboxFault(f"a relay said {reply[:80]!r}") from error
    if not isinstance(value, dict):
        raise SandboxFault(f"a relay said {reply[:80]!r}")
    return value


@dataclass(frozen=True, slots=True)
class _GatewayExit:
    """Implementation of `ConsoleExit`."""

    code: int | None
    text: str
    truncated: bool


class GatewaySession:
    """Console that is reached through its relay next to a Jupyter kernel. Two tasks must not use it at once."""

    def __init__(
        self, websocket: KernelWebSocket, threads: Executor, limits: Limits, end_kernel: Callable[[], None]
    ) -> None:
        """`end_kernel` ends its kernel."""
        self._websocket, self._threads, self._limits, self._end_kernel = websocket, threads, limits, end_kernel
        self._pending_cell = PendingCell(decide=False)
        self._host: HostCallHandler | None = None
        self._offer_sent = self._ended = self._closed = False
        self.python_version = (0, 0, 0)

    @property
    def ended(self) -> bool:
        """True once no further line can be pushed."""
        return self._ended

    @property
    def is_dead(self) -> bool:
        """True once the connection is lost or closed."""
        return not self._websocket.is_open

    def offer_functions(self, host: HostCallHandler) -> None:
        """As `SupportsHostFunctions.offer_functions`."""
        if self._offer_sent:
            raise ConfigError(
                "session.offer_functions()", "after a line ran", "offer host functions before the first line"
            )
        self._host = host

    async def start_console(self, setup: WorkspaceContent | None = None) -> None:
        """Start the console. If one runs already, replace it.

        Raises:
            SetupError: the workspace cannot be made.
            SandboxFault: no console could be started.
            SandboxLost: its server is gone.
        """
        limits = asdict(self._limits)
        names = ("cpu_s", "memory_mb", "output_bytes", "processes", "disk_mb")
        request = {name: limits[name] for name in names} | {"open_files": OPEN_FILES, "inodes": INODES, "uid": 0}
        packed = None if setup is None else _pack_workspace(setup)
        message = {"do": "begin", "limits": json.dumps(request), "content": packed}
        try:
            reply = await self._send_to_relay(message, self._limits.cpu_s)
        except KernelDied:
            raise SandboxFault("a kernel died before its console was born") from None
        problem_report = reply.get("refused")
        if setup is not None and isinstance(problem_report, dict):
            location, value, problem = (
                replace_surrogates(str(problem_report.get(name))) for name in ("place", "value", "problem")
            )
            raise SetupError(f"workspace {setup.digest[:12]}, {location}", value, f"{problem}; correct the workspace")
        # The reply is untrusted: check the shape of the version.
        version = reply.get("python")
        if not (isinstance(version, list) and len(version) == 3 and all(isinstance(part, int) for part in version)):
            raise SandboxFault(f"no console could be started: {replace_surrogates(str(reply.get('fault')))[-2000:]}")
        self.python_version = (version[0], version[1], version[2])
        self._pending_cell = PendingCell(decide=self.python_version[:2] == sys.version_info[:2])

    async def push(self, line: str) -> LineResult:
        """As `SandboxSession.push`."""
        validate_line(line, ended=self._ended)
        start = time.perf_counter()
        code = self._pending_cell.add_line(line)
        if isinstance(code, LineResult):
            return code
        # True until the reply comes: after a cancelled push, the state of the console is unknown.
        self._ended = True
        # The relay enforces the deadline of the line; this limit is for its reply.
        limit_s = self._limits.line_timeout_s + self._limits.interrupt_grace_s
        grace_s = self._limits.interrupt_grace_s
        message = {"do": "line", "code": code, "timeout_s": self._limits.line_timeout_s, "grace_s": grace_s}
        try:
            reply = await self._send_to_relay({**message, "offer": self._build_offer()}, limit_s)
        except KernelDied:
            # A line can end its kernel, because only the server isolates the two.
            return LineResult("", False, LineStatus.KILLED, None, time.perf_counter() - start)
        return self._make_result(reply, time.perf_counter() - start)

    def _build_offer(self) -> str | None:
        host, is_sent, self._offer_sent = self._host, self._offer_sent, True
        if host is None or is_sent:
            return None
        return json.dumps({"functions": dict(host.functions), "argument_bytes": host.argument_bytes})

    def _make_result(self, reply: dict[str, object], elapsed_s: float) -> LineResult:
        interrupted, claim, code = reply.get("interrupted") is True, reply.get("reply"), reply.get("death")
        if isinstance(claim, dict):
            try:
                result = make_result_from_reply(validate_claim(claim), self._limits, elapsed_s, interrupted=interrupted)
            except (MalformedReply, KeyError, TypeError):
                return LineResult("", False, LineStatus.SANDBOX_FAULT, None, elapsed_s)
            self._ended = self._pending_cell.update_from_result(result)
            return result
        # Without a reply, the console must have died.
        text = reply.get("text")
        if "death" not in reply or not isinstance(text, str) or not (code is None or isinstance(code, int)):
            return LineResult("", False, LineStatus.SANDBOX_FAULT, None, elapsed_s)
        exit_info = _GatewayExit(code, replace_surrogates(text), reply.get("cut") is True)
        return make_result_from_exit(exit_info, self._limits, elapsed_s, interrupted=interrupted)

    async def _send_to_relay(self, message: Mapping[str, object], limit_s: float) -> dict[str, object]:
        """Send a request to the relay. The timeout is `limit_s` plus slack for the network."""
        code = f"_repl_said = {ASK}({json.dumps(message)!r})"
        loop = asyncio.get_running_loop()
        calls: set[asyncio.Future[bytes]] = set()

        def answer_input(prompt: str) -> str:
            # This runs in the thread that waits for the reply.
            call = asyncio.run_coroutine_threadsafe(self._answer_host_call(prompt, calls), loop)
            return base64.b64encode(call.result()).decode()

        run_request = partial(self._websocket.run_and_read, code, "_repl_said", limit_s + _SLACK_S, answer_input)
        try:
            return parse_relay_reply(await loop.run_in_executor(self._threads, run_request))
        finally:
            for call in calls:
                call.cancel()

    async def _answer_host_call(self, prompt: str, calls: "set[asyncio.Future[bytes]]") -> bytes:
        """Return the host's answer to a call of one of its functions."""
        host = self._host
        try:
            content = base64.b64decode(prompt, validate=True)
        except ValueError:
            content = b""
        if host is None or len(content) > host.argument_bytes:
            return _TOO_LONG
        call = asyncio.ensure_future(host.answer_call(content))
        calls.add(call)
        return await call

    def close(self) -> None:
        """End its kernel, and release its resources."""
        self._ended = True
        if not self._closed:
            self._closed = True
            self._threads.submit(self._websocket.close)
            self._end_kernel()


def _pack_workspace(setup: WorkspaceContent) -> str:
    packed = zlib.compress(setup.content)
    if len(packed) > _WORKSPACE_BYTES:
        remedy = f"a gateway takes {_WORKSPACE_BYTES}; make it smaller, or use another sandbox"
        raise SetupError(f"workspace {setup.digest[:12]}, its size", f"{len(packed)} bytes, compressed", remedy)
    return base64.b64encode(packed).decode()


class _GatewayConsoleFactory:
    """Source of consoles: one kernel of the server per console."""

    def __init__(self, kernels: GatewayKernels, address: GatewayAddress, options: SandboxOptions) -> None:
        self.kernel = address.kernel
        """Name of the kernel to start. Empty means the server's default."""
        self.threads = ThreadPoolExecutor(_THREADS, "gateway")
        self._kernels, self._address, self._options = kernels, address, options
        self._cell = _build_setup_cell(options.preload)

    async def open_console(self) -> GatewaySession:
        """Start a fresh console. If the server is away, retry for a while.

        Raises:
            SandboxFault: no console could be started.
            SandboxLost: the server is gone.
        """
        for pause_s in PATIENCE_S:
            try:
                return await self.try_open_console()
            except SandboxLost as error:
                log.warning("no console can be started (%s); the next try is in %g s", error, pause_s)
                await asyncio.sleep(pause_s)
        return await self.try_open_console()

    async def try_open_console(self) -> GatewaySession:
        """As `open_console`, but without retries."""
        kernel_id = await self._kernels.start_kernel(self.kernel)
        websocket = KernelWebSocket(self._address, kernel_id)
        end_kernel = partial(self._kernels.end_kernel, kernel_id)
        session = GatewaySession(websocket, self.threads, self._options.limits, end_kernel)
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self.threads, websocket.connect)
            # The set-up cell starts the relay, which then starts the console.
            run_setup_cell = partial(websocket.run_and_read, self._cell, f"callable({ASK})", _SET_UP_S, _answer_nothing)
            await loop.run_in_executor(self.threads, run_setup_cell)
            await session.start_console()
        except KernelDied:
            session.close()
            raise SandboxFault("a kernel died before its console was born") from None
        except BaseException:
            session.close()
            raise
        return session


@cache
def _pack_relay() -> str:
    """Return the kernel's package as a base64-encoded zip file."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as package:
        for path in sorted(find_asset("sandbox/repl_kernel").iterdir()):
            if path.suffix in (".py", ".json"):
                package.write(path, f"repl_kernel/{path.name}")
    return base64.b64encode(packed.getvalue()).decode()


def _build_setup_cell(preload: Sequence[str]) -> str:
    """Return the set-up cell. It defines a function that sends requests to the relay."""
    variables = {name: value for name, value in ENVIRONMENT.items() if name != "PATH"}
    options = json.dumps({"isolate": False, "preload": list(preload)})
    cell = find_asset("sandbox/gateway_cell.py").read_text()
    return f"{cell}\n{ASK} = _repl_open({_pack_relay()!r}, {variables!r}, {options!r})"


def _answer_nothing(prompt: str) -> str:
    return ""


class GatewaySandbox:
    """Sandbox that leases consoles from a pool."""

    name = "gateway"

    def __init__(self, python_version: tuple[int, int, int], pool: ConsolePool[GatewaySession]) -> None:
        self.python_version = python_version
        self._pool = pool

    def session(self) -> AbstractAsyncContextManager[GatewaySession]:
        """As `Sandbox.session`."""
        return self._pool.lease()

    @asynccontextmanager
    async def open_workspace_session(self, setup: WorkspaceContent) -> AsyncIterator[GatewaySession]:
        """As `SupportsWorkspace.open_workspace_session`. The workspace is made anew for each console."""
        async with self._pool.lease() as session:
            await session.start_console(setup)
            yield session


@asynccontextmanager
async def open_gateway_sandbox(address: GatewayAddress, options: SandboxOptions) -> AsyncIterator[GatewaySandbox]:
    """Serve consoles from a pool of a server's kernels for the duration of the context.

    Raises:
        SandboxUnavailable: the server cannot be used, or none of its kernels can run a console.
    """
    kernels = await GatewayKernels.connect(address)
    source = _GatewayConsoleFactory(kernels, address, options)
    pool = ConsolePool(source.open_console, warm=options.pool_size, starting=options.max_concurrent_starts)
    try:
        source.kernel = _choose_kernel(await kernels.list_specs(), address)
        try:
            # Open one console now, so that an unusable kernel is an error here and not in a rollout.
            console = await source.try_open_console()
        except SandboxFault as fault:
            remedy = f"name a Python kernel with ipykernel on Linux behind the # of {URL}"
            raise _make_unavailable_error(f"no console can be opened at {address.url}: {fault}", remedy) from fault
        version = console.python_version
        if options.pool_size:
            pool.add_console(console)
        else:
            console.close()
        pool.start_missing()
        yield GatewaySandbox(version, pool)
    finally:
        await pool.close()
        await kernels.close()
        await asyncio.to_thread(source.threads.shutdown)


def _choose_kernel(answer: GatewayResponse, address: GatewayAddress) -> str:
    """Return the name of the kernel to start, after a check of the server's list. Empty means the server's default.

    Raises:
        SandboxUnavailable: this is not a Jupyter server, it rejects the token, or it does not have this kernel.
    """
    if answer.status == 0:
        raise _make_unavailable_error(
            f"{address.url} cannot be reached ({answer.error})", f"start the server, or correct {URL}"
        )
    if answer.is_token_refused:
        raise _make_unavailable_error(
            f"{address.url} does not take the token (status {answer.status})", f"put it into {TOKEN}"
        )
    specs = answer.content.get("kernelspecs") if isinstance(answer.content, Mapping) else None
    if not isinstance(specs, Mapping):
        reason = f"status {answer.status} for its kernels: {answer.error or 'no list'}"
        raise _make_unavailable_error(f"{address.url} is not a Jupyter server ({reason})", f"correct {URL}")
    if address.kernel and address.kernel not in specs:
        remedy = f"name one of {', '.join(sorted(specs)) or '(none)'} behind the # of {URL}, or none"
        raise _make_unavailable_error(f"{address.url} has no kernel {address.kernel!r}", remedy)
    return address.kernel or (NAME if NAME in specs else "")


def _make_unavailable_error(problem: str, remedy: str) -> SandboxUnavailable:
    return SandboxUnavailable(f"sandbox 'gateway': {problem}; {remedy}")
