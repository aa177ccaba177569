"""Every engine keeps every promise of the seam."""

from pathlib import Path

import pytest

from repl_rl.engine.conformance_checks import CHECKS, EngineCheck
from tests.support.engine.tiny_models import Host, bench

KINDS = ("scripted", "lasting", "transformers", "vllm")
"""`lasting` is a mortal scripted engine that is opened again where it dies."""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_conformance(kind: str, check: EngineCheck, request: pytest.FixtureRequest, policy_folder: Path) -> None:
    host: Host = request.getfixturevalue(f"{kind}_host")

    async def work() -> None:
        await check(host.engine, bench(policy_folder))

    host.run(work())
