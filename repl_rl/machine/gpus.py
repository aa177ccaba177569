"""Properties of the GPU that this process trains on: its presence, and its support of bfloat16."""

import subprocess
import sys
from functools import cache
from typing import Protocol

from repl_rl.machine.launched import own_gpu

_ASK = "import sys, torch; torch.cuda.set_device(int(sys.argv[1])); print(torch.cuda.is_bf16_supported(False))"


class Gpus(Protocol):
    """Properties of the GPU that a process trains on."""

    def there(self) -> bool:
        """Return True if this process has a GPU."""

    def bfloat16(self) -> bool:
        """Return True if the GPU computes in bfloat16."""


class OwnGpus:
    """Properties of the GPU on this machine."""

    def there(self) -> bool:
        """See `Gpus.there`."""
        return _visible() > 0

    def bfloat16(self) -> bool:
        """See `Gpus.bfloat16`. A child process asks, because the query would initialise CUDA in this one."""
        return _visible() > 0 and _computes_bfloat16(own_gpu(_visible()))


@cache
def _visible() -> int:
    # The import takes seconds, which verbs that need no GPU should not spend.
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@cache
def _computes_bfloat16(number: int) -> bool:
    asked = subprocess.run([sys.executable, "-P", "-c", _ASK, str(number)], capture_output=True, text=True, check=False)
    return asked.returncode == 0 and asked.stdout.strip() == "True"
