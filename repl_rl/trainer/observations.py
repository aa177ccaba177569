"""What the console printed as a teacher: an auxiliary loss that predicts it.

ECHO (arXiv 2605.24517): beside the loss on what the policy sampled stands `weight` times the mean negative log
probability of what the environment answered. The rollouts are there and have passed through the model anyway, and a
rollout that failed teaches as much as one that solved its task.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from repl_rl.record.printed import printed
from repl_rl.record.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Observations:
    """The tokens of a step that its console taught."""

    mask: Tensor
    """This process's, (B, T) bool: see `printed`; False throughout for a rollout that may not be trained on."""
    tokens: int
    """Over all processes."""

    @classmethod
    def of(
        cls, learned: Sequence[Trajectory], width: int, forbidden_ids: frozenset[int], accelerator: Accelerator
    ) -> "Observations":
        """Those of the rollouts of a step, padded to `width` tokens; all processes call this together."""
        mask = torch.zeros(len(learned), width, dtype=torch.bool)
        for row, trajectory in zip(mask, learned, strict=True):
            if trajectory.trainable:
                told = printed(trajectory, forbidden_ids)
                row[: len(told)] = torch.tensor(told, dtype=torch.bool)
        mask = mask.to(accelerator.device)
        return cls(mask, int(accelerator.gather(mask.sum()).sum()))

    @classmethod
    def none(cls, rows: int, width: int, device: torch.device) -> "Observations":
        """Those of a training that learns none."""
        return cls(torch.zeros(rows, width, dtype=torch.bool, device=device), 0)

    def nats(self, logprobs: Tensor, rows: Tensor | None = None) -> Tensor:
        """Sum of the negative log probabilities of these tokens in `rows` of the step, a number.

        Args:
            logprobs: (b, T), nats, of those rows.
            rows: indices into the step; None: all of it.
        """
        mask = self.mask if rows is None else self.mask[rows]
        # Chosen, not multiplied: a forbidden id among the others has a log probability of -1e30.
        return -torch.where(mask, logprobs, 0.0).sum()

    def metrics(self, logprobs: Tensor, accelerator: Accelerator) -> dict[str, float]:
        """Names as in `metrics.jsonl`, over all processes, which call this together. `logprobs`: the whole step's."""
        nats = float(accelerator.gather(self.nats(logprobs.detach().double())).sum())
        return {"observation_loss": nats / max(self.tokens, 1), "observation_tokens": float(self.tokens)}
