"""Check of weight sync with probe lines, for a step without a line from the current weights."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from repl_rl.errors import WeightSyncError
from repl_rl.record.trajectory import Trajectory
from repl_rl.trainer.correction import Gap
from repl_rl.trainer.grpo_config import GRPOTrainer
from repl_rl.trainer.source import AheadSource, RolloutSource


def probed(trainer: GRPOTrainer, gap: Gap, source: RolloutSource, rollouts: Sequence[Trajectory], step: int) -> Gap:
    """Return `gap` with the logprob mismatch of probe lines, which `source` samples now on a task of `rollouts`.

    If no rollout is trained on, or `source` cannot probe, `gap` is returned as it is.

    Raises:
        WeightSyncError: a probe line comes from other weights than those of `step`.
    """
    task_id = next((t.task_id for t in rollouts if t.trainable), None)
    if task_id is None or not isinstance(source, AheadSource):
        return gap
    found = source.probe(task_id)
    for written in found:
        if (wrote := written.lines[0].policy_step) != step:
            raise WeightSyncError(f"the engine has weights of policy step {wrote} while the trainer is at {step}")
    each = [_apart(trainer, written) for written in found]
    # The first token follows the prompt, so it counts as a token after an observation.
    first, others, apart = torch.cat([one[:1] for one in each]), torch.cat([one[1:] for one in each]), torch.cat(each)
    elsewhere = others.mean().item() if len(others) else 0.0
    mean, most, after = apart.mean().item(), apart.max().item(), first.mean().item()
    return replace(gap, mean=mean, max=most, after_observation=after, elsewhere=elsewhere, tokens=float(len(apart)))


@torch.no_grad()
def _apart(trainer: GRPOTrainer, written: Trajectory) -> torch.Tensor:
    """Return the absolute difference between the log probabilities of a probe line and the trainer's, nats, (T,)."""
    ids = torch.tensor([[*written.prompt.token_ids, *written.completion_ids]], device=trainer.accelerator.device)
    sampled = torch.tensor([written.logprobs_T()], device=ids.device)
    # TRL's method, because our override knows only the rows of a step.
    scores = GRPOTrainer._get_per_token_logps_and_entropies
    with trainer.accelerator.autocast():
        logprobs, _, _ = scores(trainer, trainer.model_wrapped, ids, torch.ones_like(ids), sampled.size(1))
    apart: torch.Tensor = (logprobs.float() - sampled)[0].abs()
    return apart
