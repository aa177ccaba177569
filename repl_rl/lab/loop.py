"""The whole idea on one page: a policy reasons in a live console, and each of its lines is credited on its own.

    python -m repl_rl.lab.loop                    # the bundled policy learns its tasks, in minutes, on two cores
    python -m repl_rl.lab.loop --engine vllm --steps 40

A step plays groups of rollouts, gives each *line* a reward and an advantage, widens those to the line's *tokens*, and
takes one step up the gradient. `repl-rl train` does the same on TRL, with schedules, records, reports and many
processes around it; here nothing is around it, and a test holds this gradient to that trainer's.

Names end in their shape. A step has B rollouts, G of them of each task. A rollout has L lines, and S tokens with its
prompt. N are the tokens that the policy sampled in the step, rollout after rollout: the only ones to learn from.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from repl_rl.credit.advantages import Advantages, GroupRewards, two_stream
from repl_rl.credit.rewards import RewardTable, line_rewards, shaping
from repl_rl.engine.forbidden import forbid
from repl_rl.errors import WeightSyncError
from repl_rl.record.metrics import describe
from repl_rl.record.trajectory import Trajectory, spread
from repl_rl.rollout import Rollouts
from repl_rl.tasks import Task
from repl_rl.world import World

Groups = Sequence[Sequence[Trajectory]]
"""The rollouts of a step, those of one task together."""

REWARDS = RewardTable()
"""What a line earns for what the console made of it: an error costs a little, a line that runs is worth nothing."""
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""How far a token's probability may move in one step before moving it further pays nothing."""
IMPORTANCE_CAP = 2.0
"""How much more likely than the sampler the trainer may find a token before that counts no further."""
MAX_GRAD_NORM = 1.0
TOLERANCE = 1e-3
"""Nats by which sampler and trainer may differ: they compute the same in another order, in float32."""


async def play(rollouts: Rollouts, tasks: Sequence[Task], group_size: int) -> Groups:
    """A group of rollouts of each task; those that nothing can be learned from (a fault of ours, no line) are left out.

    Behind this one call the policy writes a line, the console runs it, and what that printed is appended to the
    context before the next line is sampled: `repl_rl/rollout/episode.py`.
    """
    played = await rollouts.collect([task for task in tasks for _ in range(group_size)])
    return [[t for t in played if t.task_id == task.id and t.trainable] for task in tasks]


def advantages_of(group: Sequence[Trajectory]) -> Advantages:
    """How much better than its group each line did: one number a line, shape (G, L).

    Two things are added up: the outcome of the whole rollout compared with its group's outcomes, as in GRPO, and what
    the line itself costs if it went wrong. So an error costs its line in a rollout that was right in the end, too, and
    it costs the same however many there are.
    """
    outcomes_G = tuple(t.outcome for t in group)
    rewards_G_L = tuple(line_rewards(t, REWARDS) for t in group)
    shaping_G_L = tuple(shaping(t, REWARDS) for t in group)
    return two_stream(GroupRewards.of(outcomes_G, rewards_G_L, shaping_G_L=shaping_G_L))


@dataclass(frozen=True, slots=True)
class Batch:
    """The rollouts of a step as tensors."""

    ids_B_S: Tensor
    """Prompt and completion of each rollout, padded on the right: a causal model looks to the left only, so the padding
    needs no mask."""
    sampled_B_S: Tensor
    """True at the N tokens that the policy wrote itself; False at the prompt, at console output and at padding."""
    advantages_N: Tensor
    sampler_N: Tensor
    """The log probability that the engine drew each token with, nats."""


def batch_of(groups: Groups, credited: Callable[[Sequence[Trajectory]], Advantages] = advantages_of) -> Batch:
    """Advantages of lines become advantages of tokens here: each token gets that of the line it belongs to."""
    trajectories = [t for group in groups for t in group]
    advantages_B_L = [advantages_L for group in groups for advantages_L in credited(group)]
    ids_B = [torch.tensor([*t.prompt.token_ids, *t.completion_ids]) for t in trajectories]
    sampled_B = [torch.tensor([*[False] * len(t.prompt.token_ids), *t.loss_mask]) for t in trajectories]
    advantages_N = [
        advantage
        for t, advantages_L in zip(trajectories, advantages_B_L, strict=True)
        for advantage, sampled in zip(spread(advantages_L, t), t.loss_mask, strict=True)
        if sampled
    ]
    return Batch(
        pad_sequence(ids_B, batch_first=True),
        pad_sequence(sampled_B, batch_first=True),
        torch.tensor(advantages_N),
        torch.tensor([logprob for t in trajectories for line in t.lines for logprob in line.logprobs]),
    )


def logprobs_of(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The trainer's own log probability of each sampled token, nats, shape (N,), in one forward pass.

    The sampler's would be the same up to rounding, but they have no gradient.
    """
    logits_B_S_V: Tensor = model(input_ids=batch.ids_B_S, use_cache=False).logits
    # What the model says at a token is about the next one; a prompt comes first, so no sampled token is lost.
    sampled_B_S = batch.sampled_B_S[:, 1:]
    logprobs_N_V = logits_B_S_V[:, :-1][sampled_B_S].float().log_softmax(dim=-1)
    ids_N = batch.ids_B_S[:, 1:][sampled_B_S]
    return logprobs_N_V.gather(1, ids_N[:, None])[:, 0]


def loss_of(logprobs_N: Tensor, batch: Batch) -> Tensor:
    """Minus the advantage of making each sampled token more likely: the mean over all of them.

    The mean is over the tokens of the step, not of each rollout first, so a token counts the same in a long rollout as
    in a short one. What the console printed is not among the N, so there is nothing to mask.
    """
    # Only one step is taken from these rollouts, so the ratio is 1, the clip is idle, and the gradient is that of the
    # log probability. Both are here for those who take several.
    start_N = logprobs_N.detach()
    ratio_N = (logprobs_N - start_N).exp()
    clipped_N = ratio_N.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    gain_N = torch.minimum(ratio_N * batch.advantages_N, clipped_N * batch.advantages_N)
    # The engine drew the tokens, and its arithmetic is not quite the trainer's: weigh them as if the trainer had.
    importance_N = (start_N - batch.sampler_N).exp().clamp(max=IMPORTANCE_CAP)
    return -(gain_N * importance_N).mean()


def update(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch) -> dict[str, float]:
    """One step of the optimizer; returns figures about it.

    Raises:
        WeightSyncError: the rollouts are not this model's, so it cannot learn from them.
    """
    logprobs_N = logprobs_of(model, batch)
    gap = (logprobs_N.detach() - batch.sampler_N).abs().max().item()
    if not gap <= TOLERANCE:
        raise WeightSyncError(f"a log probability of the sampler is {gap:.2g} nats off; load the last weights into it")
    loss = loss_of(logprobs_N, batch)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    norm = clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    return {"loss": loss.item(), "grad_norm": norm.item(), "gap": gap}


async def learn(
    rollouts: Rollouts,
    model: PreTrainedModel,
    tasks: Sequence[Task],
    steps: int,
    prompts_per_step: int = 12,
    group_size: int = 8,
    learning_rate: float = 5e-4,
) -> list[dict[str, float]]:
    """Train `model`, whose weights the engine of `rollouts` holds; print and return the figures of each step."""
    forbid(model, rollouts.engine.forbidden_ids)  # what the sampler never says must have no probability here either
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    drawn = random.Random(0)
    history = []
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, steps + 1):
            begun = time.perf_counter()
            groups = await play(rollouts, drawn.sample(tasks, prompts_per_step), group_size)
            # In a thread, so that fresh consoles can be born in the meantime.
            figures = await asyncio.to_thread(update, model, optimizer, batch_of(groups))
            model.save_pretrained(folder)
            await rollouts.engine.load_weights(Path(folder), policy_step=step)
            figures |= describe([t for group in groups for t in group])
            history.append(figures | {"step": step, "seconds": time.perf_counter() - begun})
            print(LINE.format(**history[-1]), flush=True)
    return history


LINE = (
    "step {step:3d}  solved {solve_rate:6.1%}  lines in error {line_error_rate:6.1%}  sampled {sampled_tokens:5.0f}  "
    "loss {loss:+.3f}  gradient {grad_norm:.3f}  gap {gap:.0e} nats  {seconds:.1f} s"
)


async def run(world: World, steps: int) -> list[dict[str, float]]:
    """Open the world, load its policy a second time to train it, and learn."""
    model = AutoModelForCausalLM.from_pretrained(world.model_folder, dtype=torch.float32)
    async with world.rollouts() as rollouts:
        return await learn(rollouts, model, world.drawn("train", 4096), steps)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser("python -m repl_rl.lab.loop", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers", help="what samples")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps, >= 1")
    options = parser.parse_args()
    disable_progress_bar()
    torch.manual_seed(0)
    asyncio.run(run(World(engine=options.engine, concurrency=96), options.steps))


if __name__ == "__main__":
    main()
