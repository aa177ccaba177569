"""The page of the line console on real vLLM with the bundled policy: its record, token by token."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from repl_rl.engine import open_engine
from repl_rl.rollout import Rollouts, RolloutSampler, RolloutSettings
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox.base import push_lines
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.tasks import Task, load_tasks
from repl_rl.trajectory.console_text import choose_prompt
from repl_rl.trajectory.trajectory import Observed, Trajectory
from repl_rl.utils.package_data import find_asset

POLICY = find_asset("policies/quickstart")
PAGE = Path(__file__).parents[3] / "docs" / "samplers" / "line_console.md"
RENDERER = Renderer.from_folder(POLICY)


def of_page() -> tuple[RolloutSampler, Task]:
    namespace: dict[str, object] = {}
    exec(PAGE.read_text().partition("```python\n")[2].partition("```")[0], namespace)
    sampler, task = namespace["sampler"], namespace["task"]
    assert isinstance(sampler, RolloutSampler)
    assert isinstance(task, Task)
    return sampler, task


async def played(sampler: RolloutSampler, tasks: Sequence[Task]) -> list[Trajectory]:
    async with open_engine("vllm", model=POLICY) as engine:
        rollouts = Rollouts(engine, InProcessSandbox(), RENDERER, sampler, RolloutLimits(), RolloutSettings("bare"))
        return await rollouts.collect(tasks)


async def typed_again(t: Trajectory) -> list[tuple[int, bool]]:
    """Ids and mask as they must be, from a console of its own: each line's ids, then what the line printed, encoded."""
    expected: list[tuple[int, bool]] = []
    async with InProcessSandbox().session() as console:
        for line in t.lines:
            expected += [(i, True) for i in line.token_ids]
            if line.execution is None:
                continue
            result = await push_lines(console, line.text.removesuffix("\n").split("\n"))
            assert result.status is line.execution.status
            shown = result.text if console.ended else result.text + choose_prompt(result.incomplete)
            expected += [
                (i, False) for i in RENDERER.encode_observation(shown, RolloutLimits().max_observation_tokens).token_ids
            ]
    return expected


@pytest.mark.heavy
def test_on_vllm_the_bundled_policys_lines_are_sampled_and_what_they_print_is_masked() -> None:
    sampler, question = of_page()
    tasks = [*load_tasks("builtin:quickstart", split="held_out", count=20), question, replace(question, id="again")]
    found = asyncio.run(played(sampler, tasks))
    assert sum(t.observed_tokens > 0 for t in found) >= 5
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()
    for t in found:
        if any(" at 0x" in segment.text for segment in t.segments if isinstance(segment, Observed)):
            continue  # an address is another one in every console
        assert list(zip(t.completion_ids, t.loss_mask, strict=True)) == asyncio.run(typed_again(t))
        ids = [*t.prompt.token_ids, *t.completion_ids]
        with torch.no_grad():
            nats = model(torch.tensor([ids])).logits[0].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        for own, ours, theirs in zip(
            t.loss_mask, t.logprobs_T(), nats[len(t.prompt.token_ids) - 1 :].tolist(), strict=True
        ):
            assert ours == (pytest.approx(theirs, abs=1e-3) if own else 0.0)
