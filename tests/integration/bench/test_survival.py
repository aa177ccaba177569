"""What the benchmark of long runs sees of processes."""

import sys
from subprocess import PIPE, Popen

from benchmarks.faults import soak


def test_what_is_left_is_called_by_its_name() -> None:
    before = soak.named()
    with Popen([sys.executable, "-c", "input('a child')"], stdin=PIPE) as child:
        found = soak.named()
        assert found[f"process {child.pid}"] == "-c input('a child')"
        new = [what for name, what in found.items() if name not in before]
        child.communicate(b"\n")
    assert sorted(new) == ["-c input('a child')", "pipe"]
