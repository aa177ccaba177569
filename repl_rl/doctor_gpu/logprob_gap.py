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
from repl_rl.models.transform_logits import forbid_ids
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.load_policy import load_model
from repl_rl.trainer.logprobs import LogprobScorer, ScoringBatch
from repl_rl.trainer.plugins.prefix_sharing import Autocast

PROMPTS = tuple(tuple(range(5, 6 + 7 * i)) for i in range(8))
OBSERVED: Sequence[tuple[int, ...]] = ((), (7, 8), (300,), (), (11, 12, 13))
"""Observation before each chunk of a session."""
STOPS = frozenset(range(0, 360, 12))
"""Stop ids, which the vocabulary of the bundled policy has too."""
CHUNK = 12
"""Maximum number of tokens of a chunk."""


@dataclass(frozen=True, slots=True)
class SampledSession:
    """Recorded session."""

    ids: tuple[int, ...]
    """Ids of the prompt, then those that were sampled or observed."""
    prompt: int
    """Length of the prompt."""
    logprobs: tuple[float, ...]
    """Log probabilities of the ids after the prompt, nats; 0.0 for observed ids."""


async def sample_sessions(engine: Engine) -> list[SampledSession]:
    """Play sessions of different lengths, all at once, at temperature 1."""
    return await asyncio.gather(*(_session(engine, prompt) for prompt in PROMPTS))


async def _session(engine: Engine, prompt: Sequence[int]) -> SampledSession:
    logprobs: list[float] = []
    async with engine.session(prompt, Sampling()) as session:
        for observed in OBSERVED:
            chunk = await session.sample(observed, max_tokens=CHUNK, stop_ids=STOPS)
            logprobs += [*(0.0 for _ in observed), *chunk.logprobs]
        return SampledSession(tuple(session.ids), len(prompt), tuple(logprobs))


def compute_logprobs(model: PreTrainedModel, rows: Sequence[SampledSession], scorer: LogprobScorer) -> Tensor:
    """Return the trainer's log probabilities of sampled tokens, (B, T), nats, 0 elsewhere."""
    device = next(model.parameters()).device
    # Prompts are padded on the left and completions on the right, as in the trainer.
    prompt_length = max(row.prompt for row in rows)
    completion_length = max(len(row.logprobs) for row in rows)
    ids = torch.zeros(len(rows), prompt_length + completion_length, dtype=torch.long)
    attention, is_sampled = torch.zeros_like(ids), torch.zeros(len(rows), completion_length, dtype=torch.bool)
    for number, row in enumerate(rows):
        columns = slice(prompt_length - row.prompt, prompt_length - row.prompt + len(row.ids))
        ids[number, columns], attention[number, columns] = torch.tensor(row.ids), 1
        is_sampled[number, : len(row.logprobs)] = torch.tensor([value != 0.0 for value in row.logprobs])
    learning = torch.ones(len(rows), dtype=torch.bool, device=device)
    batch = ScoringBatch(ids.to(device), attention.to(device), is_sampled.to(device), learning)
    return scorer.score_step(model, batch, keep_graph=False).logprobs.cpu()


def compute_gaps(
    device: torch.device,
    folder: Path,
    rows: Sequence[SampledSession],
    dtype: Dtype,
    forbidden_ids: frozenset[int] = frozenset(),
) -> list[float]:
    """Return the difference in nats between sampler and trainer, with the policy in `folder`, of each sampled token.

    `forbidden_ids`: ids that the sampler never samples.
    """
    is_bfloat16 = dtype == "bfloat16"
    model = load_model(folder, TrainerConfig(dtype="bfloat16" if is_bfloat16 else "float32")).to(device).eval()
    forbid_ids(model, forbidden_ids)
    logprobs = compute_logprobs(model, rows, LogprobScorer(model, autocast=make_autocast(model, dtype)))
    return [
        abs(value - float(logprobs[number, position]))
        for number, row in enumerate(rows)
        for position, value in enumerate(row.logprobs)
        if value != 0.0
    ]


def make_autocast(model: PreTrainedModel, dtype: Dtype) -> Autocast:
    """Return the autocast context that gives a forward pass its number format."""
    return partial(torch.autocast, model.device.type, torch.bfloat16) if dtype == "bfloat16" else nullcontext
