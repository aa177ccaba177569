"""Environments with reset and step: a turn acts, an observation is spliced, a step is credited."""

import asyncio
from dataclasses import dataclass, replace

import pytest

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.integrations.gym_environment_sampler import Environment, EnvironmentSampler
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Stop
from tests.support.samplers.marked_text import LIMITS, chat_renderer, play, rollouts_of, written


class Doors:
    """Behind one of three doors is a prize; opening it ends the episode. Async, with AReaL's and gymnasium's tuples."""

    def __init__(self, task: Task) -> None:
        self.prize = int(task.id) % 3
        self.closed = False

    async def reset(self) -> tuple[str, dict[str, object]]:
        return "Three doors: 0, 1, 2. Open one.", {}

    async def step(self, action: object) -> tuple[str, float, bool, bool, dict[str, object]]:
        right = action == str(self.prize)
        return ("You found it." if right else "Empty.", float(right), right, False, {})

    async def close(self) -> None:
        self.closed = True


@dataclass
class Result:
    observation: object
    reward: float | None = None
    done: bool = False


class Client:
    """The same, as a plain client whose calls return results with attributes."""

    def __init__(self, task: Task) -> None:
        self.doors = Doors(task)

    def reset(self) -> Result:
        return Result({"text": "Three doors: 0, 1, 2. Open one."})

    def step(self, action: object) -> Result:
        assert isinstance(action, dict)
        right = action["open"] == self.doors.prize
        return Result({"text": "You found it." if right else "Empty."}, 1.0 if right else None, right)


def sampler_of(style: str, chat: bool = True) -> EnvironmentSampler:
    if style == "tuples":
        return EnvironmentSampler(Doors, chat=chat)
    return EnvironmentSampler(
        Client, action=lambda text: {"open": int(text)}, show=lambda o: str(o["text"]), chat=chat  # type: ignore[index]
    )  # fmt: skip


@pytest.mark.parametrize("style", ["tuples", "results"])
def test_turns_act_until_the_environment_is_done(style: str) -> None:
    sampler = sampler_of(style)
    task = asyncio.run(sampler.make_tasks(3))[2]
    t = play(
        sampler,
        "<|im_start|>user\nThree doors: 0, 1, 2. Open one.<|im_end|>\n<|im_start|>assistant\n⟦0<|im_end|>⟧"
        "\n<|im_start|>user\nEmpty.<|im_end|>\n<|im_start|>assistant\n⟦2<|im_end|>⟧",
        task,
    )
    assert (t.stop, t.answer, t.outcome) == (Stop.ANSWERED, "solved", 1.0)
    assert [[(r.name, r.value) for r in line.rewards] for line in t.lines] == [
        [("environment", 0.0)],
        [("environment", 1.0)],
    ]


def test_without_chat_a_line_is_an_action_and_an_observation_is_a_line() -> None:
    sampler = sampler_of("tuples", chat=False)
    task = asyncio.run(sampler.make_tasks(2))[1]
    t = play(sampler, "Three doors: 0, 1, 2. Open one.\n⟦2\n⟧Empty.\n⟦1\n⟧", task)
    assert t.outcome == 1.0


def test_an_environment_that_is_done_with_too_little_is_not_solved() -> None:
    sampler = EnvironmentSampler(Doors, chat=False, solved_at=2.0)
    t = play(sampler, "Three doors: 0, 1, 2. Open one.\n⟦0\n⟧", asyncio.run(sampler.make_tasks(1))[0])
    assert (t.answer, t.outcome, t.solved) == ("not solved", 1.0, False), "it is worth what the environment paid"


def test_the_outcome_is_what_the_environment_paid_and_turns_may_be_left_out() -> None:
    class Coins(Doors):
        async def step(self, action: object) -> tuple[str, float, bool, bool, dict[str, object]]:
            return "", 0.4, action == "1", False, {}

    task = Task("1", "Three doors: 0, 1, 2. Open one.", "solved")
    sampler = EnvironmentSampler(Coins, chat=False, per_turn=False)
    t = play(sampler, "Three doors: 0, 1, 2. Open one.\n⟦0\n⟧\n⟦1\n⟧", task)
    assert (t.answer, t.outcome, t.solved) == ("not solved", 0.8, False)
    assert [line.rewards for line in t.lines] == [(), ()]
    cut = play(sampler, "Three doors: 0, 1, 2. Open one.\n⟦0\n⟧\n", task, limits=replace(LIMITS, max_lines=1))
    assert (cut.stop, cut.answer, cut.outcome) == (Stop.MAX_LINES, None, 0.4)


def test_environments_are_closed_whatever_happens() -> None:
    made: list[Doors] = []

    def make(task: Task) -> Environment:
        made.append(Doors(task))
        return made[-1]

    def refuse(text: str) -> object:
        raise ValueError(text)

    renderer = chat_renderer()
    sampler = EnvironmentSampler(make, action=refuse)
    rollouts = rollouts_of(sampler, [written(renderer, "0<|im_end|>")], renderer)
    with pytest.raises(UserCodeError, match=r"EnvironmentSampler\.rollout raised ValueError"):
        asyncio.run(rollouts.collect([Task("1", "q", "solved")]))
    assert [doors.closed for doors in made] == [True]


def test_environments_do_not_wait_for_each_other() -> None:
    waiting: list[asyncio.Event] = []

    class Slow(Doors):
        async def step(self, action: object) -> tuple[str, float, bool, bool, dict[str, object]]:
            waiting.append(asyncio.Event())
            if len(waiting) == 2:
                for event in waiting:
                    event.set()
            await waiting[-1].wait()
            return await super().step(action)

    renderer = chat_renderer()
    rollouts = rollouts_of(EnvironmentSampler(Slow), [written(renderer, "1<|im_end|>")], renderer)
    found = asyncio.run(rollouts.collect([Task("1", "q", "solved"), Task("4", "r", "solved")]))
    assert [t.outcome for t in found] == [1.0, 1.0]


def test_an_environment_that_starts_elsewhere_than_its_task_says_is_named() -> None:
    sampler = EnvironmentSampler(Doors)
    (task,) = asyncio.run(sampler.make_tasks(1))
    renderer = chat_renderer()
    rollouts = rollouts_of(sampler, [written(renderer, "1<|im_end|>")], renderer)
    with pytest.raises(UserCodeError, match="must give the same one for the same task"):
        asyncio.run(rollouts.collect([replace(task, question="Two doors.")]))


def test_a_step_that_says_nothing_is_named() -> None:
    class Mute(Doors):
        async def step(self, action: object) -> None:  # type: ignore[override]
            return None

    renderer = chat_renderer()
    rollouts = rollouts_of(EnvironmentSampler(Mute), [written(renderer, "1<|im_end|>")], renderer)
    with pytest.raises(UserCodeError, match="step returned None"):
        asyncio.run(rollouts.collect([Task("1", "q", "solved")]))


def test_tasks_need_something_to_show() -> None:
    sampler = EnvironmentSampler(Doors, show=lambda observation: " ")
    with pytest.raises(ConfigError, match="first observation of environment 0"):
        asyncio.run(sampler.make_tasks(1))
    with pytest.raises(ConfigError, match="number of tasks"):
        asyncio.run(sampler.make_tasks(0))
