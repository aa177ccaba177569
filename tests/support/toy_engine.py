"""An engine of one's own: this file, and one line that adds it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, ClassVar

from repl_rl.engine import Engine, EngineConfig, EngineOptions, ScriptedEngine
from repl_rl.settings.value_bounds import AtLeast, check_fields


@dataclass(frozen=True, slots=True)
class Abacus(EngineConfig):
    """Ids that follow from those before, by arithmetic."""

    kind: ClassVar[str] = "abacus"
    about: ClassVar[str] = "arithmetic"

    words: Annotated[int, AtLeast(2)] = 384
    """Ids that it knows."""

    def __post_init__(self) -> None:
        check_fields(self, self.kind)

    @asynccontextmanager
    async def open(self, opening: EngineOptions) -> AsyncIterator[Engine]:
        """See `EngineConfig.open`."""
        allowed = sorted(set(range(self.words)) - opening.forbidden_ids)

        def policy(ids: Sequence[int]) -> Sequence[int]:
            return (allowed[hash(tuple(ids)) % len(allowed)],)

        yield ScriptedEngine.from_policy(policy, forbidden_ids=opening.forbidden_ids)
