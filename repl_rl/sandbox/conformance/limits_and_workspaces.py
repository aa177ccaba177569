"""Checks of limits and of workspaces, for the consoles of one sandbox.

A limit check hits one limit on purpose, and then checks the session. A workspace check tests a guarantee of consoles
that begin with a workspace: they are separate from siblings and from other tasks, and within the limits.
"""

import asyncio
import base64
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace

from repl_rl.errors import ConfigError, SetupError
from repl_rl.sandbox.base import Limits, LineResult, Sandbox, SandboxSession, open_console
from repl_rl.trajectory.trajectory import LineStatus, WorkspaceContent

CHECK_LIMITS = replace(
    Limits(), line_timeout_s=2.0, interrupt_grace_s=0.8, cpu_s=4.0, memory_mb=256, output_bytes=4096, disk_mb=4
)
"""Limits with which `run_suite` opens a sandbox. A line has 2 s, because some need more than 1 s on a busy machine."""
_SLACK_S = 2.0
"""Time that a line may take beyond its limit, seconds."""


@dataclass(frozen=True, slots=True)
class LimitCheck:
    """Limit check: after `setup`, `line` must give `status`, and the session must continue or be ended."""

    name: str
    setup: tuple[str, ...]
    line: str
    status: LineStatus
    ended: bool
    expected_text: str = ""
    """Text that the output must contain."""
    max_attempts: int = 1
    """Maximum repetitions of `line` until it has the expected result. Some limits are hit only after a while."""


_CHAINS = (
    *("import os, signal, time", "def burn():", "    while time.process_time() < 2: pass", ""),
    *("def chain():", "    os.setsid(); signal.signal(signal.SIGINT, signal.SIG_IGN)", "    while True:"),
    *("        if os.fork() == 0: burn(); os._exit(0)", "        os.wait()", ""),
    *("for _ in range(2): os.fork() or chain()", ""),
)
"""Lines that start endless chains of processes outside of the line's group, each below the limit per process."""

CHECKS = (
    LimitCheck(
        "wall clock, interruptible", ("import time",), "time.sleep(60)", LineStatus.TIMEOUT, False, "KeyboardInterrupt"
    ),
    LimitCheck("wall clock, in a loop", ("while 1: pass",), "", LineStatus.TIMEOUT, False, "KeyboardInterrupt"),
    LimitCheck("wall clock, deaf to signals", (), "print('a'); sum(range(10**12))", LineStatus.TIMEOUT, True, "a\n"),
    LimitCheck("memory", (), "x = bytearray(10**9)", LineStatus.MEMORY_LIMIT, False, "MemoryError"),
    LimitCheck("output", (), "print('x' * 100_000)", LineStatus.OUTPUT_LIMIT, False, "bytes of output not shown"),
    LimitCheck(
        "output without end",
        (),
        "import os\nwhile 1: os.write(1, b'x' * 10**6)\n",
        LineStatus.OUTPUT_LIMIT,
        False,
        "not shown",
    ),
    LimitCheck("disk", (), "open('f', 'wb').write(bytes(10**7))", LineStatus.EXCEPTION, False, "OSError"),
    LimitCheck(
        "open files", (), "f = [open('/dev/null') for _ in range(9999)]", LineStatus.EXCEPTION, False, "OSError"
    ),
    LimitCheck(
        "inodes", (), "for i in range(99999): open(str(i), 'w').close()\n", LineStatus.EXCEPTION, False, "OSError"
    ),
    LimitCheck(
        "processes",
        ("import os",),
        # Does not wait for the children to begin.
        "p = [os.fork() or os.execlp('sleep', 'sleep', '99') for _ in range(99)]",
        LineStatus.EXCEPTION,
        False,
        "BlockingIOError",
    ),
    LimitCheck("CPU time of all processes", _CHAINS, "time.sleep(0.5)", LineStatus.TIMEOUT, True, max_attempts=240),
    LimitCheck("exit", (), "exit()", LineStatus.EXITED, True),
    LimitCheck("death", ("import os",), "os.kill(os.getpid(), 9)", LineStatus.KILLED, True),
    LimitCheck("answer", (), "submit_final_answer(6 * 7)", LineStatus.ANSWERED, True),
)


async def run_check(sandbox: Sandbox, check: LimitCheck) -> str:
    """Return an empty string if it ends as promised, else a description of the difference."""
    async with sandbox.session() as session:
        for line in check.setup:
            await session.push(line)
        result = None
        for line in check.line.split("\n") * check.max_attempts:
            result = await session.push(line)
            if session.ended or (check.max_attempts > 1 and not check.ended and result.status is check.status):
                break
        assert result is not None
        problem = _describe_problem(check, result, session.ended)
        if problem or session.ended:
            return problem
        after = await session.push("print('still here')")
    return "" if after.text.endswith("still here\n") else f"then the console said {after}"


def _describe_problem(check: LimitCheck, result: LineResult, ended: bool) -> str:
    if result.status is not check.status:
        return f"status {result.status.value}: {result.text[-200:]}"
    if ended is not check.ended:
        return "the session ended" if ended else "the session continues"
    if check.expected_text not in result.text:
        return f"it printed {result.text[-200:]!r}"
    deadline = CHECK_LIMITS.line_timeout_s + _SLACK_S
    return f"it took {result.elapsed_s:.1f} s" if result.elapsed_s > deadline else ""


# Constants of the workspace checks.

_SHOW_STATE = "import os; rows, os.path.exists('kept.txt') and open('kept.txt').read(), os.environ.get('MARK')"
_EXPECTED_STATE = "([1, 2, 3], 'kept', None)\n"
_CHANGES = ("rows.clear()", "open('kept.txt', 'w').write('changed')", "os.environ['MARK'] = 'seen'")

_COMPARISONS, _PAUSE_S = 10, 0.1
"""Number of comparisons of descriptor counts, and pause between them, seconds. On a busy machine a console may briefly
hold one more descriptor. A descriptor that a workspace leaves open appears in every comparison."""


class FixtureWorkspace:
    """Workspace of these parts."""

    def __init__(
        self, values: Mapping[str, object] | None = None, files: Mapping[str, bytes] | None = None, *lines: str
    ) -> None:
        laid = {path: base64.b64encode(data).decode() for path, data in (files or {}).items()}
        parts: dict[str, object] = {"values": values or {}, "files": laid, "lines": lines, "preload": [], "told": None}
        self.content = json.dumps(parts).encode()
        self.digest = hashlib.sha256(self.content).hexdigest()


KEPT = FixtureWorkspace({"rows": [1, 2, 3]}, {"kept.txt": b"kept"})
_SPARED = "with suppress(OSError): open('/proc/self/oom_score_adj', 'w').write('0')"
EMPTYISH = FixtureWorkspace(None, None, "from contextlib import suppress", _SPARED)
"""Workspace without files, to check guarantees about a console's folder. Its lines try to protect the console from the
kernel's out-of-memory killer."""


class WorkspaceSandbox:
    """Sandbox whose consoles all begin with one workspace."""

    def __init__(self, inner: Sandbox, setup: WorkspaceContent) -> None:
        self.name = inner.name
        self.python_version = inner.python_version
        self._inner = inner
        self._setup = setup

    def session(self) -> AbstractAsyncContextManager[SandboxSession]:
        """As `Sandbox.session`."""
        return open_console(self._inner, self._setup)


async def _run_lines_for_text(session: SandboxSession, lines: Sequence[str]) -> str:
    return "".join([(await session.push(line)).text for line in lines])


async def check_siblings(sandbox: Sandbox) -> str:
    """Return an empty string if no console sees the changes of another one of its workspace, alive or dead."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(open_console(sandbox, KEPT))
        second = await stack.enter_async_context(open_console(sandbox, KEPT))
        before_change = await _run_lines_for_text(first, (_SHOW_STATE,))
        await _run_lines_for_text(first, _CHANGES)
        sibling_state = await _run_lines_for_text(second, (_SHOW_STATE,))
    async with open_console(sandbox, KEPT) as later_console:
        later_state = await _run_lines_for_text(later_console, (_SHOW_STATE,))
    return next(
        (f"it saw {text!r}" for text in (before_change, sibling_state, later_state) if text != _EXPECTED_STATE), ""
    )


async def check_strangers(sandbox: Sandbox) -> str:
    """Return an empty string if consoles without this workspace see no part of it."""
    probe = "import os; 'rows' in globals(), os.path.exists('kept.txt')"
    async with (
        open_console(sandbox, KEPT),
        open_console(sandbox, EMPTYISH) as other_workspace,
        sandbox.session() as plain,
    ):
        outputs = [await _run_lines_for_text(console, (probe,)) for console in (other_workspace, plain)]
    return "" if outputs == ["(False, False)\n"] * 2 else f"they saw {outputs}"


async def check_descriptors(sandbox: Sandbox) -> str:
    """Return an empty string if a console holds no more descriptors than one that began empty."""
    count = "import os; len(os.listdir('/proc/self/fd'))"
    async with sandbox.session() as plain, open_console(sandbox, KEPT) as with_workspace:
        for _ in range(_COMPARISONS):
            without_count, with_count = [
                int(await _run_lines_for_text(console, (count,))) for console in (plain, with_workspace)
            ]
            if with_count <= without_count:
                return ""
            await asyncio.sleep(_PAUSE_S)
    return f"{without_count} descriptors without, {with_count} with a workspace"


async def check_refusals(sandbox: Sandbox) -> str:
    """Return an empty string if workspaces that exceed limits or leave shared state are rejected."""
    bad = {
        "an error": FixtureWorkspace(None, None, "1 / 0"),
        "memory": FixtureWorkspace(None, None, "x = bytearray(10 ** 9)"),
        "disk": FixtureWorkspace(None, {"large": bytes(20_000_000)}),
        "an open file": FixtureWorkspace(None, None, "f = open('f', 'w')"),
        "shared memory": FixtureWorkspace(None, None, "import mmap", "m = mmap.mmap(-1, 4096)"),
        "a process": FixtureWorkspace(None, None, "import subprocess", "p = subprocess.Popen(['sleep', '99'])"),
        "its death": FixtureWorkspace(None, None, "import os", "os._exit(0)"),
    }
    accepted = [name for name, setup in bad.items() if not await _is_refused(sandbox, setup)]
    return f"not refused: {', '.join(accepted)}" if accepted else ""


async def check_endless_workspace(sandbox: Sandbox) -> str:
    """Return an empty string if a workspace that never ends is rejected, while siblings of other workspaces run on."""
    async with asyncio.TaskGroup() as both:
        stuck = both.create_task(_is_refused(sandbox, FixtureWorkspace(None, None, "while True: pass")))
        sibling_task = both.create_task(check_siblings(sandbox))
    return sibling_task.result() or ("" if stuck.result() else "not refused")


async def _is_refused(sandbox: Sandbox, setup: WorkspaceContent) -> bool:
    try:
        async with open_console(sandbox, setup):
            return False
    except SetupError:
        return True


WORKSPACE_CHECKS: Mapping[str, Callable[[Sandbox], Awaitable[str]]] = {
    "siblings do not see each other's changes": check_siblings,
    "consoles of other tasks see nothing": check_strangers,
    "nothing is held open": check_descriptors,
    "what cannot be made is refused": check_refusals,
    "what never ends is refused": check_endless_workspace,
}


async def run_workspace_check(sandbox: Sandbox, name: str) -> str:
    """Return an empty string if the guarantee holds, else a description of the failure."""
    try:
        return await WORKSPACE_CHECKS[name](sandbox)
    except ConfigError as error:
        return str(error)
