"""An update from rollouts with tool calls: what one of three calls wrongly teaches reaches every weight."""

import asyncio
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from repl_rl.credit.advantage_estimators import load_estimator
from repl_rl.credit.rewards import CreditConfig
from repl_rl.samplers.chat_tool_sampler import ChatToolSampler
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.grpo import ReplGRPOTrainer, TrainerComponents
from repl_rl.trainer.trl_arguments import grpo_args
from repl_rl.trajectory.trajectory import Line, Sampled, Segment, Trajectory
from tests.support.samplers.marked_text import chat_renderer, rollouts_of, written
from tests.support.scripted_rollouts import TASK
from tests.support.trainer.tiny_policies import ReplayedSource, tiny_model
from tests.unit.samplers.test_chat_tool import BAD, GOOD, multiply

TURNS = [(GOOD, "\\boxed{42}"), (BAD, "\\boxed{13}"), ("I guess \\boxed{41}",)]


@torch.no_grad()
def as_sampled_by(model: PreTrainedModel, t: Trajectory, number: int) -> Trajectory:
    """`t` with the log probabilities (nats) that `model` gives to its sampled tokens."""
    ids = [*t.prompt.token_ids, *t.completion_ids]
    rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    logprobs = iter(rows[torch.arange(len(ids) - 1), ids[1:]].tolist()[len(t.prompt.token_ids) - 1 :])

    def again(line: Line) -> Line:
        return replace(line, logprobs=tuple(min(next(logprobs), 0.0) for _ in line.token_ids))

    segments: list[Segment] = []
    for segment in t.segments:
        if isinstance(segment, Sampled):
            segments.append(Sampled(tuple(map(again, segment.lines))))
        else:
            segments.append(segment)
            for _ in segment.token_ids:
                next(logprobs)
    return replace(t, id=f"{t.id}-{number}", segments=tuple(segments))


def test_every_weight_changes_when_two_of_three_rollouts_call_a_tool(tmp_path: Path) -> None:
    renderer = chat_renderer()
    sampler = ChatToolSampler([multiply], answered=0.25, failed=-0.2, not_called=-0.3)
    model = tiny_model(vocab=len(renderer.tokenizer))
    group = []
    for number, turns in enumerate(TURNS):
        script = written(renderer, "".join(f"{text}<|im_end|>" for text in turns))
        (t,) = asyncio.run(rollouts_of(sampler, [script], renderer).collect([TASK]))
        group.append(as_sampled_by(model, t, number))
    config = TrainerConfig(steps=1, prompts_per_step=1, group_size=3, warmup_steps=0)
    (tmp_path / "weights").mkdir()
    trainer = ReplGRPOTrainer(
        model=model,
        tokenizer=renderer.tokenizer,
        task_ids=[TASK.id],
        source=ReplayedSource([group]),
        args=grpo_args(config, tmp_path),
        credit=CreditConfig(load_estimator(config.estimator), config.rewards),
        components=TrainerComponents(
            weights_folder=tmp_path / "weights",
            logprob_tolerance=config.compute_logprob_tolerance(),
            importance_sampling=config.importance_sampling,
        ),
    )
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trainer.train()
    figures = sampler.metrics(group)
    assert (figures["tools/call_frequency"], figures["tools/failure_frequency"]) == (2 / 3, 1 / 2)
    unchanged = [name for name, weight in model.named_parameters() if torch.equal(weight, before[name])]
    assert unchanged == []
