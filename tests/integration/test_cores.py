"""What is asked of the machine's cores."""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from repl_rl.utils.hardware import read_cpu_wait_s

BUSY = "import os, sys\nprint(flush=True)\nwhile os.getppid() == int(sys.argv[1]): pass"
TOLD = Path("/proc/thread-self/schedstat").exists()


def test_time_in_which_other_programs_had_the_only_core_is_told_and_a_threads_own_time_is_not() -> None:
    mine = os.sched_getaffinity(0)
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, mine)
        os.sched_setaffinity(0, {min(mine)})  # inherited by the other programs
        for _ in range(2):
            command = [sys.executable, "-c", BUSY, str(os.getpid())]
            other = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(other.kill)
            assert other.stdout is not None
            other.stdout.readline()  # it runs
        denied, own, began = read_cpu_wait_s(), time.thread_time(), time.monotonic()
        while time.thread_time() - own < 0.2:
            pass
        denied, own, took = read_cpu_wait_s() - denied, time.thread_time() - own, time.monotonic() - began
    assert denied > 1.5 * own if TOLD else denied == 0
    assert denied + own < took + 0.05
