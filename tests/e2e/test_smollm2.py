"""SmolLM2 itself, under `forbid`: sampled, trained, and in the console."""

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from repl_rl.engine import RequestMode, Sampling, open_engine
from repl_rl.engine.base import Engine
from repl_rl.engine.vllm_engine import VllmEngine
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSettings, SyncRollouts
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox import InProcessSandbox
from repl_rl.tasks import Task
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from tests.support.vocabularies import smollm2, smollm2_file

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]
OPENING = functools.partial(open_engine, "vllm", max_sessions=8, context_tokens=512)
TASKS = [Task(str(n), f"Print {n} twice, in a for loop over range(2).", str(n)) for n in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("smollm2")
    file = smollm2_file()
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=config, dtype=torch.float32
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(made)
    smollm2(made)
    return made


async def greedy(engine: Engine, renderer: Renderer) -> list[list[int]]:
    async def one(task: Task) -> list[int]:
        prompt = renderer.build_prompt(task.question, "base").token_ids + renderer.encode("for i in range(2):\n... ")
        async with engine.session(prompt, Sampling(0.0)) as session:
            for _ in range(4):
                await session.sample(renderer.encode(">>> "), max_tokens=16, stop_ids=renderer.stop_ids)
            return list(session.ids)[len(prompt) :]

    return await asyncio.gather(*map(one, TASKS))


def test_greedy_ids_of_sessions_and_requests_are_the_same_without_forbidden_ones(folder: Path) -> None:
    renderer = Renderer.from_folder(folder)

    async def work() -> tuple[list[list[int]], list[list[int]]]:
        never = renderer.forbidden_ids
        async with OPENING(model=folder, forbidden_ids=never) as engine:
            assert isinstance(engine, VllmEngine)
            sessions = await greedy(engine, renderer)
            engine.set_request_mode(RequestMode.REQUEST)
            return sessions, await greedy(engine, renderer)

    sessions, requests = asyncio.run(work())
    assert sessions == requests
    observed = renderer.encode(">>> ")
    assert renderer.forbidden_ids.isdisjoint(i for ids in sessions for i in ids if i not in observed)


def test_a_training_run_has_no_gap(folder: Path, tmp_path: Path) -> None:
    renderer = Renderer.from_folder(folder)
    limits = RolloutLimits(max_lines=3, max_line_tokens=24)

    @asynccontextmanager
    async def opened() -> AsyncIterator[Rollouts]:
        opening = OPENING(model=folder, forbidden_ids=renderer.forbidden_ids)
        async with opening as engine:
            yield Rollouts(engine, InProcessSandbox(), renderer, ReplSampler(), limits, RolloutSettings(concurrency=8))

    gaps: list[float] = []

    def on_step(record: StepRecord, _: Sequence[object]) -> None:
        gaps.append(record.metrics["logprob_gap_max"])

    config = TrainerConfig(steps=2, prompts_per_step=2, group_size=2, per_device_batch_size=2, learning_rate=1e-5)
    with SyncRollouts(opened, {task.id: task for task in TASKS}) as source:
        run_training(
            folder, renderer.tokenizer, [task.id for task in TASKS], source, config, tmp_path, TrainingOptions(on_step)
        )
    assert len(gaps) == 2
    assert max(gaps) <= 1e-3
