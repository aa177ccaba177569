"""What is said between a sandbox of `nodes` and the process that holds its consoles on a machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from repl_rl.errors import SandboxLost
from repl_rl.sandbox.base import Births, PushResult


class HostLost(SandboxLost):
    """The process that held a console is gone, or its machine is."""


@dataclass(frozen=True, slots=True)
class Carried:
    """A workspace on its way; see `Setup`."""

    digest: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Offered:
    """Functions of the host that lines may call; see `Host`."""

    functions: Mapping[str, str]
    argument_bytes: int


@dataclass(frozen=True, slots=True)
class Turn:
    """How far a line has come: to its end, or to calls of host functions, which wait for their answers."""

    calls: tuple[tuple[int, bytes], ...] = ()
    """Each with its number."""
    result: PushResult | None = None
    """None: the line goes on; ask for its next turn."""
    ended: bool = False
    """No further line can be pushed."""


class Hosting(Protocol):
    """What holds consoles on one machine, as its owner sees it. Consoles have numbers, which the owner gives.

    Every call raises HostLost where it is gone.
    """

    name: str
    """Of its machine."""

    async def open(self, kind: str, births: Births) -> tuple[int, int, int]:
        """Open the sandbox of that kind there; the version of the Python inside.

        Raises:
            SandboxUnavailable: it cannot be had there.
        """

    async def lease(self, number: int, setup: Carried | None) -> None:
        """Lease a fresh console, with a workspace or (None) empty.

        Raises:
            SetupError, SandboxFault: as the sandbox there does.
        """

    async def push(self, number: int, line: str, offered: Offered | None) -> Turn:
        """Run a line up to its first turn. `offered` comes with a console's first line, where there is something.

        Raises:
            SandboxLost: the console died with what had made it.
        """

    async def turn(self, number: int) -> Turn:
        """The next turn of the line that runs. Raises as `push` does."""

    async def reply(self, number: int, call: int, content: bytes) -> None:
        """Answer a call; one that nobody waits for any more is passed over."""

    async def close(self, number: int) -> None:
        """End a console, whatever it does, or its lease, if that has not begun."""

    async def beat(self) -> None:
        """It lives, and its event loop turns."""

    async def end(self) -> None:
        """Close the sandbox there, with all of its consoles."""

    def kill(self) -> None:
        """End the process at once. Calls that wait raise HostLost."""


class Machines(Protocol):
    """Where such processes can be."""

    async def names(self) -> Sequence[str]:
        """The machines that live.

        Raises:
            HostLost: nobody knows.
        """

    async def start(self, name: str) -> Hosting:
        """A new process on a machine. It is the owner's, and ends with it.

        Raises:
            HostLost: it does not start.
        """
