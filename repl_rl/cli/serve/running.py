"""Lifecycle of a server: open the engine and the consoles, serve, and drain after a stop."""

import asyncio
import socket
from collections.abc import Callable

import uvicorn

from repl_rl.cli.serve.app import App
from repl_rl.cli.serve.connection import Connection
from repl_rl.cli.serve.desk import Bounds, Desk
from repl_rl.cli.serve.figures import Figures
from repl_rl.cli.serve.keys import Keys
from repl_rl.cli.serve.refusal import PATIENCE_S
from repl_rl.errors import ConfigError
from repl_rl.rollout.thread import Opener
from repl_rl.sandbox.base import Continuing, Sandbox

_SLACK_S = 2.0
"""Time to send the last answers after all turns have ended, seconds."""


class Serving:
    """One server, from its first connection to its last."""

    def __init__(
        self,
        opener: Opener,
        listening: socket.socket,
        name: str,
        bounds: Bounds,
        keys: Keys,
        drain_s: float,
        patience_s: int = PATIENCE_S,
    ) -> None:
        """Keep the arguments; `run` opens the server.

        Args:
            opener: see `World.rollouts`.
            listening: a listening socket, which `run` closes.
            name: the model name for clients.
            bounds: the limits of the server.
            keys: the API keys with access.
            drain_s: time for running turns to finish after a stop, seconds (>= 0).
            patience_s: see `PATIENCE_S` (>= 1).
        """
        self._opener = opener
        self._listening = listening
        self._name = name
        self._bounds = bounds
        self._keys = keys
        self._drain_s = drain_s
        self._patience_s = patience_s
        self._told = asyncio.Event()
        self._desk: Desk | None = None

    def stop(self) -> None:
        """Stop the server. Running turns may finish before they are cancelled. Call this in the event loop of `run`."""
        self._told.set()

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until `stop` is called. `ready` is called when the server answers.

        Raises:
            ConfigError: the sandbox's consoles take no line after an answer.
            BrokenDown: the engine died repeatedly.
            SandboxUnavailable, EngineError: a part does not start.
        """
        serving = asyncio.create_task(self._serve(ready), name="serving")
        told = asyncio.create_task(self._told.wait(), name="told to stop")
        try:
            await asyncio.wait({serving, told}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()
            # Without a desk the engine is still opening, which may take minutes. Do not wait for it.
            if self._desk is None:
                serving.cancel()
            await asyncio.wait({serving})
        if not serving.cancelled():
            serving.result()

    async def _serve(self, ready: Callable[[], None]) -> None:
        with self._listening:
            async with self._opener() as rollouts:
                await _refuse_final(rollouts.sandbox)
                self._desk = Desk(rollouts, self._bounds, Figures(), self.stop)
                await self._answer(self._desk, ready)

    async def _answer(self, desk: Desk, ready: Callable[[], None]) -> None:
        # A server that only this machine can reach needs no keys, so it checks the host names of requests.
        host = self._listening.getsockname()[0]
        hosts = ("localhost", "127.0.0.1", "::1") if is_loopback(host) else None
        app = App(desk, self._keys, self._name, hosts, self._patience_s)
        server = uvicorn.Server(
            uvicorn.Config(
                app.asgi, http=Connection, ws="none", lifespan="off", log_config=None, access_log=False,
                server_header=False, timeout_graceful_shutdown=None, timeout_keep_alive=self._patience_s,
            )
        )  # fmt: skip
        answering = asyncio.create_task(server.serve(sockets=[self._listening]), name="server")
        told = asyncio.create_task(self._told.wait(), name="told to stop")
        try:
            # The socket listens already: clients that connect before uvicorn has started wait in its queue.
            ready()
            await asyncio.wait({answering, told}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()
            # End the turns first, while uvicorn can still send their answers.
            await desk.drain(self._drain_s)
            server.should_exit = True
            await _ended(server, answering)
        if desk.broken is not None:
            raise desk.broken


async def _ended(server: uvicorn.Server, answering: "asyncio.Task[None]") -> None:
    """Wait until the last answers are sent. Then drop the connections of clients that do not receive them."""
    await asyncio.wait({answering}, timeout=_SLACK_S)
    server.force_exit = True
    await asyncio.wait({answering}, timeout=_SLACK_S)
    answering.cancel()
    await asyncio.wait({answering})


async def _refuse_final(sandbox: Sandbox) -> None:
    """Reject consoles that take no line after an answer, because no conversation could continue."""
    async with sandbox.session() as session:
        if not isinstance(session, Continuing):
            remedy = "its consoles take no line after an answer, so no conversation could go on; use local or docker"
            raise ConfigError("sandbox", sandbox.name, remedy)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the address."""
    return host.startswith("127.") or host == "::1"


def listening(host: str, port: int, patience_s: int = PATIENCE_S) -> socket.socket:
    """Open a listening socket. `patience_s`: see `PATIENCE_S` (>= 1).

    Raises:
        ConfigError: nothing can listen at this address.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:
        remedy = "choose another --port (0: any that is free), or another --host"
        raise ConfigError("host and port", f"{host}:{port}", f"nothing can listen there: {error}; {remedy}") from error
    # Accepted connections inherit both options. With this one, the system closes a connection whose reader takes
    # nothing.
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * patience_s)
    # asyncio sets this one only for sockets that name their protocol, which this one does not. Without it a line waits
    # about 40 ms for the client to acknowledge the one before.
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found
