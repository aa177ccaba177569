"""One engine of each kind for all tests of engines: starting vLLM takes seconds."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from repl_rl.engine import ScriptedEngine, open_engine
from repl_rl.engine.restarting_engine import open_restarting_engine
from repl_rl.engine.scripted_engine import FaultyEngine, FaultyEngineSequence
from tests.support.engine.tiny_models import CONTEXT, VOCABULARY, Host, save_policy


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"), seed=0)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def vllm_host(policy_folder: Path) -> Iterator[Host]:
    host = Host(open_engine("vllm", model=policy_folder, max_sessions=128))
    yield host
    host.close()


@pytest.fixture(scope="session")
def transformers_host(policy_folder: Path) -> Iterator[Host]:
    host = Host(open_engine("transformers", model=policy_folder, max_sessions=128))
    yield host
    host.close()


@pytest.fixture(scope="session")
def lasting_host() -> Iterator[Host]:
    def policy(ids: Sequence[int]) -> tuple[int, ...]:
        return (hash(tuple(ids)) % VOCABULARY,)

    lives = FaultyEngineSequence(lambda: FaultyEngine((), policy=policy, context_tokens=CONTEXT), ())
    host = Host(open_restarting_engine(lives.open))
    yield host
    host.close()


@pytest.fixture(scope="session")
def scripted_host() -> Iterator[Host]:
    def policy(ids: Sequence[int]) -> tuple[int, ...]:
        return (hash(tuple(ids)) % VOCABULARY,)

    host = Host(open_engine("scripted", model="", policy=policy))
    assert isinstance(host.engine, ScriptedEngine)
    host.engine.context_tokens = CONTEXT
    yield host
    host.close()
