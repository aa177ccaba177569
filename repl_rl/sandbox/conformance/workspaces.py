"""Workspace checks: consoles are separate from siblings and from other tasks, and within the limits."""

import asyncio
import base64
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from repl_rl.errors import ConfigError, SetupError
from repl_rl.record.setup import Setup
from repl_rl.sandbox.base import Sandbox, SandboxSession, console_of

_LOOK = "import os; rows, os.path.exists('kept.txt') and open('kept.txt').read(), os.environ.get('MARK')"
_SEEN = "([1, 2, 3], 'kept', None)\n"
_CHANGES = ("rows.clear()", "open('kept.txt', 'w').write('changed')", "os.environ['MARK'] = 'seen'")

_LOOKS, _BETWEEN_LOOKS_S = 10, 0.1
"""Number of comparisons, and seconds between them. On a busy machine a console held one more descriptor for a moment; a
descriptor that a workspace leaves open stays."""


class Given:
    """Workspace of these parts."""

    def __init__(
        self, values: Mapping[str, object] | None = None, files: Mapping[str, bytes] | None = None, *lines: str
    ) -> None:
        laid = {path: base64.b64encode(data).decode() for path, data in (files or {}).items()}
        said: dict[str, object] = {"values": values or {}, "files": laid, "lines": lines, "preload": [], "told": None}
        self.content = json.dumps(said).encode()
        self.digest = hashlib.sha256(self.content).hexdigest()


KEPT = Given({"rows": [1, 2, 3]}, {"kept.txt": b"kept"})
_SPARED = "with suppress(OSError): open('/proc/self/oom_score_adj', 'w').write('0')"
EMPTYISH = Given(None, None, "from contextlib import suppress", _SPARED)
"""Workspace without files, to check guarantees about a console's folder. Its lines try to be spared when memory is
out."""


class Begun:
    """Sandbox whose consoles all begin with one workspace."""

    def __init__(self, inner: Sandbox, setup: Setup) -> None:
        self.name = inner.name
        self.python_version = inner.python_version
        self._inner = inner
        self._setup = setup

    def session(self) -> AbstractAsyncContextManager[SandboxSession]:
        """As `Sandbox.session`."""
        return console_of(self._inner, self._setup)


async def _said(session: SandboxSession, lines: Sequence[str]) -> str:
    return "".join([(await session.push(line)).text for line in lines])


async def siblings(sandbox: Sandbox) -> str:
    """Return an empty string if no console sees the changes of another one of its workspace, alive or dead."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(console_of(sandbox, KEPT))
        second = await stack.enter_async_context(console_of(sandbox, KEPT))
        before = await _said(first, (_LOOK,))
        await _said(first, _CHANGES)
        seen = await _said(second, (_LOOK,))
    async with console_of(sandbox, KEPT) as later:
        after = await _said(later, (_LOOK,))
    return next((f"it saw {text!r}" for text in (before, seen, after) if text != _SEEN), "")


async def strangers(sandbox: Sandbox) -> str:
    """Return an empty string if consoles without this workspace see no part of it."""
    look = "import os; 'rows' in globals(), os.path.exists('kept.txt')"
    async with console_of(sandbox, KEPT), console_of(sandbox, EMPTYISH) as other, sandbox.session() as plain:
        seen = [await _said(console, (look,)) for console in (other, plain)]
    return "" if seen == ["(False, False)\n"] * 2 else f"they saw {seen}"


async def held_open(sandbox: Sandbox) -> str:
    """Return an empty string if a console holds no more descriptors than one that began empty."""
    count = "import os; len(os.listdir('/proc/self/fd'))"
    async with sandbox.session() as plain, console_of(sandbox, KEPT) as begun:
        for _ in range(_LOOKS):
            without, held = [int(await _said(console, (count,))) for console in (plain, begun)]
            if held <= without:
                return ""
            await asyncio.sleep(_BETWEEN_LOOKS_S)
    return f"{without} descriptors without, {held} with a workspace"


async def refusals(sandbox: Sandbox) -> str:
    """Return an empty string if workspaces that exceed limits or leave shared state are rejected."""
    bad = {
        "an error": Given(None, None, "1 / 0"),
        "memory": Given(None, None, "x = bytearray(10 ** 9)"),
        "disk": Given(None, {"large": bytes(20_000_000)}),
        "an open file": Given(None, None, "f = open('f', 'w')"),
        "shared memory": Given(None, None, "import mmap", "m = mmap.mmap(-1, 4096)"),
        "a process": Given(None, None, "import subprocess", "p = subprocess.Popen(['sleep', '99'])"),
        "its death": Given(None, None, "import os", "os._exit(0)"),
    }
    made = [name for name, setup in bad.items() if not await _refused(sandbox, setup)]
    return f"not refused: {', '.join(made)}" if made else ""


async def endless(sandbox: Sandbox) -> str:
    """Return an empty string if a workspace that never ends is rejected, while siblings of other workspaces run on."""
    async with asyncio.TaskGroup() as both:
        stuck = both.create_task(_refused(sandbox, Given(None, None, "while True: pass")))
        beside = both.create_task(siblings(sandbox))
    return beside.result() or ("" if stuck.result() else "not refused")


async def _refused(sandbox: Sandbox, setup: Setup) -> bool:
    try:
        async with console_of(sandbox, setup):
            return False
    except SetupError:
        return True


WORKSPACE_CHECKS: Mapping[str, Callable[[Sandbox], Awaitable[str]]] = {
    "siblings do not see each other's changes": siblings,
    "consoles of other tasks see nothing": strangers,
    "nothing is held open": held_open,
    "what cannot be made is refused": refusals,
    "what never ends is refused": endless,
}


async def run_workspace_check(sandbox: Sandbox, name: str) -> str:
    """Return an empty string if the guarantee holds, else a description of the failure."""
    try:
        return await WORKSPACE_CHECKS[name](sandbox)
    except ConfigError as error:
        return str(error)
