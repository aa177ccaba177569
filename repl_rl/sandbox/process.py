"""Start of a fork server as a child process of this one."""

import asyncio
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from repl_rl.errors import SandboxUnavailable
from repl_rl.sandbox.cgroup import ControlGroup, NoGroup, make_group

_STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """Process of a fork server, and its log."""

    process: asyncio.subprocess.Process
    log: IO[bytes]
    isolated: bool
    group: ControlGroup | None = None

    @property
    def alive(self) -> bool:
        """False once it has ended."""
        return self.process.returncode is None

    def last_words(self) -> str:
        """Return the end of its log."""
        if self.log.closed:
            return "it was ended"
        self.log.seek(0)
        return self.log.read()[-2000:].decode("utf-8", "replace").strip() or "it said nothing"

    async def end(self) -> None:
        """Kill the process. Without namespaces it ends without a signal, after its consoles have cleaned up."""
        if self.process.returncode is None and self.isolated:
            self.process.kill()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        finally:
            if self.group is not None:
                await self.group.remove()
        self.log.close()


@dataclass(frozen=True, slots=True)
class ProcessLaunch:
    """Launcher of a fork server as a process."""

    argv: Sequence[str]
    """Command. `{fd}` is replaced by the number of the inherited socket."""
    isolated: bool
    own_uids: bool
    remedy_for: Callable[[str], str]
    """Function from an error message to a remedy."""
    bounded: bool = False
    """True if the process starts in a control group, if one can be made."""

    async def start(self) -> tuple[socket.socket, RunningProcess]:
        """As `Launch.start`. Call it on a thread that lives as long as the sandbox."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        group = self._group()
        log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        try:
            with theirs:
                argv = [part.replace("{fd}", str(theirs.fileno())) for part in self.argv]
                # Join the group before the program starts, so that all of its children are in it.
                argv = group.joining(argv) if group else argv
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        except BaseException as error:
            # A cancelled start must leave nothing behind, either.
            ours.close()
            log.close()
            if group is not None:
                await group.remove()
            if isinstance(error, OSError):
                remedy = self.remedy_for(str(error))
                raise SandboxUnavailable(f"{self.argv[0]} cannot be started: {error}; {remedy}") from error
            raise
        return ours, RunningProcess(process, log, self.isolated, group)

    def _group(self) -> ControlGroup | None:
        """Return a new control group, or None if none can be made. `repl-rl doctor` reports the reason."""
        try:
            return make_group() if self.bounded else None
        except NoGroup:
            return None
