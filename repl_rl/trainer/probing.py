"""A look at the sampler's weights, in a step none of whose lines was written with those of now."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from repl_rl.errors import WeightSyncError
from repl_rl.record.trajectory import Trajectory
from repl_rl.trainer.config import GRPOTrainer
from repl_rl.trainer.correction import Gap
from repl_rl.trainer.source import AheadSource, RolloutSource


def probed(trainer: GRPOTrainer, gap: Gap, source: RolloutSource, rollouts: Sequence[Trajectory], step: int) -> Gap:
    """`gap` with log probabilities compared that `source` gives now, on a task of `rollouts`, where one is trained on.

    Raises:
        WeightSyncError: they are of another policy than that of `step`.
    """
    task_id = next((t.task_id for t in rollouts if t.trainable), None)
    if task_id is None or not isinstance(source, AheadSource):
        return gap
    found = source.probe(task_id)
    for written in found:
        if (wrote := written.lines[0].policy_step) != step:
            raise WeightSyncError(f"the engine has weights of policy step {wrote} while the trainer is at {step}")
    each = [_apart(trainer, written) for written in found]
    first, others, apart = torch.cat([one[:1] for one in each]), torch.cat([one[1:] for one in each]), torch.cat(each)
    elsewhere = others.mean().item() if len(others) else 0.0
    mean, most, after = apart.mean().item(), apart.max().item(), first.mean().item()
    return replace(gap, mean=mean, max=most, after_observation=after, elsewhere=elsewhere, tokens=float(len(apart)))


@torch.no_grad()
def _apart(trainer: GRPOTrainer, written: Trajectory) -> torch.Tensor:
    """How far its log probabilities are from those of the trainer's policy: absolute, nats, (T,)."""
    ids = torch.tensor([[*written.prompt.token_ids, *written.completion_ids]], device=trainer.accelerator.device)
    sampled = torch.tensor([written.logprobs_T()], device=ids.device)
    scores = GRPOTrainer._get_per_token_logps_and_entropies  # ours knows the rows of a step alone
    with trainer.accelerator.autocast():
        logprobs, _, _ = scores(trainer, trainer.model_wrapped, ids, torch.ones_like(ids), sampled.size(1))
    apart: torch.Tensor = (logprobs.float() - sampled)[0].abs()
    return apart
