"""Server process of the load test, started as a user does, and the resources of all its processes."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

from repl_rl.errors import ConfigError, EngineError
from repl_rl.utils.processes import kill_processes, list_descendants

_MIB = 1 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")
_IDLE_S = 60.0
"""Timeout for running turns to end, seconds."""
_STILL = 3
"""Number of consecutive samples that must show the same processes."""
_END_S = 60.0
_ANSWER_S = 60.0
"""Timeout of a client's request, seconds."""
_TICK_S = 0.25


@dataclass(frozen=True, slots=True)
class Look:
    """Resources of the server at one moment."""

    processes: int
    """Number of processes: the server and all below it."""
    descriptors: int
    """Open file descriptors of the server's own process."""
    own_mib: float
    """Resident memory of the server's own process."""
    below_mib: float
    """Resident memory of all processes below it."""


class Server:
    """`repl-rl serve` with the bundled policy, for the length of a `with`."""

    model = "builtin:quickstart"

    def __init__(self, flags: Sequence[str]) -> None:
        self._flags = flags
        self.address = ""

    def __enter__(self) -> "Server":
        """Start the server. Raises ConfigError if it does not start."""
        self._said = tempfile.TemporaryFile()
        command = [sys.executable, "-P", "-m", "repl_rl.cli", "serve", "--port", "0", *self._flags]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._said, text=True
        )
        assert self._process.stdout is not None
        try:
            # The first line on standard output is the address; it is empty if the process ended.
            self.address = self._process.stdout.readline().partition(" ")[0]
            if not self.address:
                raise ConfigError("server", " ".join(command[4:]), f"it does not start: {self._last_words()}")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def client(self) -> httpx.AsyncClient:
        """Return a client with an unlimited number of connections."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(base_url=self.address, limits=limits, timeout=httpx.Timeout(_ANSWER_S))

    async def figures(self, client: httpx.AsyncClient) -> dict[str, float]:
        """Return the values of /metrics, by name."""
        text = (await client.get(self.address.removesuffix("/v1") + "/metrics")).text
        rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in rows}

    @property
    def below(self) -> set[int]:
        """Process ids below the server."""
        return set(list_descendants(self._process.pid))

    async def settled(self) -> frozenset[int]:
        """Return the processes below the server once they stay the same, because new consoles start after each turn."""
        seen = [frozenset(self.below)]
        while len(seen) < _STILL or len(set(seen[-_STILL:])) > 1:
            await asyncio.sleep(_TICK_S)
            seen.append(frozenset(self.below))
        return seen[-1]

    def look(self) -> Look:
        """Return the current resources."""
        pid, below = self._process.pid, self.below
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        return Look(1 + len(below), descriptors, _resident_mib([pid]), _resident_mib(below))

    async def idle(self) -> Look:
        """Wait until all turns have ended and new consoles have started; return the resources.

        Raises:
            EngineError: turns do not end.
        """
        deadline = time.monotonic() + _IDLE_S
        async with self.client() as client:
            while await self._busy(client):
                if time.monotonic() > deadline:
                    raise EngineError(f"the server still plays turns {_IDLE_S:.0f} s after the last was asked for")
                await asyncio.sleep(_TICK_S)
        # By then the connection of this client is closed too.
        await self.settled()
        return self.look()

    async def _busy(self, client: httpx.AsyncClient) -> bool:
        found = await self.figures(client)
        return any(found[f"repl_rl_{name}"] for name in ("running", "waiting", "conversations"))

    def stopped(self) -> tuple[int, int]:
        """Stop the server with SIGTERM. Return its exit code, and the number of processes that remain."""
        # List the processes before the server stops, because afterwards they have no parent.
        below = self.below
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(_END_S)
        return code, sum(map(alive, below))

    def _end(self) -> None:
        if self._process.poll() is None:
            kill_processes([self._process.pid, *self.below])
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._said.close()

    def _last_words(self) -> str:
        self._process.wait(_END_S)
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it says nothing"


def alive(pid: int) -> bool:
    """Return True if a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _resident_mib(pids: Iterable[int]) -> float:
    pages = 0
    for pid in pids:
        # The process has just ended.
        with suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * _PAGE / _MIB
