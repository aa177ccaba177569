"""However the host process ends, vLLM's process ends too."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HOST = """
import asyncio, signal, sys
from repl_rl.engine import Sampling, open_engine

async def main():
    interrupted = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
    async with open_engine("vllm", model=sys.argv[1], max_sessions=8) as engine:
        print(engine._llm.engine_core.resources.engine_manager.processes[0].pid, flush=True)
        await interrupted.wait()
        async with engine.session((1, 2), Sampling()) as session:
            await session.sample((), max_tokens=5, stop_ids=frozenset())
        print("still there", flush=True)
        if sys.argv[2] == "wait":
            await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.heavy
@pytest.mark.parametrize("end", ["close", "wait"])
def test_an_interrupt_spares_vllm_and_the_end_of_the_host_does_not(
    end: str, policy_folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "host.py"
    script.write_text(HOST)
    command = [sys.executable, str(script), str(policy_folder), end]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as host:
        assert host.stdout is not None
        assert host.stderr is not None
        core = os.pidfd_open(int(host.stdout.readline()))
        os.killpg(host.pid, signal.SIGINT)
        assert host.stdout.readline() == "still there\n"
        if end == "wait":
            host.kill()
        assert select.select([core], [], [], 30)[0], "vLLM's process outlived its host by 30 s"
        os.close(core)
        assert host.wait(timeout=30) == (0 if end == "close" else -signal.SIGKILL)
        complaints = [line for line in host.stderr if "leaked" in line or "Traceback" in line]
    assert end == "wait" or complaints == []  # a killed host's resource tracker says what it tidies up
