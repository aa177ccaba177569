"""The host's end of a fork server: starts it, asks it for consoles, restarts nothing by itself."""

import asyncio
import itertools
import json
import os
import secrets
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Self

import zmq

from repl_rl.errors import SandboxFault, SandboxUnavailable
from repl_rl.sandbox.base import Limits
from repl_rl.sandbox.client import ConsoleSession
from repl_rl.sandbox.keeper import KeeperLink

_START_TIMEOUT_S = 120.0
_READY_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_FIRST_UID = 1_600_000_000
_UIDS = 1_000_000
_uids = itertools.count(os.getpid() * 4096 % _UIDS)


@dataclass(frozen=True, slots=True)
class Launch:
    """How a fork server is started."""

    argv: Sequence[str]
    """Command; `{fd}` stands for the number of the inherited socket."""
    isolated: bool
    """Consoles get namespaces of their own."""
    own_uids: bool
    """The fork server may change its user: each console gets a user id of its own."""


def _request(key: str, uid: int, limits: Limits) -> bytes:
    names = ("cpu_s", "memory_mb", "output_bytes", "processes", "open_files", "disk_mb")
    return json.dumps({"key": key, "uid": uid, **{name: getattr(limits, name) for name in names}}).encode()


def _last_lines(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read()[-2000:].decode("utf-8", "replace").strip() or "it said nothing"


class ForkServer:
    """One running fork server."""

    def __init__(
        self, process: asyncio.subprocess.Process, line: socket.socket, launch: Launch, log: IO[bytes]
    ) -> None:
        self._process = process
        self._line = line
        self._launch = launch
        self._log = log
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.max_sockets = 8192
        self.python_version = (0, 0, 0)

    @classmethod
    async def start(cls, launch: Launch) -> Self:
        """Start it and wait until everything is imported.

        Raises:
            SandboxUnavailable: it ended at once or did not answer; the message has its last words.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        with theirs:
            argv = [part.replace("{fd}", str(theirs.fileno())) for part in launch.argv]
            process = await asyncio.create_subprocess_exec(
                *argv,
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        server = cls(process, ours, launch, log)
        try:
            await server._hello()
        except BaseException:
            await server.stop()
            raise
        return server

    async def _hello(self) -> None:
        self._line.setblocking(False)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                packet = await asyncio.get_running_loop().sock_recv(self._line, 4096)
        except TimeoutError:
            packet = b""
        except OSError:
            packet = b""
        if not packet:
            raise SandboxUnavailable(f"the sandbox did not start: {_last_lines(self._log)}")
        major, minor, micro = json.loads(packet)["python"]
        self.python_version = (int(major), int(minor), int(micro))

    @property
    def alive(self) -> bool:
        """False once the process has ended."""
        return self._process.returncode is None

    async def open_console(self, limits: Limits, *, decide: bool) -> ConsoleSession:
        """A fresh console, ready for its first line.

        Raises:
            SandboxFault: it died or was not ready in time.
        """
        key = secrets.token_hex(32)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link = KeeperLink(ours, isolated=self._launch.isolated, max_text_bytes=2 * limits.output_bytes)
        try:
            with theirs:
                uid = _FIRST_UID + next(_uids) % _UIDS if self._launch.own_uids else 0
                socket.send_fds(self._line, [_request(key, uid, limits)], [theirs.fileno()])
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await link.ready
            if link.death is not None:
                raise SandboxFault(f"a console died at birth: {_last_lines(self._log)}")
            return ConsoleSession(link, key, limits, self._context, decide=decide)
        except TimeoutError:
            link.close()
            raise SandboxFault(f"a console was not ready after {_READY_TIMEOUT_S:g} s") from None
        except OSError as error:
            link.close()
            raise SandboxFault(f"the fork server is gone: {error}") from error
        except BaseException:
            link.close()
            raise

    async def stop(self) -> None:
        """End the process and every console that it made."""
        self._line.close()
        if self._process.returncode is None:
            if self._launch.isolated:
                self._process.kill()
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._log.close()
        self._context.destroy(linger=0)
