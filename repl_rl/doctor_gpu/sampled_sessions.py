"""Engine sessions for the GPU checks, and the gap between their log probabilities and the trainer's."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from repl_rl.engine import Engine, Sampling
from repl_rl.engine.config import Dtype
from repl_rl.models.lm_head import forbid_ids
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.logprobs import LogprobScorer, ScoringBatch
from repl_rl.trainer.plugins.prefix_sharing import Autocast
from repl_rl.trainer.train_loop import load_model

PROMPTS = tuple(tuple(range(5, 6 + 7 * i)) for i in range(8))
OBSERVED: Sequence[tuple[int, ...]] = ((), (7, 8), (300,), (), (11, 12, 13))
"""Observation before each chunk of a session."""
STOPS = frozenset(range(0, 360, 12))
"""Stop ids, which the vocabulary of the bundled policy has too."""
CHUNK = 12
"""Maximum number of tokens of a chunk."""


@dataclass(frozen=True, slots=True)
class Played:
    """Recorded session."""

    ids: tuple[int, ...]
    """Ids of the prompt, then those that were sampled or observed."""
    prompt: int
    """Length of the prompt."""
    logprobs: tuple[float, ...]
    """Log probabilities of the ids after the prompt, nats; 0.0 for observed ids."""


async def played(engine: Engine) -> list[Played]:
    """Play sessions of different lengths, all at once, at temperature 1."""
    return await asyncio.gather(*(_session(engine, prompt) for prompt in PROMPTS))


async def _session(engine: Engine, prompt: Sequence[int]) -> Played:
    logprobs: list[float] = []
    async with engine.session(prompt, Sampling()) as session:
        for observed in OBSERVED:
            chunk = await session.sample(observed, max_tokens=CHUNK, stop_ids=STOPS)
            logprobs += [*(0.0 for _ in observed), *chunk.logprobs]
        return Played(tuple(session.ids), len(prompt), tuple(logprobs))


def scored(model: PreTrainedModel, rows: Sequence[Played], fast: LogprobScorer) -> Tensor:
    """Return the trainer's log probabilities of sampled tokens, (B, T), nats, 0 elsewhere."""
    device = next(model.parameters()).device
    # Prompts are padded on the left and completions on the right, as in the trainer.
    before = max(row.prompt for row in rows)
    after = max(len(row.logprobs) for row in rows)
    ids = torch.zeros(len(rows), before + after, dtype=torch.long)
    attention, sampled = torch.zeros_like(ids), torch.zeros(len(rows), after, dtype=torch.bool)
    for number, row in enumerate(rows):
        here = slice(before - row.prompt, before - row.prompt + len(row.ids))
        ids[number, here], attention[number, here] = torch.tensor(row.ids), 1
        sampled[number, : len(row.logprobs)] = torch.tensor([value != 0.0 for value in row.logprobs])
    learning = torch.ones(len(rows), dtype=torch.bool, device=device)
    batch = ScoringBatch(ids.to(device), attention.to(device), sampled.to(device), learning)
    return fast.score_step(model, batch, keep_graph=False).logprobs.cpu()


def apart(
    device: torch.device, folder: Path, rows: Sequence[Played], dtype: Dtype, never: frozenset[int] = frozenset()
) -> list[float]:
    """Return the difference in nats between sampler and trainer, with the policy in `folder`, of each sampled token.

    `never`: forbidden ids of the sampler.
    """
    low = dtype == "bfloat16"
    model = load_model(folder, TrainerConfig(dtype="bfloat16" if low else "float32")).to(device).eval()
    forbid_ids(model, never)
    found = scored(model, rows, LogprobScorer(model, autocast=computed_in(model, dtype)))
    return [
        abs(value - float(found[number, at]))
        for number, row in enumerate(rows)
        for at, value in enumerate(row.logprobs)
        if value != 0.0
    ]


def computed_in(model: PreTrainedModel, dtype: Dtype) -> Autocast:
    """Return the autocast context that gives a forward pass its number format."""
    return partial(torch.autocast, model.device.type, torch.bfloat16) if dtype == "bfloat16" else nullcontext
