"""The loop on one page: its gradient is the trainer's, and it learns from what the engine samples."""

import asyncio
import copy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples import minimal_grpo as loop
from repl_rl.errors import WeightSyncError
from repl_rl.models.transform_logits import forbid_ids
from repl_rl.rollout_config import RolloutConfig
from repl_rl.trainer import config as choices
from repl_rl.trainer import trl_arguments
from repl_rl.trainer.config import TrainerConfig
from tests.support import documents
from tests.support.trainer.grpo_runs import make, run
from tests.support.trainer.tiny_policies import SampledSource, tiny_model

DEFAULT = TrainerConfig(steps=1, prompts_per_step=3, group_size=4, warmup_steps=0)
FORBIDDEN = frozenset({9, 30})


def groups_of(source: SampledSource) -> loop.Groups:
    """The rollouts of the first step, as `play` returns them."""
    (step,) = source.steps
    size = DEFAULT.group_size
    return [[t for t in step[start : start + size] if t.trainable] for start in range(0, len(step), size)]


@pytest.mark.parametrize("apart", [False, True], ids=["sampler and trainer agree", "the sampler is another policy"])
def test_its_loss_and_gradient_are_the_trainers_to_one_part_in_ten_thousand(apart: bool, tmp_path: Path) -> None:
    start = tiny_model()
    sampler = tiny_model(seed=1) if apart else copy.deepcopy(start)
    source = SampledSource(sampler, deaf=apart, faulty=frozenset({5}), forbidden_ids=FORBIDDEN)
    config = replace(DEFAULT, importance_sampling="token_truncate(tolerance=99.0)")  # a gap is not refused
    theirs = run(make(copy.deepcopy(start), source, config, tmp_path))
    ours = copy.deepcopy(start)
    forbid_ids(ours, FORBIDDEN)
    batch = loop.batch_of(groups_of(source))
    logprobs_N = loop.logprobs_of(ours, batch)
    cut = (logprobs_N - batch.sampler_N).exp() > loop.IMPORTANCE_CAP
    assert bool(cut.any()) == apart
    loss = loop.loss_of(logprobs_N, batch)
    torch.autograd.backward(loss)
    clip_grad_norm_(ours.parameters(), loop.MAX_GRAD_NORM)
    assert loss.item() == pytest.approx(theirs.logs[0]["loss"], rel=1e-4, abs=1e-6)
    (gradients,) = theirs.steps
    assert len(gradients) == len(list(ours.parameters()))
    for name, parameter in ours.named_parameters():
        assert gradients[name].any()
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


def test_the_settings_of_the_loss_are_the_trainers_defaults() -> None:
    default = TrainerConfig()
    assert (choices.CLIP_LOW, choices.CLIP_HIGH) == (loop.CLIP_LOW, loop.CLIP_HIGH)
    assert (default.importance_cap, trl_arguments.MAX_GRAD_NORM) == (loop.IMPORTANCE_CAP, loop.MAX_GRAD_NORM)
    assert (default.loss, default.importance_sampling, default.estimator) == ("dapo", "token_truncate", "two_stream")
    assert (default.rewards, default.compute_logprob_tolerance()) == (loop.REWARDS, loop.TOLERANCE)


def test_rollouts_of_another_policy_are_refused_and_leave_the_model_as_it_was() -> None:
    source = SampledSource(tiny_model(seed=1))
    source.collect(["task 0"] * DEFAULT.group_size, 0)
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(WeightSyncError, match="nats off"):
        loop.update(model, torch.optim.SGD(model.parameters(), lr=1.0), loop.batch_of(groups_of(source)))
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in before.items())


def test_two_steps_change_the_policy_and_the_second_samples_from_the_changed_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = RolloutConfig(engine="transformers", sandbox="unsafe", concurrency=8)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(world.model_folder, dtype=torch.float32)
    before = copy.deepcopy(model.state_dict())

    async def two_steps() -> list[dict[str, float]]:
        async with world.open_rollouts() as rollouts:
            tasks = world.draw_tasks("train", 8)
            return await loop.learn(rollouts, model, tasks, steps=2, prompts_per_step=2, group_size=4)

    history = asyncio.run(two_steps())
    assert [row["step"] for row in history] == [1, 2]
    assert all(row["gap"] <= loop.TOLERANCE for row in history)
    assert any(not torch.equal(model.state_dict()[name], weight) for name, weight in before.items())
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["step", "1"], ["step", "2"]]


@pytest.mark.heavy
def test_the_command_that_the_pages_name_is_there() -> None:
    assert "`python examples/minimal_grpo.py`" in documents.PAGES["README.md"]
    command = [sys.executable, str(documents.ROOT / "examples" / "minimal_grpo.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "{transformers,vllm}" in done.stdout


def test_it_stays_on_one_page() -> None:
    assert len(Path(loop.__file__).read_text().splitlines()) <= 220
