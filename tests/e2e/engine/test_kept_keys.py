"""Keys and values that are kept when weights change: sessions that have them go on from the old ones, nobody else."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, Qwen3ForCausalLM

from repl_rl.engine import Chunk, Engine, RequestMode, Transformers, Vllm, open_engine
from repl_rl.engine.conformance_checks import CHECKS, GREEDY, NONE, EngineCheck
from repl_rl.engine.vllm_engine import VllmEngine
from tests.support.engine.tiny_models import Host, bench, torch_logprobs

PROMPT = tuple(range(20, 100))
"""Longer than two blocks of vLLM's, so that sessions share them."""
OBSERVED = (11, 12, 13)
BLOCK = 32
"""Ids of a block of vLLM's: what requests a line find again are whole ones."""
KINDS = {
    "transformers": Transformers(),
    "vllm": Vllm(),
    "vllm, a request a line": Vllm(request_mode=RequestMode.REQUEST),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=pytest.mark.heavy) if kind.startswith("vllm") else kind for kind in KINDS],
)
def host(request: pytest.FixtureRequest, policy_folder: Path) -> Iterator[Host]:
    host = Host(open_engine(KINDS[request.param], model=policy_folder, max_sessions=128, kv_on_sync="keep"))
    yield host
    host.close()


def held(engine: Engine, ids: Sequence[int]) -> int:
    """Of how many of a session's ids it has keys and values; the last one is no input yet."""
    blocks = isinstance(engine, VllmEngine) and engine.request_mode is RequestMode.REQUEST
    return (len(ids) - 1) // BLOCK * BLOCK if blocks else len(ids) - 1


@torch.no_grad()
def mixed(old: Path, new: Path, ids: Sequence[int], kept: int) -> list[float]:
    """Log probabilities of all ids after the first `kept` + 1 from the new weights, on keys and values of the old ones
    for the first `kept`."""
    models = [Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (old, new)]
    cache = DynamicCache()
    models[0](torch.tensor([ids[:kept]]), past_key_values=cache)
    logits = models[1](torch.tensor([ids[kept:-1]]), past_key_values=cache).logits[0]
    logprobs: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(ids[kept + 1 :])[:, None])[:, 0].tolist()
    return logprobs


def gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Largest difference, nats."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_an_open_session_goes_on_from_the_keys_of_the_old_weights_and_others_never_see_them(
    host: Host, policy_folder: Path, other_folder: Path
) -> None:
    step = host.engine.policy_step

    async def begun() -> Chunk:
        async with host.engine.session(PROMPT, GREEDY) as session:
            return await session.sample((), max_tokens=40, stop_ids=NONE)

    async def work() -> tuple[list[int], list[Chunk], Chunk]:
        await host.engine.load_weights(policy_folder, step)
        async with host.engine.session(PROMPT, GREEDY) as session:
            chunks = [await session.sample((), max_tokens=40, stop_ids=NONE)]
            before = list(session.ids)
            await host.engine.load_weights(other_folder, step + 1)
            for _ in range(2):
                chunks.append(await session.sample(OBSERVED, max_tokens=8, stop_ids=NONE))
        return before, chunks, await begun()

    before, (first, *kept), fresh = host.run(work())
    assert [chunk.policy_step for chunk in (first, *kept, fresh)] == [step, step, step, step + 1]
    after = [i for chunk in kept for i in (*OBSERVED, *chunk.token_ids)]
    found = [logprob for chunk in kept for logprob in chunk.logprobs]
    sampled = [number for number in range(len(after)) if number % 11 >= len(OBSERVED)]
    expected = mixed(policy_folder, other_folder, [*before, *after], held(host.engine, before))[-len(after) :]
    of_new = torch_logprobs(other_folder, [*before, *after])[-len(after) :].tolist()
    assert gap(found, [expected[number] for number in sampled]) < 1e-3
    assert gap(found, [of_new[number] for number in sampled]) > 0.1
    alone = torch_logprobs(other_folder, [*PROMPT, *fresh.token_ids])[len(PROMPT) - 1 :].tolist()
    assert gap(fresh.logprobs, alone) < 1e-3


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_an_engine_that_keeps_them_keeps_its_promises_too(host: Host, check: EngineCheck, policy_folder: Path) -> None:
    async def work() -> None:
        await host.engine.load_weights(policy_folder, host.engine.policy_step)
        await check(host.engine, bench(policy_folder, keeps=True))

    host.run(work())


def test_sessions_work_with_a_salted_cache_so_that_nothing_falls_back(host: Host) -> None:
    assert host.engine.fallback_reason is None
