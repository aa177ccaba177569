"""More groups than are needed: the first ones done are kept whole, the others give back what they hold."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from repl_rl.engine import ScriptedEngine
from repl_rl.errors import ConfigError, EngineDied
from repl_rl.rollout import Raced, Rollouts, RolloutSampler
from repl_rl.rollout.episode import Episode
from repl_rl.sandbox import InProcessSandbox, SandboxSession
from repl_rl.tasks import Task
from tests.worlds import TASK, world


class Counted:
    """A sandbox that knows how many of its consoles are out."""

    def __init__(self) -> None:
        self._inner = InProcessSandbox()
        self.name, self.python_version = self._inner.name, self._inner.python_version
        self.out = 0

    @asynccontextmanager
    async def session(self) -> AsyncIterator[SandboxSession]:
        async with self._inner.session() as session:
            self.out += 1
            try:
                yield session
            finally:
                self.out -= 1


class Slow(RolloutSampler):
    """Of a task called slow, only the first rollout ends; each has run a line by then."""

    def __init__(self) -> None:
        self.begun: dict[str, int] = {}

    async def rollout(self, episode: Episode) -> None:
        number = self.begun[episode.task.id] = self.begun.get(episode.task.id, -1) + 1
        line = await episode.sample()
        await episode.push(line)
        if episode.task.id.startswith("slow") and number:
            await asyncio.Event().wait()
        if episode.task.id == "broken":
            raise ValueError("mine")


def group(name: str) -> list[Task]:
    return [replace(TASK, id=name)] * 3


def race(*names: str, keep: int, concurrency: int = 64) -> tuple[Raced, Rollouts, Counted]:
    consoles = Counted()
    rollouts = replace(world(["x = 1\n"], Slow()), sandbox=consoles, concurrency=concurrency)
    return asyncio.run(rollouts.race([group(name) for name in names], keep)), rollouts, consoles


def test_the_groups_that_are_done_first_are_kept_whole_in_the_order_that_they_were_asked_for() -> None:
    raced, _, _ = race("a", "slow 1", "b", "c", "slow 2", keep=3)
    assert [[t.task_id for t in group] for group in raced.groups] == [["a"] * 3, ["b"] * 3, ["c"] * 3]
    assert raced.cut == 6
    assert raced.cut_tokens > 0


def test_a_straggler_gives_its_console_and_its_place_in_the_engine_back_at_once() -> None:
    _, rollouts, consoles = race("slow 1", "a", keep=1)
    assert consoles.out == 0
    assert isinstance(rollouts.engine, ScriptedEngine)
    assert rollouts.engine.open_sessions == 0


def test_tokens_of_what_was_cut_are_counted_whether_it_had_ended_or_not() -> None:
    raced, _, _ = race("slow 1", "a", keep=1)
    (kept,) = raced.groups
    # One has ended as those that are kept; two have sampled a line whose output the engine was not yet told.
    assert raced.cut_tokens == len(kept[0].completion_ids) + 2 * kept[0].sampled_tokens


def test_groups_that_never_got_a_place_are_cut_too() -> None:
    raced, _, _ = race("a", "b", "c", "d", keep=1, concurrency=3)
    assert len(raced.groups) == 1
    assert raced.cut == 9


def test_a_group_that_failed_is_kept_only_where_too_few_others_are_left() -> None:
    raced, _, _ = race("broken", "a", "b", keep=2)
    assert [group[0].task_id for group in raced.groups] == ["a", "b"]
    raced, _, _ = race("broken", "a", "b", keep=3)
    assert [group[0].task_id for group in raced.groups] == ["broken", "a", "b"]


def test_no_more_groups_can_be_kept_than_there_are() -> None:
    with pytest.raises(ConfigError, match="groups to keep is 2; there are 1"):
        race("a", keep=2)


def test_an_error_of_the_engine_ends_the_race() -> None:
    class Dying(RolloutSampler):
        async def rollout(self, episode: Episode) -> None:
            if episode.task.id == "bad":
                raise EngineDied("the engine's process is gone")
            await asyncio.Event().wait()

    with pytest.raises(EngineDied, match="is gone"):
        asyncio.run(world(["x\n"], Dying()).race([group("a"), group("bad")], 1))
