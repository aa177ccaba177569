"""What a sandbox is to a rollout: a fresh, isolated console that takes one physical line at a time."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Protocol, runtime_checkable

from repl_rl.errors import ConfigError
from repl_rl.record.line import LineStatus, refuse, refuse_unless_duration
from repl_rl.record.setup import Setup
from repl_rl.settings.bounds import Above, AtLeast, check_fields

OPEN_FILES = 64
"""File descriptors of one process in a console: more than lines of a rollout open, far fewer than the host has."""
INODES = 4096
"""Files and folders in a console's scratch space, and as many again in /dev/shm: one for each 4 KiB of 16 MiB."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one line and one rollout may use inside the sandbox."""

    line_timeout_s: Annotated[float, Above(0)] = 5.0
    """Wall clock of one line, seconds (> 0). Then SIGINT, a grace period, SIGKILL."""
    interrupt_grace_s: Annotated[float, Above(0)] = 0.5
    """How long an interrupted line may take to end before its console is killed, seconds (> 0)."""
    cpu_s: Annotated[float, AtLeast(1)] = 60.0
    """CPU time of one rollout's console and all of its processes together, between lines too, seconds (>= 1)."""
    memory_mb: Annotated[int, AtLeast(64)] = 512
    """Address space of one console, MiB (>= 64)."""
    output_bytes: Annotated[int, AtLeast(256)] = 65_536
    """What one line may print, bytes (>= 256); the middle of more is replaced by a visible marker."""
    processes: Annotated[int, AtLeast(1)] = 16
    """Processes and threads of one console (>= 1)."""
    disk_mb: Annotated[int, AtLeast(1)] = 16
    """Writable scratch space of one console, MiB (>= 1); as much again in /dev/shm."""

    def __post_init__(self) -> None:
        check_fields(self, "limits")


@dataclass(frozen=True, slots=True)
class PushResult:
    """What the console made of one physical line."""

    text: str
    """Exactly what it printed, in order (stdout, stderr, echo, traceback); "" if nothing."""
    more: bool
    """The cell is incomplete: the next prompt is "... " (else ">>> ")."""
    status: LineStatus
    answer: str | None
    """What `submit_final_answer(...)` was given; None: it was not called on this line."""
    elapsed_s: float
    """Wall clock, seconds."""
    cut: bool = False
    """The middle of what it printed gave way to a marker: it was more than `Limits.output_bytes`."""

    def __post_init__(self) -> None:
        refuse_unless_duration("PushResult.elapsed_s", self.elapsed_s)
        if (self.answer is not None) != (self.status is LineStatus.ANSWERED):
            refuse("PushResult.answer", self.answer, f"status {self.status!s} and an answer must agree")


class SandboxSession(Protocol):
    """One rollout's console."""

    @property
    def ended(self) -> bool:
        """True once no further line can be pushed (answered, exited, killed, fault)."""

    async def push(self, line: str) -> PushResult:
        """Give the console ONE physical line, without its newline. It never raises for what the line does.

        Raises:
            ConfigError: `line` contains a newline, or the session has ended.
            SandboxLost: the console died with what had made it, a fork server or a container.
        """


class Host(Protocol):
    """What answers the calls of host functions that lines of one console make. Both are JSON, as bytes."""

    @property
    def functions(self) -> Mapping[str, str]:
        """Each function that lines may call, with its documentation."""

    @property
    def argument_bytes(self) -> int:
        """Most bytes of a call."""

    async def answer(self, call: bytes) -> bytes:
        """`{"answer": value}` or `{"error": text}` for `{"name": ..., "args": [...], "kwargs": {...}}`.

        A call is untrusted bytes; whatever is wrong with it, or in the function, is an error in the reply. It is
        cancelled where its line ends before.
        """


@runtime_checkable
class Calling(Protocol):
    """A console whose lines can call functions of the host."""

    def offer(self, host: Host) -> None:
        """Lines may call these functions, from the first one on; say it before that."""


@runtime_checkable
class Continuing(Protocol):
    """A console that can take lines again after a final answer."""

    def go_on(self) -> None:
        """Forget the answer that was given, if one was, so that lines run and another can be.

        Raises:
            ConfigError: the console ended otherwise.
        """


def refuse_unfit(line: str, *, ended: bool) -> None:
    """Refuse what no console takes.

    Raises:
        ConfigError: `line` holds a newline, or the session has ended.
    """
    if "\n" in line:
        raise ConfigError("line", line, "push one physical line, without its newline")
    if ended:
        raise ConfigError("session", "ended", "take a fresh session; look at `ended` before each push")


class Sandbox(Protocol):
    """A source of fresh consoles. Closing it is the business of `open_sandbox`."""

    name: str
    python_version: tuple[int, int, int]
    """Of the Python inside, for the banner and for host-side completeness."""

    def session(self) -> AbstractAsyncContextManager[SandboxSession]:
        """Lease a fresh console from a warm pool; it is never reused."""


@runtime_checkable
class Preparing(Protocol):
    """A sandbox whose consoles can begin with a task's workspace. All that are shipped are."""

    def prepared(self, setup: Setup) -> AbstractAsyncContextManager[SandboxSession]:
        """Lease a fresh console in which `setup` is. It shares nothing with the others that begin with it.

        Raises:
            SetupError: on entering; the workspace cannot be made here.
        """


def console_of(sandbox: Sandbox, setup: Setup | None) -> AbstractAsyncContextManager[SandboxSession]:
    """A fresh console of `sandbox`, with a workspace or (None) empty.

    Raises:
        ConfigError: the sandbox cannot prepare consoles.
    """
    if setup is None:
        return sandbox.session()
    if isinstance(sandbox, Preparing):
        return sandbox.prepared(setup)
    remedy = "its consoles cannot begin with a task's workspace; give it the method `prepared`, or use another"
    raise ConfigError("sandbox", sandbox.name, remedy)


@dataclass(frozen=True, slots=True)
class Births:
    """What every sandbox is told about the consoles that it makes."""

    limits: Limits = field(default_factory=Limits)
    preload: Sequence[str] = ()
    """Modules that are imported before a console is born, so that they cost it nothing."""
    warm: Annotated[int, AtLeast(0)] = 8
    """Consoles kept alive, those in use included (>= 0)."""
    starting: Annotated[int, AtLeast(1)] = 4
    """Consoles started at the same time (>= 1)."""

    def __post_init__(self) -> None:
        check_fields(self)


class SandboxKind(ABC):
    """A kind of sandbox that a person can choose: a frozen dataclass whose fields are its options.

    A new one is a file with such a class, and one line of the table in `repl_rl.sandbox`, or `SANDBOXES.add(kind)`.
    """

    kind: ClassVar[str]
    about: ClassVar[str]
    isolates: ClassVar[bool] = True
    """False: nothing of ours keeps a line from the host, so no promise of isolation is checked."""
    elsewhere: ClassVar[bool] = False
    """Its consoles are on other machines."""
    unlimited: ClassVar[frozenset[str]] = frozenset()
    """Limits that nothing keeps there, by the names of their checks in `sandbox.conformance.limits`."""

    @abstractmethod
    def open(self, births: Births) -> AbstractAsyncContextManager[Sandbox]:
        """The sandbox, for the length of an `async with`.

        Raises:
            SandboxUnavailable: its isolation cannot be had on this machine. Nothing weaker is used instead.
        """

    def refuse_unasked(self, where: str) -> None:
        """Refuse this choice of a stored run, which may be a stranger's, where this machine's user did not choose it.

        Args:
            where: the file that chose it, for the message.

        Raises:
            ConfigError: it does not isolate, its consoles are on other machines, or it names a container image.
        """
        reason = "its lines would run without isolation" if not self.isolates else ""
        reason = reason or ("its consoles are on other machines" if self.elsewhere else "")
        if reason:
            remedy = f"{reason}; choose --sandbox local, or --sandbox {self.kind} if you want that (sandbox= in Python)"
            raise ConfigError(f"sandbox in {where}", self.kind, remedy)
        if self.with_usual_programs() != self:
            remedy = (
                f"give --trust to start its programs (trust=True in Python), or --sandbox {self.kind} for the usual"
            )
            raise ConfigError(f"sandbox in {where}", self, remedy)

    def with_usual_programs(self) -> "SandboxKind":
        """The same, but with the default container image and runtime; itself, where it has none."""
        return self

    def reference(self, script: Path) -> Sequence[str]:
        """How to start `script`, the console that it is compared with, on the Python that consoles have inside."""
        return [sys.executable, "-u", str(script)]

    async def doctor(self) -> str:
        """What works of it here, in a few words; it opens one console.

        Raises:
            SandboxUnavailable: it does not work here; the message ends with the remedy.
        """
        async with self.open(Births(warm=0)) as sandbox, sandbox.session() as session:
            await session.push("6 * 7")
        return "a console answers"
