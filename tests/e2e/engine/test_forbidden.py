"""Engines that forbid ids sample one renormalised policy, whatever drives them and whatever weights they load."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM

from repl_rl.engine import RequestMode, Sampling, ScriptedEngine, open_engine
from repl_rl.engine.conformance_checks import (
    EngineCheck,
    a_continued_session_equals_a_fresh_one,
    a_watch_ends_the_chunk_after_its_id,
    every_id_has_one_finite_logprob,
    forbidden_ids_are_never_sampled,
    weights_are_replaced_between_two_calls,
)
from repl_rl.engine.vllm_engine import VllmEngine
from repl_rl.errors import ConfigError, EngineError
from tests.support.engine.tiny_models import (
    CONTEXT,
    FORBIDDEN,
    VOCABULARY,
    Host,
    bench,
    gap_to_torch,
    rollout,
    save_policy,
)

KINDS = ("scripted", "transformers", pytest.param("vllm", marks=pytest.mark.heavy))
CHECKS = (
    forbidden_ids_are_never_sampled,
    every_id_has_one_finite_logprob,
    a_continued_session_equals_a_fresh_one,
    a_watch_ends_the_chunk_after_its_id,
    weights_are_replaced_between_two_calls,
)


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As in small models: the output layer is the input embedding, so that a weight load has to pack it anew."""
    return save_policy(tmp_path_factory.mktemp("tied"), seed=0, tied=True)


@pytest.fixture(scope="module", params=KINDS)
def host(request: pytest.FixtureRequest, tied_folder: Path) -> Iterator[Host]:
    def policy(ids: Sequence[int]) -> tuple[int, ...]:
        allowed = sorted(set(range(VOCABULARY)) - FORBIDDEN)
        return (allowed[hash(tuple(ids)) % len(allowed)],)

    written = policy if request.param == "scripted" else None
    opened = Host(
        open_engine(request.param, model=tied_folder, max_sessions=32, policy=written, forbidden_ids=FORBIDDEN)
    )
    if isinstance(opened.engine, ScriptedEngine):
        opened.engine.context_tokens = CONTEXT
    yield opened
    opened.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_an_engine_that_forbids_keeps_its_promises(host: Host, check: EngineCheck, tied_folder: Path) -> None:
    async def work() -> None:
        await check(host.engine, bench(tied_folder))

    assert host.engine.forbidden_ids == FORBIDDEN
    host.run(work())


def test_logprobs_are_those_of_the_renormalised_policy_also_after_a_load(
    host: Host, tied_folder: Path, tmp_path: Path
) -> None:
    if host.engine.name == "scripted":
        return  # its log probabilities are made up
    assert gap_to_torch(host, tied_folder) < 1e-4
    after = save_policy(tmp_path / "after", seed=1, tied=True)
    host.run(host.engine.load_weights(after, 1))
    try:
        assert gap_to_torch(host, after) < 1e-4
    finally:
        host.run(host.engine.load_weights(tied_folder, 0))


def test_sessions_and_requests_a_line_give_the_same_greedy_ids_without_forbidden_ones(host: Host) -> None:
    engine = host.engine
    if not isinstance(engine, VllmEngine):
        return  # the others know one drive

    async def play() -> list[list[int]]:
        prompts = [(5, i + 1) for i in range(16)]
        return [ids for ids, _ in await asyncio.gather(*(rollout(engine, Sampling(0.0), p) for p in prompts))]

    streamed = host.run(play())
    engine.set_request_mode(RequestMode.REQUEST)
    try:
        assert host.run(play()) == streamed
    finally:
        engine.set_request_mode(RequestMode.SESSION)
    assert engine.fallback_reason is None


def test_a_policy_of_the_scripted_engine_that_writes_a_forbidden_id_is_an_error_that_names_it() -> None:
    async def work() -> None:
        engine = ScriptedEngine([(3, 4, 5)], forbidden_ids=frozenset({4}))
        async with engine.session((1,), Sampling()) as session:
            await session.sample((4,), max_tokens=1, stop_ids=frozenset())
            await session.sample((), max_tokens=2, stop_ids=frozenset())

    with pytest.raises(EngineError, match=r"was to sample 4, a forbidden id; .*Renderer\.encode_as_sampled"):
        asyncio.run(work())


def test_a_model_that_cannot_forbid_is_refused_in_one_line(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GemmaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=30.0,
    )  # fmt: skip
    GemmaForCausalLM(config).save_pretrained(tmp_path)

    async def work() -> None:
        async with open_engine("transformers", model=tmp_path, forbidden_ids=frozenset({3})):
            pass

    with pytest.raises(ConfigError, match=r"final_logit_softcapping is 30\.0; .*--newline-tokens carry"):
        asyncio.run(work())
