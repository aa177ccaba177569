"""Processes that this one has started are found and ended, with all that they have started."""

import os
import subprocess
import sys

from repl_rl.utils.processes import kill_processes, list_descendants
from tests.support.processes import identity, wait_for

_FAMILY = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"


def test_what_a_process_has_started_is_ended_with_it_and_leaves_no_number_behind() -> None:
    before = set(list_descendants(os.getpid()))
    parent = subprocess.Popen([sys.executable, "-c", _FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    started = set(list_descendants(os.getpid())) - before
    assert started == {parent.pid, child}
    kill_processes([*started, 2**22 + 1])  # the last one is nobody's
    wait_for(lambda: identity(child) is None, None, 10)
    assert not os.path.exists(f"/proc/{parent.pid}"), "it was waited for"
    parent.communicate()
