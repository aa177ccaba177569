"""Models with convolution and recurrent states on the transformers engine: no state ever holds another session's ids,
padding, ids that were taken back, or the work of older weights.

All is held against transformers' own cache, or a plain forward pass, of one row alone.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.models.families import CONTEXT
from benchmarks.models.zoo import EOS, ZOO
from repl_rl.engine import Engine, Sampling, open_engine
from repl_rl.engine.config import KvOnSync
from repl_rl.engine.conformance_checks import CHECKS, GREEDY, NONE, EngineCheck
from repl_rl.engine.transformers_engine import Decoder, DecodeRow
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.synchronous_rollouts import SyncRollouts
from repl_rl.rollout_config import RolloutConfig
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.forward_pass import (
    BatchLayout,
    build_row_passes,
    can_pack_rows,
    compute_logprobs,
    install_scoring_forward,
)
from repl_rl.trainer.train import train
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.engine.tiny_models import Host, bench, rollout

Made = Callable[[str], Path]
FAMILIES = (
    "Qwen3-Next",
    "Qwen3.5, text",
    "Qwen3.5, composite",
    "Granite hybrid",
    "Falcon-H1",
    "Mamba 2",
    "LFM2",
    "Nemotron-H",
    "Jamba",
)
EACH_COMMIT = {"Qwen3.5, text", "Mamba 2", "LFM2"}
"""One family for each kind of state: of a delta rule next to attention, of a state space, of a convolution."""
OTHER_SEED = 7
OBSERVED = (11, 12, 13, 14, 15)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in EACH_COMMIT else pytest.mark.heavy) for name in FAMILIES],
)
def name(request: pytest.FixtureRequest) -> str:
    family: str = request.param
    return family


@pytest.fixture(scope="module")
def folder(name: str, made: Made) -> Path:
    return made(name)


@pytest.fixture(scope="module")
def other(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    family = next(family for family in ZOO if family.name == name)
    return family.write(tmp_path_factory.mktemp("other") / "model", seed=OTHER_SEED)


def opened(folder: Path, kv_on_sync: KvOnSync = "drop") -> Host:
    opening = open_engine("transformers", model=folder, context_tokens=CONTEXT, max_sessions=128, kv_on_sync=kv_on_sync)
    return Host(opening)


@pytest.fixture(scope="module")
def host(folder: Path) -> Iterator[Host]:
    host = opened(folder)
    yield host
    host.close()


def plain(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model


def drawn(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(i) for i in torch.randint(0, EOS, (count,), generator=generator)]


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """(T - 1,) of each id after the first, by a forward of this row alone, without a cache."""
    logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0, :-1]
    logprobs: Tensor = logits.log_softmax(-1).gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0]
    return logprobs


def feed(model: PreTrainedModel, ids: Sequence[int], cache: DynamicCache) -> Tensor:
    """Logits (T, V), one id at a time, which continues every model's states."""
    named = "cache_params" if "Mamba" in type(model).__name__ else "past_key_values"
    with torch.no_grad():
        rows = [model(torch.tensor([[i]]), use_cache=True, **{named: cache}).logits[0, -1] for i in ids]
    return torch.stack(rows)


PROMISES = tuple(
    check
    for check in CHECKS
    if check.__name__
    in {
        "a_continued_session_equals_a_fresh_one",
        "a_watch_ends_the_chunk_after_its_id",
        "a_call_taken_back_leaves_no_trace",
        "many_sessions_do_not_disturb_each_other",
        "a_cancelled_session_frees_the_engine",
        "weights_are_replaced_between_two_calls",
    }
)
"""Those that a state could break."""


@pytest.mark.parametrize("check", PROMISES, ids=lambda check: check.__name__)
def test_an_engine_with_states_keeps_the_promises_of_every_engine(check: EngineCheck, host: Host, folder: Path) -> None:
    assert len(PROMISES) == 6

    async def work() -> None:
        await check(host.engine, replace(bench(folder), concurrent_sessions=16))

    host.run(work())


async def several(engine: Engine, at_once: int) -> list[tuple[list[int], list[float]]]:
    """Seeded sessions whose prompts, chunks and observed ids differ in length, so many of them at a time."""
    places = asyncio.Semaphore(at_once)

    async def one(number: int) -> tuple[list[int], list[float]]:
        async with places:
            return await rollout(engine, Sampling(seed=number), drawn(3 + 5 * number, number))

    return await asyncio.gather(*(one(number) for number in range(6)))


def test_sessions_of_different_length_have_the_logprobs_that_each_has_alone(host: Host, folder: Path) -> None:
    alone, together = (host.run(several(host.engine, at_once)) for at_once in (1, 4))
    assert [ids for ids, _ in alone] == [ids for ids, _ in together]
    model = plain(folder)
    for number, ((ids, one), (_, other)) in enumerate(zip(alone, together, strict=True)):
        torch.testing.assert_close(torch.tensor(other), torch.tensor(one), atol=1e-4, rtol=0)
        expected = logprobs_of(model, ids)[2 + 5 * number :]
        sampled = torch.tensor(other) != 0
        torch.testing.assert_close(torch.tensor(other)[sampled], expected[sampled], atol=1e-4, rtol=0)


def test_no_padding_enters_a_state_whatever_else_is_fed_in_the_same_step(folder: Path) -> None:
    """Sessions with 1, 3 and 11 new ids step together; their states are those of transformers' cache alone."""
    decoder = Decoder(folder, "float32", 0)
    texts = [drawn(40, seed) for seed in range(3)]
    rows = [DecodeRow(decoder.kv_cache.allocate_slot(), [], 0, 0.0, None) for _ in texts]
    for round_ in range(4):
        for number, (row, text, count) in enumerate(zip(rows, texts, (1, 3, 11), strict=True)):
            row.computed = len(row.ids)
            row.ids.extend(text[len(row.ids) : len(row.ids) + (count if round_ % 2 else count + number)])
        decoder.step(rows)
    model = plain(folder)
    states = decoder.kv_cache._states
    for row in rows:
        cache = DynamicCache(config=model.config)
        feed(model, row.ids, cache)
        compared = 0
        for (layer, part, state), store in states._stores.items():
            theirs = getattr(cache.layers[layer], part)[state][0]
            torch.testing.assert_close(store[row.slot], theirs, atol=1e-4, rtol=1e-4)
            compared += 1
        assert compared


def test_a_session_whose_state_was_dropped_at_a_weight_sync_is_fed_again(host: Host, folder: Path, other: Path) -> None:
    async def work() -> tuple[list[int], list[int], list[float]]:
        await host.engine.load_weights(folder, 0)
        try:
            async with host.engine.session(drawn(20, 1), GREEDY) as session:
                await session.sample((), max_tokens=9, stop_ids=NONE)
                await session.sample(OBSERVED, max_tokens=9, stop_ids=NONE)
                await host.engine.load_weights(other, 1)
                chunk = await session.sample(OBSERVED, max_tokens=12, stop_ids=NONE)
                assert chunk.policy_step == 1
                return list(session.ids), list(chunk.token_ids), list(chunk.logprobs)
        finally:
            await host.engine.load_weights(folder, 0)

    ids, sampled, logprobs = host.run(work())
    found = torch.tensor(logprobs)
    torch.testing.assert_close(found, logprobs_of(plain(other), ids)[-len(sampled) :], atol=1e-4, rtol=0)
    assert (found - logprobs_of(plain(folder), ids)[-len(sampled) :]).abs().max() > 0.01


def test_a_session_whose_state_is_kept_at_a_weight_sync_goes_on_from_it(folder: Path, other: Path) -> None:
    keeping = opened(folder, "keep")

    async def work() -> tuple[int, list[int], list[float]]:
        async with keeping.engine.session(drawn(20, 1), GREEDY) as session:
            await session.sample((), max_tokens=9, stop_ids=NONE)
            held = len(session.ids) - 1
            await keeping.engine.load_weights(other, 1)
            chunk = await session.sample(OBSERVED, max_tokens=12, stop_ids=NONE)
            assert chunk.policy_step == 0, "its oldest states are of the old weights"
            return held, list(session.ids), list(chunk.logprobs)

    try:
        held, ids, logprobs = keeping.run(work())
    finally:
        keeping.close()
    old, new = plain(folder), plain(other)
    cache = DynamicCache(config=old.config)
    feed(old, ids[:held], cache)
    logits = feed(new, ids[held:-1], cache)
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[held + 1 :])[:, None])[-len(logprobs) :, 0]
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
    assert (torch.tensor(logprobs) - logprobs_of(new, ids)[-len(logprobs) :]).abs().max() > 1e-3


def graded(model: PreTrainedModel, ids: Tensor, attention: Tensor, sampled: Tensor, tokens: int) -> list[Tensor]:
    """Log probabilities of rows that share a pass up to so many tokens, and the gradient of their sum."""
    model.zero_grad()
    layout = BatchLayout.from_batch(ids, attention, sampled)
    scores = compute_logprobs(model, layout, build_row_passes(layout, torch.arange(len(ids)), tokens))
    torch.autograd.backward([scores.logprobs.sum()])
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [scores.logprobs.detach(), *gradients]


def test_the_update_scores_padded_rows_as_each_alone_whatever_the_padding_is(folder: Path) -> None:
    model = plain(folder).train()
    install_scoring_forward(model)
    lengths = [(9, 31), (17, 8), (4, 20)]
    before, after = (max(column) for column in zip(*lengths, strict=True))
    attention = torch.zeros(len(lengths), before + after, dtype=torch.long)
    for row, (prompt, completion) in enumerate(lengths):
        attention[row, before - prompt : before + completion] = 1
    sampled = attention[:, before:].bool()
    text = torch.tensor([drawn(before + after, seed) for seed in range(len(lengths))])
    alone, *padded = [
        graded(model, torch.where(attention.bool(), text, filling), attention, sampled, tokens)
        for filling, tokens in ((EOS, 1), (EOS, 999), (3, 999))
    ]
    for found in padded:
        for one, two in zip(alone, found, strict=True):
            torch.testing.assert_close(two, one, atol=2e-5, rtol=1e-3)


def test_rows_are_never_laid_end_to_end_where_a_state_would_run_from_one_into_the_next(folder: Path) -> None:
    model = plain(folder)
    model.config._attn_implementation_internal = "flash_attention_2"
    assert not can_pack_rows(model)


def world(folder: Path, concurrency: int) -> RolloutConfig:
    return RolloutConfig(
        model=str(folder),
        engine="transformers",
        sandbox="unsafe",
        context_tokens=CONTEXT,
        concurrency=concurrency,
        rollout=RolloutLimits(max_lines=4, max_line_tokens=24),
    )


def played(folder: Path, concurrency: int) -> Sequence[Trajectory]:
    """Rollouts in real consoles."""
    chosen = world(folder, concurrency)
    tasks = {task.id: task for task in chosen.draw_tasks(count=4)}
    with SyncRollouts(partial(chosen.open_rollouts, 0), tasks) as source:
        return source.collect([id for id in tasks for _ in range(2)], 0)


def test_rollouts_with_lines_of_different_length_are_the_same_four_at_a_time_as_one_at_a_time(folder: Path) -> None:
    alone, together = played(folder, 1), played(folder, 4)
    lengths = [len(line.token_ids) for t in together for line in t.lines]
    assert len(set(lengths)) > 3
    for one, other in zip(alone, together, strict=True):
        assert [line.token_ids for line in one.lines] == [line.token_ids for line in other.lines]
        for a, b in zip(one.lines, other.lines, strict=True):
            torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-4, rtol=0)


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["Qwen3.5, text", "Falcon-H1", "Mamba 2", "LFM2"])
@pytest.mark.parametrize("change", ["fast = false", "lora_rank", "checkpointing"])
def test_such_a_model_trains_with_other_settings_of_the_update(
    family: str, change: str, made: Made, tmp_path: Path
) -> None:
    """`fast = false` pads prompts on the left, with a mask."""
    config = TrainerConfig(steps=2, prompts_per_step=2, group_size=2, warmup_steps=0)
    config = {
        "fast = false": replace(config, fast_logprobs=False),
        "lora_rank": replace(config, lora_rank=4),
        "checkpointing": replace(config, gradient_checkpointing=True),
    }[change]
    gaps: list[float] = []
    train(
        world(made(family), 4), config, out=tmp_path / "run", train_tasks=4,
        on_step=lambda record, _: gaps.append(record.metrics["logprob_gap_max"]),
    )  # fmt: skip
    assert len(gaps) == 2
    assert max(gaps) <= 1e-3
