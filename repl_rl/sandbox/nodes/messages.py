"""Messages and interfaces between a `nodes` sandbox and the processes that hold its consoles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from repl_rl.errors import SandboxLost
from repl_rl.sandbox.base import Births, PushResult


class HostLost(SandboxLost):
    """Error for a console whose process or machine is gone."""


@dataclass(frozen=True, slots=True)
class Carried:
    """Workspace in transit; see `Setup`."""

    digest: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Offered:
    """Functions of the host that lines may call; see `Host`."""

    functions: Mapping[str, str]
    argument_bytes: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Progress of a line: its end, or calls of host functions that wait for an answer."""

    calls: tuple[tuple[int, bytes], ...] = ()
    """Calls, each with its number."""
    result: PushResult | None = None
    """Result of the line. None means that the line still runs, and has a next turn."""
    ended: bool = False
    """True if no further line can be pushed."""


class Hosting(Protocol):
    """Holder of the consoles on one machine, as its owner sees it. The owner numbers the consoles.

    Every call raises HostLost if the holder is gone.
    """

    name: str
    """Name of its machine."""

    async def open(self, kind: str, births: Births) -> tuple[int, int, int]:
        """Open the sandbox of that kind there. Return the version of the Python inside.

        Raises:
            SandboxUnavailable: the machine cannot provide that sandbox.
        """

    async def lease(self, number: int, setup: Carried | None) -> None:
        """Lease a fresh console. `setup` is its workspace; None means an empty console.

        Raises:
            SetupError, SandboxFault: as in the sandbox there.
        """

    async def push(self, number: int, line: str, offered: Offered | None) -> Turn:
        """Run a line up to its first turn. `offered` comes with a console's first line, if functions are offered.

        Raises:
            SandboxLost: the console died together with its fork server or container.
        """

    async def turn(self, number: int) -> Turn:
        """Return the next turn of the running line. It raises as `push` does."""

    async def reply(self, number: int, call: int, content: bytes) -> None:
        """Answer a call. The answer is ignored if the call has ended."""

    async def close(self, number: int) -> None:
        """End a console in any state, or its lease if that has not begun."""

    async def beat(self) -> None:
        """Return, as a heartbeat: the process lives, and its event loop runs."""

    async def end(self) -> None:
        """Close the sandbox there, with all of its consoles."""

    def kill(self) -> None:
        """End the process at once. Waiting calls raise HostLost."""


class Machines(Protocol):
    """Machines on which such processes can run."""

    async def names(self) -> Sequence[str]:
        """Return the names of the machines that are alive.

        Raises:
            HostLost: the cluster does not answer.
        """

    async def start(self, name: str) -> Hosting:
        """Start a process on a machine. It belongs to the owner, and ends with it.

        Raises:
            HostLost: the process does not start.
        """
