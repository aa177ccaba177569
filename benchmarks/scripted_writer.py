"""A policy that costs nothing: the scripted engine, which writes lines of its own choice into any rollout."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar

from repl_rl.engine import Engine, EngineConfig, EngineOptions, ScriptedEngine
from repl_rl.rollout.token_renderer import Renderer

LINES = (
    "x = 37 * 4\n",
    "x + 12\n",
    "1 / 0\n",
    "for i in range(3):\n",
    "    print(i)\n",
    "\n",
    "submit_final_answer(160)\n",
)


@dataclass(frozen=True, slots=True)
class Writer(EngineConfig):
    """The scripted engine: it writes `LINES`, in an order that the ids before them decide."""

    kind: ClassVar[str] = "scripted"
    about: ClassVar[str] = "the public fake, which writes the lines of a soak"

    @asynccontextmanager
    async def open(self, opening: EngineOptions) -> AsyncIterator[Engine]:
        """See `EngineConfig.open`."""
        renderer = Renderer.from_folder(opening.folder)
        written = [renderer.encode_as_sampled(line) for line in LINES]

        def policy(ids: Sequence[int]) -> Sequence[int]:
            return written[(7 * len(ids) + ids[-1]) % len(written)]

        yield ScriptedEngine.from_policy(policy, forbidden_ids=opening.forbidden_ids)
