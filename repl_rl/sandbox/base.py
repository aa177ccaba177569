"""What a sandbox is to a rollout: a fresh, isolated console that takes one physical line at a time."""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from repl_rl.errors import ConfigError
from repl_rl.record.line import LineStatus, refuse, refuse_unless_duration


@dataclass(frozen=True, slots=True)
class Limits:
    """What one line and one rollout may use inside the sandbox."""

    line_timeout_s: float = 5.0
    """Wall clock of one line, seconds (> 0). Then SIGINT, a grace period, SIGKILL."""
    interrupt_grace_s: float = 0.5
    """How long an interrupted line may take to end before its console is killed, seconds (> 0)."""
    cpu_s: float = 60.0
    """CPU time of one rollout's console, seconds (>= 1)."""
    memory_mb: int = 512
    """Address space of one console, MiB (>= 64)."""
    output_bytes: int = 65_536
    """What one line may print, bytes (>= 256); the middle of more is replaced by a visible marker."""
    processes: int = 16
    """Processes and threads of one console (>= 1)."""
    open_files: int = 64
    """File descriptors of one process (>= 16)."""
    disk_mb: int = 16
    """Writable scratch space of one console, MiB (>= 1); as much again in /dev/shm."""
    inodes: int = 4096
    """Files and folders in that scratch space (>= 16); as many again in /dev/shm."""

    def __post_init__(self) -> None:
        floors = {
            "line_timeout_s": 0.0,
            "interrupt_grace_s": 0.0,
            "cpu_s": 0.999,
            "memory_mb": 63,
            "output_bytes": 255,
            "processes": 0,
            "open_files": 15,
            "disk_mb": 0,
            "inodes": 15,
        }
        for name, floor in floors.items():
            if not getattr(self, name) > floor:
                raise ConfigError(f"limits.{name}", getattr(self, name), f"give a number greater than {floor}")


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
