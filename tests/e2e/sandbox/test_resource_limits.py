"""Limits that are measured in wall-clock time: all kinds, and processes that hide from the count of CPU time."""

import asyncio

import pytest

from repl_rl.sandbox import Limits, open_sandbox
from repl_rl.sandbox.base import LineResult
from repl_rl.sandbox.conformance import SandboxCheckResult, check_limits
from repl_rl.sandbox.conformance.limits_and_workspaces import CHECK_LIMITS
from repl_rl.trajectory.trajectory import LineStatus

HIDE = """
import os, signal, time
def hide():
    os.setsid(); signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for n in range(10**9):
        open('n', 'w').write(str(n))
        pid = os.fork()
        while pid == 0 and time.process_time() < SECONDS: pass
        if pid == 0: os._exit(0)
        while os.path.exists(f'/proc/{pid}'): time.sleep(0.001)

os.fork() or hide()
"""


@pytest.mark.parametrize(("seconds", "most_s"), [(0.1, 4.0), (0.005, 2.0)])
def test_processes_that_hide_from_the_count_use_up_the_cpu_time_too(seconds: float, most_s: float) -> None:
    """The system counts in steps of 0.01 s, and keeps nothing of what ended where SIGCHLD is ignored."""

    async def main() -> tuple[LineResult, float]:
        limits, used_s = Limits(cpu_s=1), 0.0
        async with open_sandbox("local", limits=limits, warm=0) as sandbox, sandbox.session() as session:
            for line in HIDE.replace("SECONDS", str(seconds)).split("\n")[1:]:
                result = await session.push(line)
            while not session.ended:
                result = await session.push("time.sleep(0.2); print(open('n').read() or 0)")
                used_s = seconds * int(result.text) if result.text.strip().isdigit() else used_s
        return result, used_s

    result, used_s = asyncio.run(main())
    assert result.status is LineStatus.TIMEOUT
    assert used_s < most_s  # 22.6 and 2.8 s where nothing but the system's own count is added up


def test_every_limit_ends_in_its_own_status() -> None:
    async def main() -> list[SandboxCheckResult]:
        async with open_sandbox("local", limits=CHECK_LIMITS, warm=2) as sandbox:
            return await check_limits(sandbox)

    assert [f"{row.name}: {row.detail}" for row in asyncio.run(main()) if not row.passed] == []
