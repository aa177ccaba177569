"""The world of a run with real consoles."""

import asyncio

from repl_rl.rollout_config import RolloutConfig
from repl_rl.sandbox import Limits


def test_consoles_have_the_limits_and_the_preloads_of_their_world() -> None:
    world = RolloutConfig(sandbox="unsafe", preload="json, colorsys", limits=Limits(output_bytes=256))

    async def work() -> tuple[str, str]:
        async with world.open_consoles(warm=1) as sandbox, sandbox.session() as console:
            loaded = await console.push("import sys; 'colorsys' in sys.modules")
            return loaded.text, (await console.push("print('a' * 1000)")).text

    loaded, flood = asyncio.run(work())
    assert loaded == "True\n"
    assert len(flood) < 400
