"""A training whose engine dies: it ends as the undisturbed one, or stops with a state that it can be gone on with."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from safetensors.torch import load_file

from repl_rl.engine import ENGINES, Engine, EngineConfig, EngineOptions
from repl_rl.engine.scripted_engine import FaultyEngine
from repl_rl.errors import UnrecoverableError
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.store import read_trajectories
from repl_rl.trainer.checkpoint_schedule import CheckpointSchedule
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.plugins.checkpoint import list_states
from repl_rl.trainer.train import train
from tests.support.trainer.killed_training import model_folder
from tests.support.trainer.resumed_runs import rows, same

CONFIG = TrainerConfig(
    steps=3, prompts_per_step=2, group_size=2, warmup_steps=0, importance_sampling="token_truncate(tolerance=100.0)"
)
FIGURES = ("engine_deaths", "consoles_lost", "rollouts_replayed", "rollouts_given_up")
LIVES: list[int] = []
"""Chunks that each engine gives which is opened next; empty: it does not die."""


@dataclass(frozen=True, slots=True)
class Frail(EngineConfig):
    """The scripted engine, whose process can die."""

    kind: ClassVar[str] = "frail"
    about: ClassVar[str] = "dies"

    @asynccontextmanager
    async def open(self, opening: EngineOptions) -> AsyncIterator[Engine]:
        """See `EngineConfig.open`."""
        allowed = sorted(set(range(300)) - opening.forbidden_ids)
        scripts = [[allowed[7 * i * i * (n + 3) % len(allowed)] for i in range(200)] for n in range(40)]
        engine = FaultyEngine(scripts, context_tokens=512, forbidden_ids=opening.forbidden_ids)
        engine.chunks_until_crash = LIVES.pop(0) if LIVES else None
        yield engine


@pytest.fixture(scope="module", autouse=True)
def frail() -> Iterator[None]:
    ENGINES.register(Frail)
    yield
    ENGINES.entries.pop(Frail.kind)


def play(out: Path, lives: Sequence[int] = (), resume: bool = False) -> None:
    LIVES[:] = lives
    model = out.parent / "model"
    if not model.exists():
        model_folder(model)
    world = RolloutConfig(
        str(model), engine="frail", concurrency=2, rollout=RolloutLimits(max_lines=1, max_line_tokens=8)
    )
    train(
        world,
        CONFIG,
        out=out,
        train_tasks=8,
        resume=resume,
        checkpoint=CheckpointSchedule(every_s=0, max_time_share=1.0),
    )


def figures(run: Path) -> list[object]:
    return [{k: v for k, v in row.items() if k not in FIGURES} for row in rows(run) if isinstance(row, Mapping)]


def faults(run: Path) -> Mapping[str, int]:
    counted: Mapping[str, int] = json.loads((run / "summary.json").read_text())["faults"]
    return counted


def check_alike(run: Path, whole: Path) -> None:
    assert figures(run) == figures(whole)
    played = [
        [(t.id, t.seed, t.completion_ids) for t in read_trajectories(place / "trajectories")] for place in (run, whole)
    ]
    assert played[0] == played[1]
    assert same(*(load_file(place / "checkpoints" / "final" / "model.safetensors") for place in (run, whole)))


def test_a_run_whose_engine_dies_in_every_step_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    play(tmp_path / "whole")
    play(tmp_path / "run", lives=[3, 4, 4])
    check_alike(tmp_path / "run", tmp_path / "whole")
    counted = faults(tmp_path / "run")
    assert counted["engine_deaths"] == 3
    assert 3 <= counted["rollouts_replayed"] <= 6, "two are under way at a time"
    assert set(faults(tmp_path / "whole").values()) == {0}


@pytest.mark.heavy
def test_a_run_whose_engine_dies_again_and_again_stops_with_a_state_and_can_be_gone_on_with(tmp_path: Path) -> None:
    play(tmp_path / "whole")
    with pytest.raises(UnrecoverableError, match="engine scripted is 'dead 3 times in a row") as raised:
        play(tmp_path / "run", lives=[5, 0, 0])
    assert raised.value.exit_code == 3
    assert len(rows(tmp_path / "run")) >= 1
    assert len(list_states(tmp_path / "run" / "states")) >= 1
    play(tmp_path / "run", resume=True)
    check_alike(tmp_path / "run", tmp_path / "whole")
