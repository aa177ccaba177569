"""What a node keeps of weights that it was sent."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from repl_rl.ray.rollout_worker import compute_checksum
from repl_rl.utils.atomic_files import open_private_folder
from tests.support.ray.memory_cluster import weights

_NODE = """
import asyncio, os, sys
from repl_rl.ray.rollout_worker import WeightsRef
from repl_rl.ray.rollout_worker import RolloutWorker
from tests.support.ray.memory_cluster import setting
from tests.support.ray.scripted_workers import opened

async def main():
    node = RolloutWorker()
    await node.open(setting(opened))
    for content in (b"old", b"weights"):
        print(await node.load_weights(WeightsRef("nowhere", 1, ""), {"model.safetensors": content}), flush=True)
    if sys.stdin.read():
        await node.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("closed", [False, True], ids=["killed", "closed"])
def test_weights_that_a_node_was_sent_go_with_it_however_it_ends(closed: bool, tmp_path: Path) -> None:
    root = Path(tempfile.gettempdir())
    node = subprocess.Popen([sys.executable, "-c", _NODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert node.stdout is not None
    arrived = [node.stdout.readline().decode().strip() for _ in range(2)]
    (kept,) = root.glob(f"repl_rl-node-weights-{node.pid}-*")
    (file,) = kept.rglob("model.safetensors")  # nothing was played that would need the old ones
    assert file.read_bytes() == b"weights"
    assert arrived == [
        compute_checksum(weights(tmp_path / content.decode(), content)) for content in (b"old", b"weights")
    ]
    assert not [other for other in Path("/dev/shm").iterdir() if f"-{node.pid}-" in other.name]
    if closed:
        node.communicate(b"close")
    else:
        os.kill(node.pid, signal.SIGKILL)
        node.communicate()
        assert not file.exists(), "its name leads nowhere"
        with open_private_folder(root, "repl_rl-node-weights-"):
            pass  # as the next node on this machine does
    assert not kept.exists()
