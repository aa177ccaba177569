"""Minimal GRPO loop: a policy reasons in a live console, and each of its lines gets its own credit.

    python examples/minimal_grpo.py                    # the bundled policy learns its tasks, in minutes, on two cores
    python examples/minimal_grpo.py --engine vllm --steps 40

A step plays groups of rollouts, gives each *line* a reward and an advantage, copies those to the line's *tokens*, and
takes one gradient step. `repl-rl train` does the same on TRL, with schedules, records, reports and many processes. This
file has none of these, and a test compares its gradient with that trainer's.

Names end in their shape. A step has B rollouts, G per task. A rollout has L lines, and S tokens with its prompt. N is
the number of tokens that the policy sampled in the step, in order of the rollouts; only these are trained on.
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

from repl_rl.credit.advantage_estimators import Advantages, GroupRewards, two_stream
from repl_rl.credit.rewards import RewardTable, compute_line_rewards, compute_shaping
from repl_rl.errors import WeightSyncError
from repl_rl.models.transform_logits import forbid_ids
from repl_rl.rollout import Rollouts
from repl_rl.rollout_config import RolloutConfig
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Trajectory, spread
from repl_rl.trajectory.trajectory_metrics import compute_trajectory_metrics

Groups = Sequence[Sequence[Trajectory]]
"""Rollouts of a step, grouped by task."""

REWARDS = RewardTable()
"""Reward of a line by its status: an error costs a little, a line that runs is worth nothing."""
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""Clip range of the probability ratio in one step; beyond it the gradient is 0."""
IMPORTANCE_CAP = 2.0
"""Cap of the importance sampling ratio between trainer and sampler."""
MAX_GRAD_NORM = 1.0
TOLERANCE = 1e-3
"""Largest difference in nats between sampler and trainer; both compute in float32, in another order."""


async def play(rollouts: Rollouts, tasks: Sequence[Task], group_size: int) -> Groups:
    """Play a group of rollouts of each task; drop those without training signal (a fault of ours, no line).

    In `collect` the policy writes a line, the console runs it, and its output is appended to the context before the
    next line is sampled: `repl_rl/rollout/episode.py`.
    """
    trajectories = await rollouts.collect([task for task in tasks for _ in range(group_size)])
    return [[t for t in trajectories if t.task_id == task.id and t.trainable] for task in tasks]


def advantages_of(group: Sequence[Trajectory]) -> Advantages:
    """Return one advantage per line, relative to the group, shape (G, L).

    It is the sum of two parts: the outcome of the whole rollout compared with its group's outcomes, as in GRPO, and the
    cost of the line itself if it went wrong. So an error costs its line even in a rollout that is right in the end. The
    cost does not depend on the number of errors.
    """
    outcomes_G = tuple(t.outcome for t in group)
    rewards_G_L = tuple(compute_line_rewards(t, REWARDS) for t in group)
    shaping_G_L = tuple(compute_shaping(t, REWARDS) for t in group)
    return two_stream(GroupRewards.from_rows(outcomes_G, rewards_G_L, shaping_G_L=shaping_G_L))


@dataclass(frozen=True, slots=True)
class Batch:
    """Rollouts of a step as tensors."""

    ids_B_S: Tensor
    """Prompt and completion of each rollout, padded on the right.

    A causal model attends only to the left, so the padding needs no mask.
    """
    sampled_B_S: Tensor
    """Loss mask: True at the N tokens that the policy sampled; False at the prompt, at console output and at padding.
    """
    advantages_N: Tensor
    sampler_N: Tensor
    """Log probability with which the engine sampled each token, nats."""


def batch_of(groups: Groups, credited: Callable[[Sequence[Trajectory]], Advantages] = advantages_of) -> Batch:
    """Build the batch: each token gets the advantage of its line."""
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
    """Return the trainer's log probability of each sampled token, nats, shape (N,), in one forward pass.

    The sampler's are equal up to rounding, but have no gradient.
    """
    logits_B_S_V: Tensor = model(input_ids=batch.ids_B_S, use_cache=False).logits
    # The logits at a token predict the next one. A prompt comes first, so no sampled token is lost.
    sampled_B_S = batch.sampled_B_S[:, 1:]
    logprobs_N_V = logits_B_S_V[:, :-1][sampled_B_S].float().log_softmax(dim=-1)
    ids_N = batch.ids_B_S[:, 1:][sampled_B_S]
    return logprobs_N_V.gather(1, ids_N[:, None])[:, 0]


def loss_of(logprobs_N: Tensor, batch: Batch) -> Tensor:
    """Return the policy gradient loss, the mean over all sampled tokens of the step.

    The mean is not taken per rollout first, so a token has equal weight in a long and in a short rollout. Console
    output is not among the N tokens, so it needs no mask.
    """
    # These rollouts are used for one optimizer step, so the ratio is 1 and the clip has no effect. Both matter if
    # several steps use the same rollouts.
    start_N = logprobs_N.detach()
    ratio_N = (logprobs_N - start_N).exp()
    clipped_N = ratio_N.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    gain_N = torch.minimum(ratio_N * batch.advantages_N, clipped_N * batch.advantages_N)
    # The engine's log probabilities differ slightly from the trainer's, so weight tokens by their capped ratio.
    importance_N = (start_N - batch.sampler_N).exp().clamp(max=IMPORTANCE_CAP)
    return -(gain_N * importance_N).mean()


def update(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch) -> dict[str, float]:
    """Take one optimizer step; return its metrics.

    Raises:
        WeightSyncError: the rollouts were sampled with other weights.
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
    """Train `model`, whose weights the engine of `rollouts` has loaded; print and return the metrics of each step."""
    # The trainer must give probability 0 to the ids that the sampler never samples.
    forbid_ids(model, rollouts.engine.forbidden_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    rng = random.Random(0)
    history = []
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, steps + 1):
            start_s = time.perf_counter()
            groups = await play(rollouts, rng.sample(tasks, prompts_per_step), group_size)
            # Update in a thread, so that the event loop can start new consoles meanwhile.
            metrics = await asyncio.to_thread(update, model, optimizer, batch_of(groups))
            # Weight sync: the engine loads the new weights from a folder.
            model.save_pretrained(folder)
            await rollouts.engine.load_weights(Path(folder), policy_step=step)
            metrics |= compute_trajectory_metrics([t for group in groups for t in group])
            history.append(metrics | {"step": step, "seconds": time.perf_counter() - start_s})
            print(LINE.format(**history[-1]), flush=True)
    return history


LINE = (
    "step {step:3d}  solved {solve_rate:6.1%}  lines in error {line_error_rate:6.1%}  sampled {sampled_tokens:5.0f}  "
    "loss {loss:+.3f}  gradient {grad_norm:.3f}  gap {gap:.0e} nats  {seconds:.1f} s"
)


async def run(world: RolloutConfig, steps: int) -> list[dict[str, float]]:
    """Open engine and consoles, load the policy a second time for training, and train it."""
    model = AutoModelForCausalLM.from_pretrained(world.model_folder, dtype=torch.float32)
    async with world.open_rollouts() as rollouts:
        return await learn(rollouts, model, world.draw_tasks("train", 4096), steps)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser("examples/minimal_grpo.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers", help="what samples")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps, >= 1")
    options = parser.parse_args()
    disable_progress_bar()
    torch.manual_seed(0)
    asyncio.run(run(RolloutConfig(engine=options.engine, concurrency=96), options.steps))


if __name__ == "__main__":
    main()
