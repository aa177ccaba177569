"""TRL's fine-tuning with a second loss beside it: on what the console printed (ActObs, arXiv 2609.20715).

Both losses come of one forward pass. Each is a mean over its own tokens of the whole batch, on all processes and in all
passes, so that the one on the policy's lines is what it is without the other.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from repl_rl.coldstart.kept import KeptTrainer

IGNORED = -100
"""The label of a token that is context and not learned."""
OBSERVED = "observed"
"""Column of an example: its ids where the console's words are learned, else `IGNORED`."""
LOSS = "observation_loss"
"""In TRL's log: nats a token that the console printed."""


class Collator(DataCollatorForLanguageModeling):
    """As TRL's, with `OBSERVED` padded as labels are."""

    def torch_call(self, examples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = super().torch_call(examples)
        rows = [torch.tensor(example[OBSERVED]) for example in examples]
        batch[OBSERVED] = pad_sequence(rows, batch_first=True, padding_value=IGNORED)
        return batch


class _Both:
    """The model, scored on the policy's lines and the console's words at once; TRL is shown the former alone."""

    def __init__(self, model: PreTrainedModel, observed: Tensor) -> None:
        self._model = model
        self._observed = observed
        self.nats: Tensor
        """Sum of the negative log probabilities of the console's words."""

    def __call__(self, *, labels: Tensor, **inputs: object) -> object:
        console = self._observed != IGNORED
        outputs = self._model(labels=torch.where(console, self._observed, labels), **inputs)
        # What a position predicts is the next one.
        console = console[:, 1:]
        self.nats = -torch.where(console, outputs.log_probs, 0.0).sum()
        for name in ("log_probs", "entropy", "is_top1", "label_mask"):
            setattr(outputs, name, getattr(outputs, name).masked_fill(console, 0))
        return outputs


class ObservingTrainer(KeptTrainer):
    """Set `observation_weight`, above 0, before training; examples have the column `OBSERVED`."""

    observation_weight = 0.0
    _signature_columns: list[str]
    _observed_tokens = 0

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns: list[str] = self._signature_columns
        if OBSERVED not in columns:
            columns.append(OBSERVED)

    def _get_num_items_in_batch(
        self, batch_samples: Sequence[Mapping[str, Tensor]], device: torch.device
    ) -> Tensor | int | None:
        here = sum(int((batch[OBSERVED][:, 1:] != IGNORED).sum()) for batch in batch_samples)
        self._observed_tokens = int(self.accelerator.gather(torch.tensor(here, device=device)).sum())
        items: Tensor | int | None = super()._get_num_items_in_batch(batch_samples, device)
        return items

    def compute_loss(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """As TRL's, and the console's."""
        both = _Both(model, inputs.pop(OBSERVED))
        loss: Tensor = super().compute_loss(both, inputs, num_items_in_batch=num_items_in_batch)
        mean = both.nats / max(self._observed_tokens, 1)
        told = float(self.accelerator.gather(mean.detach()).sum())
        # TRL's log takes the mean over the passes of a step, and this is a part of their sum.
        self._metrics["train"][LOSS].append(told * self.current_gradient_accumulation_steps)
        # Gradients are averaged over processes.
        weight: float = self.observation_weight * self.accelerator.num_processes
        return loss + weight * mean
