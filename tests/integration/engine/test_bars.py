"""vLLM's process leaves nothing behind that its host would be told of as leaked."""

import subprocess
import sys

import pytest

BARS = """
import io, sys
from tqdm.auto import tqdm
from tqdm.std import TqdmDefaultWriteLock
if {mended}:
    from repl_rl.engine.vllm_subprocess import disable_tqdm_semaphores
    disable_tqdm_semaphores()
list(tqdm([1], file=io.StringIO()))
sys.exit(hasattr(TqdmDefaultWriteLock, "mp_lock"))
"""


@pytest.mark.parametrize("mended", [True, False])
def test_a_progress_bar_makes_no_named_semaphore(mended: bool) -> None:
    done = subprocess.run([sys.executable, "-c", BARS.format(mended=mended)], check=False)
    assert done.returncode == (0 if mended else 1)
