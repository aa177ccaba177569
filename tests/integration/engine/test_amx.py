"""AMX tile registers, which a process has to ask for."""

import os
from pathlib import Path

from repl_rl.engine.vllm_worker_extension import request_amx_tiles


def test_tile_registers_are_given_only_where_the_processor_has_them_and_to_children_too() -> None:
    given = request_amx_tiles()
    assert not given or "amx_tile" in Path("/proc/cpuinfo").read_text()
    child = os.fork()
    if child == 0:
        os._exit(int(request_amx_tiles()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == given
