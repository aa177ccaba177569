"""Isolation is asserted from inside a live console; and without it, the same probes fail."""

import asyncio
from pathlib import Path

from repl_rl.sandbox import open_sandbox
from repl_rl.sandbox.conformance import Row, isolation, limits
from repl_rl.sandbox.conformance.limits import CHECK_LIMITS
from tests.sandbox.places import ask, environment, site_packages

WATCHER = """
import ctypes, os
libc = ctypes.CDLL(None)
forked = []
os.register_at_fork(before=lambda: forked.append(libc.prctl(3, 0, 0, 0, 0)))  # PR_GET_DUMPABLE
"""


def _failed(rows: list[Row]) -> str:
    return "\n".join(f"{row.name}: {row.detail}" for row in rows if not row.passed)


def test_a_local_console_sees_and_reaches_nothing_of_the_host_or_of_a_sibling() -> None:
    async def main() -> list[Row]:
        async with open_sandbox("local", warm=2) as sandbox:
            return await isolation(sandbox)

    rows = asyncio.run(main())
    assert len(rows) >= 35
    assert not _failed(rows)


def test_a_supervisor_is_closed_to_its_console_before_that_console_exists(tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    (site_packages(tmp_path / "env") / "watcher.py").write_text(WATCHER)
    lines = ["import watcher", "watcher.forked[-1], watcher.libc.prctl(3, 0, 0, 0, 0)"]
    assert ask(python, lines, preload=["watcher"]) == ["", "(0, 1)\n"]


def test_the_probes_notice_a_sandbox_that_isolates_nothing() -> None:
    async def main() -> list[Row]:
        async with open_sandbox("unsafe", warm=2) as sandbox:
            return await isolation(sandbox)

    failed = [row.name for row in asyncio.run(main()) if not row.passed]
    assert {"no new privileges", "seccomp filter is on", "no process of the host", "no file of the host"} <= {*failed}
    assert {"host's loopback is not ours", "namespaces of its own", "refused: unshare(0)"} <= {*failed}


def test_every_limit_ends_in_its_own_status() -> None:
    async def main() -> list[Row]:
        async with open_sandbox("local", limits=CHECK_LIMITS, warm=2) as sandbox:
            return await limits(sandbox)

    assert not _failed(asyncio.run(main()))
