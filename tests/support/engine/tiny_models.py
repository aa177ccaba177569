"""Tiny random policies and a loop in a thread, for tests of engines."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeVar

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from repl_rl.engine import Engine, Sampling
from repl_rl.engine.conformance_checks import EngineFixture

T = TypeVar("T")
VOCABULARY = 384
CONTEXT = 256
STOPS = frozenset(range(0, VOCABULARY, 12))
"""One id in twelve."""
FORBIDDEN = frozenset(range(1, VOCABULARY, 3))
"""One id in three: a policy that is free to sample them would do so soon."""


def save_policy(folder: Path, *, seed: int, tied: bool = False) -> Path:
    """A random Qwen3 of 2 layers; weights large enough that greedy choices have no ties."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        initializer_range=0.15,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


def torch_logprobs(folder: Path, ids: Sequence[int], forbidden_ids: frozenset[int] = frozenset()) -> torch.Tensor:
    """(T - 1,) log probability of each id after the first, by a plain forward, renormalised over the ids allowed."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0, :-1]
        logits[:, sorted(forbidden_ids)] = -torch.inf
        rows = torch.log_softmax(logits, dim=-1)
    return rows.gather(1, torch.tensor(list(ids[1:])).unsqueeze(1)).squeeze(1)


def bench(folder: Path, *, keeps: bool = False) -> EngineFixture:
    """Ids for the conformance suite."""
    return EngineFixture(
        prompt=(5, 9, 300, 7), observed=(11, 12, 13), stop_ids=STOPS, weights=folder, keeps_kv_on_sync=keeps
    )


class Host:
    """An engine that lives in an event loop in a background thread, as it does beside a trainer."""

    def __init__(self, opening: AbstractAsyncContextManager[Engine]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._opening = opening
        self.engine = self.run(opening.__aenter__())

    def run(self, work: Coroutine[object, object, T], timeout_s: float = 280.0) -> T:
        """Run `work` in the engine's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def close(self) -> None:
        """Close the engine and its loop."""
        self.run(self._opening.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


async def rollout(engine: Engine, sampling: Sampling, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
    """Ids of a session of 5 chunks, and log probabilities of the ids after the prompt; 0.0 where observed."""
    logprobs: list[float] = []
    async with engine.session(prompt, sampling) as session:
        for observed in ((), (7, 8), (300,), (), (11, 12, 13)):
            chunk = await session.sample(observed, max_tokens=12, stop_ids=STOPS)
            logprobs += [*(0.0 for _ in observed), *chunk.logprobs]
        return list(session.ids), logprobs


def gap_to_torch(host: Host, folder: Path) -> float:
    """Largest difference in nats between an engine and a plain forward, over 8 rollouts of different length."""
    prompts = [range(5, 6 + 7 * i) for i in range(8)]

    async def work() -> list[tuple[list[int], list[float]]]:
        return await asyncio.gather(*(rollout(host.engine, Sampling(), prompt) for prompt in prompts))

    gap = 0.0
    for prompt, (ids, logprobs) in zip(prompts, host.run(work()), strict=True):
        expected = torch_logprobs(folder, ids, host.engine.forbidden_ids)[len(prompt) - 1 :].tolist()
        gap = max(gap, *(abs(p - q) for p, q in zip(logprobs, expected, strict=True) if p != 0.0))
    return gap
