"""Register a custom sandbox backend and run the conformance suite on it.

    python examples/custom_sandbox.py

The backend records every line and its output in a JSONL file. Its consoles come from another backend, here `unsafe`,
which starts plain processes without isolation.

The script prints two recorded lines, then one row per section of the suite with the number of promises kept. The exit
code is 1 if one is broken.
"""

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from repl_rl import LineResult, Sandbox, open_console, open_sandbox
from repl_rl.sandbox import SANDBOXES, SandboxConfig, SandboxOptions, SandboxSession, Unsafe
from repl_rl.sandbox.base import HostCallHandler, SupportsHostFunctions
from repl_rl.sandbox.conformance import run_suite
from repl_rl.trajectory.trajectory import WorkspaceContent

DOCTESTS = 2
"""Transcripts of the standard library to replay; `repl-rl sandbox check` replays 60."""


class RecordingSession:
    """One console. The required part of a session is `ended` and `push`."""

    def __init__(self, inner: SandboxSession, file: Path) -> None:
        self._inner = inner
        self._file = file

    @property
    def ended(self) -> bool:
        """True once no further line can be pushed."""
        return self._inner.ended

    async def push(self, line: str) -> LineResult:
        """Run one physical line. An error of the line is a status of the result, never an exception."""
        result = await self._inner.push(line)
        row = {"line": line[:200], "status": result.status, "text": result.text[:200]}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return result

    def offer_functions(self, host: HostCallHandler) -> None:
        """Let lines call host functions. Optional: without this method, host functions are refused."""
        assert isinstance(self._inner, SupportsHostFunctions)
        self._inner.offer_functions(host)


class RecordingSandbox:
    """A source of consoles. The required part is a name, a Python version and `session`."""

    name = "recording"

    def __init__(self, inner: Sandbox, file: Path) -> None:
        self.python_version = inner.python_version
        self._inner = inner
        self._file = file

    def session(self) -> AbstractAsyncContextManager[SandboxSession]:
        """Lease a fresh console; it is never used again."""
        return self._lease(None)

    def open_workspace_session(self, setup: WorkspaceContent) -> AbstractAsyncContextManager[SandboxSession]:
        """Lease a console that begins with a task's workspace. Optional: tasks without one never need it."""
        return self._lease(setup)

    @asynccontextmanager
    async def _lease(self, setup: WorkspaceContent | None) -> AsyncIterator[SandboxSession]:
        async with open_console(self._inner, setup) as session:
            yield RecordingSession(session, self._file)


@dataclass(frozen=True, slots=True)
class Recording(SandboxConfig):
    """The backend as a user chooses it. Its fields are its options, here `--recording.file PATH`."""

    kind: ClassVar[str] = "recording"
    about: ClassVar[str] = "plain processes whose lines are recorded"
    # The suite expects no isolation, and none of the limits that the inner backend does not enforce.
    isolates: ClassVar[bool] = Unsafe.isolates
    unenforced_limits: ClassVar[frozenset[str]] = Unsafe.unenforced_limits

    file: str = "lines.jsonl"
    """File to append lines to."""

    @asynccontextmanager
    async def open(self, options: SandboxOptions) -> AsyncIterator[Sandbox]:
        """Open the sandbox for the length of an `async with`. `options` has limits, preloads and the pool size."""
        async with Unsafe().open(options) as inner:
            yield RecordingSandbox(inner, Path(self.file))


async def check(kind: Recording) -> int:
    """Record two lines, then run the suite. Return the exit code."""
    async with open_sandbox(kind, warm=0) as sandbox, sandbox.session() as console:
        await console.push("6 * 7")
        await console.push("1 / 0")
    print_recorded(Path(kind.file))
    rows = await run_suite(kind, doctests=DOCTESTS)
    passed, promises = Counter(row.section for row in rows if row.passed), Counter(row.section for row in rows)
    for section, count in promises.items():
        print(f"{section}: {passed[section]} of {count} kept")
    for row in rows:
        if not row.passed:
            print(f"broken: {row.section}, {row.name}: {row.detail}")
    return int(passed != promises)


def print_recorded(file: Path) -> None:
    """Print what the backend recorded so far."""
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        print(f"recorded {row['line']!r}: {row['status']}, {row['text'].splitlines()[-1]!r}")


if __name__ == "__main__":
    # One line registers the backend: `RolloutConfig(sandbox="recording")` and `open_sandbox("recording")` find it from
    # here on.
    SANDBOXES.register(Recording)
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(asyncio.run(check(Recording(f"{scratch}/lines.jsonl"))))
