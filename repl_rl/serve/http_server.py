"""HTTP server: its lifecycle, its listening socket, and its connections.

The server opens the engine and the consoles, serves, and drains after a stop. Connections are uvicorn's, with a
deadline per request and a limit on their number, which follows from the limit of open files.
"""

import asyncio
import resource
import socket
from collections.abc import Callable

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from repl_rl.errors import ConfigError
from repl_rl.rollout.synchronous_rollouts import OpenRollouts
from repl_rl.sandbox.base import Sandbox, SupportsContinue
from repl_rl.serve.auth import ApiKeys
from repl_rl.serve.conversation_service import ServerLimits, TurnService
from repl_rl.serve.http_errors import PATIENCE_S
from repl_rl.serve.prometheus_metrics import ServerMetrics
from repl_rl.serve.routes import ServerApp

_MAX_OPEN_FILES = 1 << 16
"""Largest limit of open files to set. Some systems allow numbers that other programs cannot handle."""
_SLACK_S = 2.0
"""Time to send the last answers after all turns have ended, seconds."""


class TurnServer:
    """One server, from its first connection to its last."""

    def __init__(
        self,
        opener: OpenRollouts,
        listener: socket.socket,
        name: str,
        limits: ServerLimits,
        keys: ApiKeys,
        drain_s: float,
        patience_s: int = PATIENCE_S,
    ) -> None:
        """Keep the arguments; `run` opens the server.

        Args:
            opener: see `RolloutConfig.open_rollouts`.
            listener: a listening socket, which `run` closes.
            name: the model name for clients.
            limits: the limits of the server.
            keys: the API keys with access.
            drain_s: time for running turns to finish after a stop, seconds (>= 0).
            patience_s: see `PATIENCE_S` (>= 1).
        """
        self._opener = opener
        self._listener = listener
        self._name = name
        self._limits = limits
        self._keys = keys
        self._drain_s = drain_s
        self._patience_s = patience_s
        self._stop_requested = asyncio.Event()
        self._service: TurnService | None = None

    def stop(self) -> None:
        """Stop the server. Running turns may finish before they are cancelled. Call this in the event loop of `run`."""
        self._stop_requested.set()

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Serve until `stop` is called. `on_ready` is called when the server answers.

        Raises:
            ConfigError: the sandbox's consoles take no line after an answer.
            UnrecoverableError: the engine died repeatedly.
            SandboxUnavailable, EngineError: a part does not start.
        """
        serve_task = asyncio.create_task(self._run_with_rollouts(on_ready), name="serving")
        stop_task = asyncio.create_task(self._stop_requested.wait(), name="wait for stop")
        try:
            await asyncio.wait({serve_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop_task.cancel()
            # Without a service the engine is still opening, which may take minutes. Do not wait for it.
            if self._service is None:
                serve_task.cancel()
            await asyncio.wait({serve_task})
        if not serve_task.cancelled():
            serve_task.result()

    async def _run_with_rollouts(self, on_ready: Callable[[], None]) -> None:
        """Open the engine and the consoles, and serve until the stop."""
        with self._listener:
            async with self._opener() as rollouts:
                await _validate_multi_turn_sandbox(rollouts.sandbox)
                self._service = TurnService(rollouts, self._limits, ServerMetrics(), self.stop)
                await self._run_until_stopped(self._service, on_ready)

    async def _run_until_stopped(self, service: TurnService, on_ready: Callable[[], None]) -> None:
        """Answer requests until the stop, then drain the turns and close the connections.

        Raises:
            UnrecoverableError: the engine died repeatedly.
        """
        # A server that only this machine can reach needs no keys, so it checks the host names of requests.
        host = self._listener.getsockname()[0]
        hosts = ("localhost", "127.0.0.1", "::1") if is_loopback(host) else None
        app = ServerApp(service, self._keys, self._name, hosts, self._patience_s)
        server = uvicorn.Server(
            uvicorn.Config(
                app.asgi, http=LimitedConnection, ws="none", lifespan="off", log_config=None, access_log=False,
                server_header=False, timeout_graceful_shutdown=None, timeout_keep_alive=self._patience_s,
            )
        )  # fmt: skip
        server_task = asyncio.create_task(server.serve(sockets=[self._listener]), name="server")
        stop_task = asyncio.create_task(self._stop_requested.wait(), name="wait for stop")
        try:
            # The socket listens already: clients that connect before uvicorn has started wait in its queue.
            on_ready()
            await asyncio.wait({server_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop_task.cancel()
            # End the turns first, while uvicorn can still send their answers.
            await service.drain(self._drain_s)
            server.should_exit = True
            await _wait_server_closed(server, server_task)
        if service.failure is not None:
            raise service.failure


async def _wait_server_closed(server: uvicorn.Server, server_task: "asyncio.Task[None]") -> None:
    """Wait until the last answers are sent. Then drop the connections of clients that do not receive them."""
    await asyncio.wait({server_task}, timeout=_SLACK_S)
    server.force_exit = True
    await asyncio.wait({server_task}, timeout=_SLACK_S)
    server_task.cancel()
    await asyncio.wait({server_task})


async def _validate_multi_turn_sandbox(sandbox: Sandbox) -> None:
    """Reject consoles that take no line after an answer, because no conversation could continue."""
    async with sandbox.session() as session:
        if not isinstance(session, SupportsContinue):
            remedy = "its consoles take no line after an answer, so a conversation cannot continue; use local or docker"
            raise ConfigError("sandbox", sandbox.name, remedy)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the address."""
    return host.startswith("127.") or host == "::1"


def open_listening_socket(host: str, port: int, patience_s: int = PATIENCE_S) -> socket.socket:
    """Open a listening socket. `patience_s`: see `PATIENCE_S` (>= 1).

    Raises:
        ConfigError: nothing can listen at this address.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:
        remedy = "choose another --port (0: any that is free), or another --host"
        raise ConfigError("host and port", f"{host}:{port}", f"nothing can listen there: {error}; {remedy}") from error
    # Accepted connections inherit both options. With this one, the system closes a connection whose reader takes
    # nothing.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * patience_s)
    # asyncio sets this one only for sockets that name their protocol, which this one does not. Without it a line waits
    # about 40 ms for the client to acknowledge the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class LimitedConnection(H11Protocol):
    """HTTP connection with one request at a time, whose head must arrive within `timeout_keep_alive` seconds.

    The connection is aborted if the client sends more after a request that is not answered yet. uvicorn stops reading
    then, so the server would not notice that the client disconnects.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Extend uvicorn's handler: abort the connection if there are too many."""
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        if len(self.connections) > compute_max_connections():
            transport.abort()
        else:
            self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Extend uvicorn's handler: cancel the deadline."""
        super().connection_lost(exc)
        self._cancel_deadline()

    def data_received(self, data: bytes) -> None:
        """Extend uvicorn's handler: a complete head cancels the deadline, other data starts one."""
        super().data_received(data)
        if self._is_request_open:
            self._cancel_deadline()
        elif self._deadline is None:
            self._start_deadline()

    def handle_events(self) -> None:
        """Extend uvicorn's handler: abort the connection if more data follows a request in progress."""
        super().handle_events()
        # DONE: the request is complete. Data after it is of no request that can be answered now.
        if self._is_request_open and self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            self.transport.abort()

    @property
    def _is_request_open(self) -> bool:
        """True if a request is in progress."""
        return self.cycle is not None and not self.cycle.response_complete

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def compute_max_connections() -> int:
    """Return half of the limit of open files. The other half is for consoles and the engine."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (_MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft) // 2


def raise_file_limit() -> None:
    """Raise the limit of open files of this process as far as the system allows, up to `_MAX_OPEN_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
