"""Limit checks: each limit is hit on purpose, and then the session is checked."""

from dataclasses import dataclass, replace

from repl_rl.record.trajectory import LineStatus
from repl_rl.sandbox.base import Limits, PushResult, Sandbox

CHECK_LIMITS = replace(
    Limits(), line_timeout_s=2.0, interrupt_grace_s=0.8, cpu_s=4.0, memory_mb=256, output_bytes=4096, disk_mb=4
)
"""Limits with which `run` opens a sandbox. A line has 2 s, because a busy machine needs more than 1 s for some."""
_SLACK_S = 2.0


@dataclass(frozen=True, slots=True)
class LimitCheck:
    """Limit check: after `setup`, `line` must give `status`, and the session must continue or be ended."""

    name: str
    setup: tuple[str, ...]
    line: str
    status: LineStatus
    ended: bool
    shows: str = ""
    """Text that the output must contain."""
    times: int = 1
    """Maximum repetitions of `line` until it has the expected result. Some limits are hit only after a while."""


_CHAINS = (
    *("import os, signal, time", "def burn():", "    while time.process_time() < 2: pass", ""),
    *("def chain():", "    os.setsid(); signal.signal(signal.SIGINT, signal.SIG_IGN)", "    while True:"),
    *("        if os.fork() == 0: burn(); os._exit(0)", "        os.wait()", ""),
    *("for _ in range(2): os.fork() or chain()", ""),
)
"""Processes outside of the line's process group that each stay below the limit of one process, for ever."""

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
    LimitCheck("CPU time of all processes", _CHAINS, "time.sleep(0.5)", LineStatus.TIMEOUT, True, times=240),
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
        for line in check.line.split("\n") * check.times:
            result = await session.push(line)
            if session.ended or (check.times > 1 and not check.ended and result.status is check.status):
                break
        assert result is not None
        problem = _problem(check, result, session.ended)
        if problem or session.ended:
            return problem
        after = await session.push("print('still here')")
    return "" if after.text.endswith("still here\n") else f"then the console said {after}"


def _problem(check: LimitCheck, result: PushResult, ended: bool) -> str:
    if result.status is not check.status:
        return f"status {result.status.value}: {result.text[-200:]}"
    if ended is not check.ended:
        return "the session ended" if ended else "the session goes on"
    if check.shows not in result.text:
        return f"it printed {result.text[-200:]!r}"
    deadline = CHECK_LIMITS.line_timeout_s + _SLACK_S
    return f"it took {result.elapsed_s:.1f} s" if result.elapsed_s > deadline else ""
