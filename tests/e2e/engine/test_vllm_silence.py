"""vLLM's process that stands still is dead after a while; one that only takes long is not. A step that it cannot take
is found when it opens."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from repl_rl.cli import main
from repl_rl.engine import Engine, Sampling, Vllm
from repl_rl.engine.config import EngineOptions
from repl_rl.engine.restarting_engine import open_restarting_engine
from repl_rl.engine.vllm_subprocess import PendingCalls, kill_when_silent
from repl_rl.errors import EngineDied
from repl_rl.utils.package_data import find_asset

LIMIT_S = 1.0
LOOPS = "print('ready', flush=True)\nwhile True: pass"
SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    begun: list[subprocess.Popen[str]] = []
    yield begun
    for child in begun:
        child.kill()
        child.communicate()


def begin(code: str, children: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    children.append(child)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


async def watched(child: subprocess.Popen[str], waiting: PendingCalls, seconds: float) -> bool:
    """Whether the process was ended within that time."""
    guard = asyncio.create_task(kill_when_silent([child.pid], waiting, LIMIT_S))
    done, _ = await asyncio.wait({guard}, timeout=seconds)
    guard.cancel()
    return bool(done) and child.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("stopped", [True, False])
def test_a_process_that_stands_still_while_it_is_waited_for_is_ended(
    stopped: bool, children: list[subprocess.Popen[str]]
) -> None:
    child = begin(LOOPS if stopped else SLEEPS, children)
    if stopped:
        os.kill(child.pid, signal.SIGSTOP)
    waiting = PendingCalls()
    with waiting.track():
        assert asyncio.run(watched(child, waiting, 60.0))


def test_a_process_at_work_and_one_that_nobody_waits_for_are_left_alone(children: list[subprocess.Popen[str]]) -> None:
    busy, idle, waiting = begin(LOOPS, children), begin(SLEEPS, children), PendingCalls()
    with waiting.track():
        assert not asyncio.run(watched(busy, waiting, 4 * LIMIT_S))
    assert not asyncio.run(watched(idle, waiting, 4 * LIMIT_S))
    assert (busy.poll(), idle.poll()) == (None, None)


@pytest.mark.heavy
def test_an_engine_that_is_stopped_is_replaced_and_its_weights_with_it(policy_folder: Path) -> None:
    # imported here: vllm takes seconds
    from repl_rl.engine.vllm_engine import VllmEngine, get_process_ids, open_vllm

    opening = EngineOptions(policy_folder, max_sessions=4)

    async def ids(engine: Engine) -> list[int]:
        async with engine.session((1, 2, 3), Sampling(temperature=0.0)) as session:
            await session.sample((), max_tokens=8, stop_ids=frozenset())
            return list(session.ids)

    async def work() -> None:
        async with open_restarting_engine(lambda: open_vllm(opening, Vllm(), silence_s=5.0)) as engine:
            expected = await ids(engine)
            running = engine._lifetime.engine
            assert isinstance(running, VllmEngine)
            (process,) = get_process_ids(running._llm)
            os.kill(process, signal.SIGSTOP)
            with pytest.raises(EngineDied, match="process is gone"):
                await ids(engine)
            assert await ids(engine) == expected
            assert engine.crash_count == 1

    asyncio.run(work())


@pytest.mark.heavy
@pytest.mark.parametrize("drive", ["session", "request"])
def test_a_step_that_vllm_cannot_take_here_is_one_line(
    drive: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": 362, "eos_token_id": 360, "pad_token_id": 361, "bos_token_id": None}
    config = Qwen3Config(**sizes, **ids, num_key_value_heads=2, head_dim=16, max_position_embeddings=512)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    for file in find_asset("policies/quickstart").glob("*token*"):
        shutil.copy(file, tmp_path / "model")
    given = [
        "--model",
        str(tmp_path / "model"),
        "--prompt",
        "bare",
        "--count",
        "1",
        "--concurrency",
        "2",
        "--vllm.request-mode",
        drive,
    ]
    capfd.readouterr()
    assert main(["rollout", *given]) == 2
    said = capfd.readouterr()
    lines = [line for line in said.err.splitlines() if "Triton" not in line]
    assert len(lines) == 1, said.err
    assert "vLLM cannot run it here: RuntimeError: Unsupported CPU attention configuration: head_dim=16" in lines[0]
