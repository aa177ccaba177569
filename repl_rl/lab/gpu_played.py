"""What sessions of an engine came to, and how far that is from what the trainer makes of it."""

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
from repl_rl.engine.forbidden import forbid
from repl_rl.engine.options import Dtype
from repl_rl.trainer import TrainerConfig
from repl_rl.trainer.fast import Batch, FastPass
from repl_rl.trainer.likeness import Autocast
from repl_rl.trainer.loop import load_model

PROMPTS = tuple(tuple(range(5, 6 + 7 * i)) for i in range(8))
OBSERVED: Sequence[tuple[int, ...]] = ((), (7, 8), (300,), (), (11, 12, 13))
"""What a session observes before each of its chunks."""
STOPS = frozenset(range(0, 360, 12))
"""In the vocabulary of the bundled policy, too."""
CHUNK = 12
"""Tokens of a chunk, at most."""


@dataclass(frozen=True, slots=True)
class Played:
    """A session."""

    ids: tuple[int, ...]
    """The prompt's, then those that were sampled or observed."""
    prompt: int
    """How many of them are the prompt."""
    logprobs: tuple[float, ...]
    """Of the ids after it, nats; 0.0 where nothing was sampled."""


async def played(engine: Engine) -> list[Played]:
    """Sessions of different lengths, all at once, at temperature 1."""
    return await asyncio.gather(*(_session(engine, prompt) for prompt in PROMPTS))


async def _session(engine: Engine, prompt: Sequence[int]) -> Played:
    logprobs: list[float] = []
    async with engine.session(prompt, Sampling()) as session:
        for observed in OBSERVED:
            chunk = await session.sample(observed, max_tokens=CHUNK, stop_ids=STOPS)
            logprobs += [*(0.0 for _ in observed), *chunk.logprobs]
        return Played(tuple(session.ids), len(prompt), tuple(logprobs))


def scored(model: PreTrainedModel, rows: Sequence[Played], fast: FastPass) -> Tensor:
    """What the trainer's pass makes of sampled tokens: (B, T) log probabilities, nats, 0 elsewhere."""
    device = next(model.parameters()).device
    before = max(row.prompt for row in rows)
    after = max(len(row.logprobs) for row in rows)
    ids = torch.zeros(len(rows), before + after, dtype=torch.long)
    attention, sampled = torch.zeros_like(ids), torch.zeros(len(rows), after, dtype=torch.bool)
    for number, row in enumerate(rows):
        here = slice(before - row.prompt, before - row.prompt + len(row.ids))
        ids[number, here], attention[number, here] = torch.tensor(row.ids), 1
        sampled[number, : len(row.logprobs)] = torch.tensor([value != 0.0 for value in row.logprobs])
    learning = torch.ones(len(rows), dtype=torch.bool, device=device)
    batch = Batch(ids.to(device), attention.to(device), sampled.to(device), learning)
    return fast.first(model, batch, keep_graph=False).logprobs.cpu()


def apart(
    device: torch.device, folder: Path, rows: Sequence[Played], dtype: Dtype, never: frozenset[int] = frozenset()
) -> list[float]:
    """Nats between the sampler and the trainer's pass over the policy in `folder`, of each sampled token.

    `never`: ids that the sampler never gives.
    """
    low = dtype == "bfloat16"
    model = load_model(folder, TrainerConfig(dtype="bfloat16" if low else "float32")).to(device).eval()
    forbid(model, never)
    found = scored(model, rows, FastPass(model, autocast=computed_in(model, dtype)))
    return [
        abs(value - float(found[number, at]))
        for number, row in enumerate(rows)
        for at, value in enumerate(row.logprobs)
        if value != 0.0
    ]


def computed_in(model: PreTrainedModel, dtype: Dtype) -> Autocast:
    """What gives a forward pass its number format."""
    return partial(torch.autocast, model.device.type, torch.bfloat16) if dtype == "bfloat16" else nullcontext
