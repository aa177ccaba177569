"""The embedded engine against a plain forward."""

import asyncio
from pathlib import Path

import pytest

from repl_rl.engine import Sampling
from repl_rl.errors import EngineError
from tests.support.engine.tiny_models import Host, gap_to_torch, save_policy


def test_rows_of_different_length_have_the_logprobs_of_a_torch_forward(
    transformers_host: Host, policy_folder: Path
) -> None:
    assert gap_to_torch(transformers_host, policy_folder) < 1e-4


def test_loaded_weights_are_those_that_sample(transformers_host: Host, policy_folder: Path, other_folder: Path) -> None:
    transformers_host.run(transformers_host.engine.load_weights(other_folder, 1))
    try:
        assert gap_to_torch(transformers_host, other_folder) < 1e-4
        assert gap_to_torch(transformers_host, policy_folder) > 0.1
    finally:
        transformers_host.run(transformers_host.engine.load_weights(policy_folder, 0))


def test_weights_of_another_model_are_refused(transformers_host: Host, tmp_path: Path) -> None:
    tied = save_policy(tmp_path / "tied", seed=3, tied=True)
    with pytest.raises(EngineError, match="lm_head"):
        transformers_host.run(transformers_host.engine.load_weights(tied, 1))


def test_an_error_in_the_watch_reaches_its_caller_and_no_other(transformers_host: Host) -> None:
    async def sample(watch: bool) -> int:
        async with transformers_host.engine.session([5, 6], Sampling()) as session:
            broken = (lambda _id: 1 // 0 > 0) if watch else None
            return len((await session.sample((), max_tokens=30, stop_ids=frozenset(), watch=broken)).token_ids)

    async def work() -> tuple[int | BaseException, int | BaseException]:
        return await asyncio.gather(sample(True), sample(False), return_exceptions=True)

    broken, whole = transformers_host.run(work())
    assert isinstance(broken, ZeroDivisionError)
    assert whole == 30
