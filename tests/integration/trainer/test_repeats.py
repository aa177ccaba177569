"""What a resumed run's rollouts rest on: an engine that draws the same again, whatever it did before."""

import asyncio
from pathlib import Path

from repl_rl.engine import Chunk, Engine, Sampling, open_engine
from tests.support.tokenizers import merged_tokenizer
from tests.support.trainer.tiny_policies import tiny_model

NEVER = frozenset[int]()


async def drawn(engine: Engine, seed: int, calls: int = 3) -> list[Chunk]:
    """A session of several calls, each with observed ids before it."""
    async with engine.session(tuple(range(5, 12)), Sampling(temperature=1.0, seed=seed)) as session:
        return [await session.sample((7, 8, 9)[:n], max_tokens=8, stop_ids=NEVER) for n in range(calls)]


def test_one_session_at_a_time_is_the_same_whatever_the_engine_did_before(tmp_path: Path) -> None:
    tokenizer = merged_tokenizer()
    tiny_model(vocab=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    async def work(before: int) -> list[Chunk]:
        async with open_engine("transformers", model=tmp_path, max_sessions=32) as engine:
            await asyncio.gather(*(drawn(engine, seed=100 + n, calls=20 - n) for n in range(before)))
            return await drawn(engine, seed=3)

    fresh = asyncio.run(work(0))
    assert all(chunk.logprobs for chunk in fresh)
    assert fresh == asyncio.run(work(12)), "its arena has grown, and other slots are free"
