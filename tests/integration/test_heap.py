"""`utils/hardware.py`: what was freed is there when it is wanted again."""

import gc
import subprocess
import sys
import weakref

from repl_rl.utils.hardware import reduce_gc_frequency

BLOCKS = """
import ctypes, resource, sys
from repl_rl.utils.hardware import retain_freed_memory

if sys.argv[1] == "kept":
    assert retain_freed_memory()
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
c.free.restype, c.free.argtypes = None, [ctypes.c_void_p]

def tiles(size=4 * 2**20, count=20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [c.malloc(size) for _ in range(count)]
    for block in held:
        ctypes.memset(block, 1, size)
    for block in held:
        c.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

tiles(), tiles()
print(tiles())
"""


def _faults(how: str) -> int:
    """Page faults of the third time that 80 MiB are allocated, used and freed, in blocks of 4 MiB."""
    return int(subprocess.run([sys.executable, "-c", BLOCKS, how], check=True, capture_output=True, text=True).stdout)


def test_freed_memory_is_used_again_without_asking_the_machine_for_it() -> None:
    assert _faults("kept") < 100


def test_by_itself_the_c_library_gives_it_back() -> None:
    """Else `retain_freed_memory` would be there for nothing."""
    assert _faults("as it comes") > 10_000


class _Knot:
    """Refers to itself: only the collector finds it."""

    def __init__(self) -> None:
        self.self = self


def test_with_rare_collections_what_was_there_before_is_not_walked_and_new_garbage_is_still_found() -> None:
    here, before = _Knot(), gc.get_threshold()
    with reduce_gc_frequency():
        assert all(one is not here for one in gc.get_objects())
        assert gc.get_threshold() > before
        gone = weakref.ref(_Knot())
        while gone() is not None:  # the collector comes by itself, of the objects that are made here
            _ = [_Knot() for _ in range(1000)]
    assert gc.get_threshold() == before
    assert any(one is here for one in gc.get_objects())


def test_rare_collections_within_others_end_with_the_outer_ones() -> None:
    before = gc.get_threshold()
    with reduce_gc_frequency():
        with reduce_gc_frequency():
            pass
        assert gc.get_threshold() > before
    assert gc.get_threshold() == before
