"""Launcher of the processes of one training."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it without __all__

ROOT = Path(__file__).parents[3]


def launch(processes: int, module: str, *arguments: str, limit_s: float = 280) -> list[str]:
    """Run a module in so many processes that know of each other, and see all of them end well; what each said."""
    # The store listens in this process, as in torchrun, because another program could take a port that is only chosen.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = []
    for rank in range(processes):
        env = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", module, *arguments]
        workers.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))

    def interrupt() -> None:
        """A process that is late prints where it stands (PYTHONFAULTHANDLER) and fails."""
        for worker in workers:
            worker.send_signal(signal.SIGABRT)

    late = threading.Timer(limit_s, interrupt)
    late.start()
    try:
        outputs = [worker.communicate()[0].decode() for worker in workers]
    finally:
        late.cancel()
        for worker in workers:
            worker.kill()
    assert all(worker.returncode == 0 for worker in workers), outputs
    return outputs
