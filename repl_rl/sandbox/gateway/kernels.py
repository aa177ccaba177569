"""Host end of the process that owns a run's kernels."""

import asyncio
import contextlib
import itertools
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, Self, TypedDict

from repl_rl.errors import SandboxFault, SandboxLost
from repl_rl.sandbox.gateway.address import Address

_OWNER = Path(__file__).with_name("owner.py")
_LINE_BYTES = 1 << 24
"""Maximum size of a line of the child process, which bounds the answers that it reads."""
_ENDING_S = 60.0
_REFUSED = (401, 403)
log = logging.getLogger(__name__)


class _Told(TypedDict):
    """Line of the process that owns the kernels: the answer to a request."""

    number: int
    status: int
    said: NotRequired[object]
    error: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of the server."""

    status: int
    """HTTP status. 0 means that the server cannot be reached."""
    said: object
    error: str

    @property
    def refuses(self) -> bool:
        """True if the server does not accept the token."""
        return self.status in _REFUSED


class Kernels:
    """Client that starts and ends kernels on one server. Its child process ends them all when this process is gone."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._hearing = asyncio.create_task(self._hear())

    @classmethod
    async def on(cls, address: Address) -> Self:
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
        kernels._tell({"url": address.url, "token": address.token})
        return kernels

    async def specs(self) -> Answer:
        """Return the kernelspecs of the server."""
        return await self._ask("get", "kernelspecs")

    async def start(self, kernel: str) -> str:
        """Start a kernel, and return its id.

        Raises:
            SandboxLost: the server cannot be reached, or does not accept the token any more.
            SandboxFault: the server cannot start a kernel.
        """
        answer = await self._ask("start", kernel)
        if answer.status == 0 or answer.refuses:
            raise SandboxLost(f"the Jupyter server starts no kernel: {answer.error}")
        if not isinstance(answer.said, Mapping) or not isinstance(answer.said.get("id"), str):
            raise SandboxFault(f"the Jupyter server starts no kernel (status {answer.status}): {answer.error}")
        return str(answer.said["id"])

    def end(self, kernel_id: str) -> None:
        """End a kernel in the background."""
        if not self._hearing.done():
            self._tell({"do": "end", "what": kernel_id, "number": next(self._numbers)})

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
        await self._hearing

    async def _finish(self) -> None:
        """Wait for the end of the process."""
        assert self._process.stdout is not None
        await asyncio.wait([self._hearing])
        # If `_hear` ended early, the process may wait until the rest of its output is read.
        await self._process.stdout.read()
        await self._process.wait()

    async def _ask(self, what_to_do: str, what: str) -> Answer:
        if self._hearing.done():
            raise SandboxLost("the process that owns the kernels is gone")
        number = next(self._numbers)
        self._asked[number] = asked = asyncio.get_running_loop().create_future()
        self._tell({"do": what_to_do, "what": what, "number": number})
        try:
            answer: Answer = await asked
            return answer
        finally:
            del self._asked[number]

    def _tell(self, line: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            # The process is gone; `_hear` reports it.
            self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def _hear(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                self._take(json.loads(line))
        except (ValueError, RecursionError) as error:
            # A line that is too long or nested too deeply: the request that it answers is unknown.
            log.warning("the process that owns the kernels cannot be understood: %s", error)
        finally:
            # No further line is read, so the remaining requests get no answer.
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(SandboxLost("the process that owns the kernels is gone"))

    def _take(self, told: _Told) -> None:
        """Give an answer to its request."""
        asked, said = self._asked.get(told["number"]), told.get("said")
        if asked is None and isinstance(said, Mapping) and "id" in said:
            # The request was cancelled, but the kernel has started.
            self._end_unwanted(said["id"])
        elif asked is not None and not asked.done():
            asked.set_result(Answer(told["status"], said, told.get("error", "")))

    def _end_unwanted(self, kernel_id: str) -> None:
        """End a kernel whose request was cancelled before it started."""
        self._tell({"do": "end", "what": kernel_id, "number": next(self._numbers)})
