"""Interface between rollouts and sandboxes: fresh, isolated consoles that run one physical line at a time.

A user chooses a sandbox by its `SandboxConfig`. It opens a `Sandbox`, which leases one `SandboxSession` per rollout.
The `Supports` protocols are optional. `push_lines` runs a policy's line that has several physical lines, because a
token can contain more than one newline.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Protocol, runtime_checkable

from repl_rl.deprecations import bind_protocol_methods, keeps_old_names
from repl_rl.errors import ConfigError
from repl_rl.settings.value_bounds import Above, AtLeast, check_fields
from repl_rl.trajectory.trajectory import LineStatus, WorkspaceContent, check_duration, raise_invariant_error

OPEN_FILES = 64
"""Maximum file descriptors per process in a console. Lines of rollouts open fewer, and the host has far more."""
INODES = 4096
"""Maximum files and folders in a console's scratch space, and again in /dev/shm: one per 4 KiB of 16 MiB."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one line and one rollout inside the sandbox."""

    line_timeout_s: Annotated[float, Above(0)] = 5.0
    """Wall-clock limit of one line, seconds (> 0). Then come SIGINT, a grace period and SIGKILL."""
    interrupt_grace_s: Annotated[float, Above(0)] = 0.5
    """Time for an interrupted line to end before its console is killed, seconds (> 0)."""
    cpu_s: Annotated[float, AtLeast(1)] = 60.0
    """CPU time of a console and all of its processes together, between lines too, seconds (>= 1)."""
    memory_mb: Annotated[int, AtLeast(64)] = 512
    """Address space of one console, MiB (>= 64)."""
    output_bytes: Annotated[int, AtLeast(256)] = 65_536
    """Output of one line, bytes (>= 256). A visible marker replaces the middle of longer output."""
    processes: Annotated[int, AtLeast(1)] = 16
    """Processes and threads of one console (>= 1)."""
    disk_mb: Annotated[int, AtLeast(1)] = 16
    """Writable scratch space of one console, MiB (>= 1). /dev/shm has the same size."""

    def __post_init__(self) -> None:
        check_fields(self, "limits")


@keeps_old_names
@dataclass(frozen=True, slots=True)
class LineResult:
    """Result of one physical line."""

    text: str
    """Exact output in order (stdout, stderr, echo, traceback). Empty if the line printed nothing."""
    incomplete: bool
    """True if the cell is incomplete. The next prompt is then "... " instead of ">>> "."""
    status: LineStatus
    answer: str | None
    """Argument of `submit_final_answer(...)`. None means that this line did not call it."""
    elapsed_s: float
    """Wall-clock time, seconds."""
    truncated: bool = False
    """True if the output exceeded `Limits.output_bytes`, so a marker replaced its middle."""

    def __post_init__(self) -> None:
        check_duration("LineResult.elapsed_s", self.elapsed_s)
        if (self.answer is not None) != (self.status is LineStatus.ANSWERED):
            raise_invariant_error("LineResult.answer", self.answer, f"status {self.status!s} and an answer must agree")


class SandboxSession(Protocol):
    """Console of one rollout."""

    @property
    def ended(self) -> bool:
        """True once no further line can be pushed (answered, exited, killed, fault)."""

    async def push(self, line: str) -> LineResult:
        """Run ONE physical line, given without its newline. Errors of the line itself raise nothing here.

        Raises:
            ConfigError: `line` contains a newline, or the session has ended.
            SandboxLost: the console died together with its fork server or container.
        """


class HostCallHandler(Protocol):
    """Handler of the host function calls that lines of one console make. Calls and replies are JSON, as bytes."""

    @property
    def functions(self) -> Mapping[str, str]:
        """Documentation of each function that lines may call, by name."""

    @property
    def argument_bytes(self) -> int:
        """Maximum size of a call, bytes."""

    async def answer_call(self, call: bytes) -> bytes:
        """Return `{"answer": value}` or `{"error": text}` for `{"name": ..., "args": [...], "kwargs": {...}}`.

        A call is untrusted bytes. Any error in the call or in the function becomes an error in the reply. The call is
        cancelled if its line ends first.
        """


@runtime_checkable
class SupportsHostFunctions(Protocol):
    """Console whose lines can call functions of the host."""

    def offer_functions(self, host: HostCallHandler) -> None:
        """Let lines call these functions, from the first line on. Call it before the first line."""


@runtime_checkable
class SupportsContinue(Protocol):
    """Console that can run further lines after a final answer."""

    def continue_after_answer(self) -> None:
        """Discard the answer, if any, so that lines run and another answer can be given.

        Raises:
            ConfigError: the console ended for another reason.
        """


class Sandbox(Protocol):
    """Source of fresh consoles. `open_sandbox` opens and closes it."""

    name: str
    python_version: tuple[int, int, int]
    """Version of the Python inside, for the banner and for completeness checks on the host."""

    def session(self) -> AbstractAsyncContextManager[SandboxSession]:
        """Lease a fresh console from the console pool. A console is never reused."""


@runtime_checkable
class SupportsWorkspace(Protocol):
    """Sandbox whose consoles can begin with a task's workspace. All bundled sandboxes support this."""

    def open_workspace_session(self, setup: WorkspaceContent) -> AbstractAsyncContextManager[SandboxSession]:
        """Lease a fresh console that begins with the workspace `setup`. Consoles of one workspace share no state.

        Raises:
            SetupError: on entering; the workspace cannot be made here.
        """


@keeps_old_names
@dataclass(frozen=True, slots=True)
class SandboxOptions:
    """Options of a sandbox for the consoles that it starts."""

    limits: Limits = field(default_factory=Limits)
    preload: Sequence[str] = ()
    """Modules to import before any console starts, so that a console imports them at no cost."""
    pool_size: Annotated[int, AtLeast(0)] = 8
    """Consoles kept alive, leased ones included (>= 0)."""
    max_concurrent_starts: Annotated[int, AtLeast(1)] = 4
    """Consoles that start at the same time, at most (>= 1)."""

    def __post_init__(self) -> None:
        check_fields(self)


@keeps_old_names
class SandboxConfig(ABC):
    """Sandbox that a user can choose: a frozen dataclass whose fields are its options.

    A new sandbox needs a file with such a class. `SANDBOXES.register(kind)` makes it known, or, in a package, an entry
    point of the group `repl_rl.sandboxes`.
    """

    kind: ClassVar[str]
    about: ClassVar[str]
    isolates: ClassVar[bool] = True
    """False means that this package does not isolate lines from the host, so isolation is not checked."""
    is_remote: ClassVar[bool] = False
    """True if its consoles run on other machines."""
    unenforced_limits: ClassVar[frozenset[str]] = frozenset()
    """Limits that it does not enforce, by the names of their checks in `sandbox.conformance.limits_and_workspaces`."""

    @abstractmethod
    def open(self, options: SandboxOptions) -> AbstractAsyncContextManager[Sandbox]:
        """Open the sandbox for the duration of an `async with`.

        Raises:
            SandboxUnavailable: this machine cannot provide its isolation. Weaker isolation is never used instead.
        """

    def validate_recorded_choice(self, where: str) -> None:
        """Reject a sandbox that a stored run chose and this machine's user did not. The run may come from a stranger.

        Args:
            where: file that contains the choice, for the message.

        Raises:
            ConfigError: the sandbox does not isolate, has its consoles on other machines, or names a container image.
        """
        reason = "its lines would run without isolation" if not self.isolates else ""
        reason = reason or ("its consoles are on other machines" if self.is_remote else "")
        if reason:
            remedy = f"{reason}; choose --sandbox local, or --sandbox {self.kind} if you want that (sandbox= in Python)"
            raise ConfigError(f"sandbox in {where}", self.kind, remedy)
        # A container image or runtime that a stranger chose is a stranger's program.
        if self.with_default_image() != self:
            remedy = (
                f"give --trust to start its programs (trust=True in Python), or --sandbox {self.kind} for the usual"
            )
            raise ConfigError(f"sandbox in {where}", self, remedy)

    def with_default_image(self) -> "SandboxConfig":
        """Return a copy with the default container image and runtime, or the sandbox itself if it uses neither."""
        return self

    def build_reference_command(self, script: Path) -> Sequence[str]:
        """Return the command that starts `script`, the reference console, on the Python of the sandbox's consoles."""
        return [sys.executable, "-u", str(script)]

    async def describe_status(self) -> str:
        """Open one console and return a short status text.

        Raises:
            SandboxUnavailable: the sandbox does not work here; the message ends with the remedy.
        """
        async with self.open(SandboxOptions(pool_size=0)) as sandbox, sandbox.session() as session:
            await session.push("6 * 7")
        return "a console answers"


def open_console(sandbox: Sandbox, setup: WorkspaceContent | None) -> AbstractAsyncContextManager[SandboxSession]:
    """Return a lease of a fresh console of `sandbox`. `setup` is its workspace; None means an empty console.

    Raises:
        ConfigError: the sandbox does not support workspaces.
    """
    if setup is None:
        return sandbox.session()
    bind_protocol_methods(sandbox, SupportsWorkspace)
    if isinstance(sandbox, SupportsWorkspace):
        return sandbox.open_workspace_session(setup)
    remedy = (
        "its consoles cannot begin with a task's workspace; give it the method `open_workspace_session`, or use another"
    )
    raise ConfigError("sandbox", sandbox.name, remedy)


def validate_line(line: str, *, ended: bool) -> None:
    """Reject a line that no console accepts.

    Raises:
        ConfigError: `line` contains a newline, or the session has ended.
    """
    if "\n" in line:
        raise ConfigError("line", line, "push one physical line, without its newline")
    if ended:
        raise ConfigError("session", "ended", "take a fresh session; check `ended` before each push")


async def push_lines(console: SandboxSession, lines: Sequence[str]) -> LineResult:
    """Run at least one physical line, in order, until the console ends. Return one result for all of them.

    The outputs are joined. The first line whose status is neither ok nor incomplete decides the status.
    """
    return combine_results(await push_each(console, lines))


async def push_each(console: SandboxSession, lines: Sequence[str]) -> list[LineResult]:
    """As `push_lines`, but return one result per executed line."""
    results: list[LineResult] = []
    for line in lines:
        results.append(await console.push(line))
        if console.ended:
            break
    return results


def combine_results(results: Sequence[LineResult]) -> LineResult:
    """Combine results, at least one, into one."""
    if len(results) == 1:
        return results[0]
    plain = (LineStatus.OK, LineStatus.INCOMPLETE)
    status_result = next((r for r in results if r.status not in plain), results[-1])
    return LineResult(
        text="".join(r.text for r in results),
        incomplete=results[-1].incomplete,
        status=status_result.status,
        answer=status_result.answer,
        elapsed_s=sum(r.elapsed_s for r in results),
        truncated=any(r.truncated for r in results),
    )
