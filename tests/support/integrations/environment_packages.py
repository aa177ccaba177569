"""Packages of environments in the form that verifiers prescribes: a project with a module that exports a taskset."""

import re
from pathlib import Path

from tests.support.documents import PAGES

PROJECT = """\
[project]
name = "{dashed}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["verifiers"]

[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[tool.setuptools]
packages = ["{name}"]
"""
(DIGITS,) = re.findall(r"```verifiers\n(.*?)```", PAGES["docs/verifiers.md"], re.DOTALL)
"""The environment of the page: one turn, two rewards."""
SHOP = '''\
import verifiers.v1 as vf

PRICES = {"pen": 3, "ink": 8}


class ShopState(vf.State):
    asked: list[str] = []


class ShopData(vf.TaskData):
    total: int


class ShopTools(vf.Toolset[vf.ToolsetConfig, ShopState]):
    TOOL_PREFIX = "shop"

    @vf.tool
    def price(self, item: str, count: int = 1) -> int:
        """What an item costs."""
        self.state.asked.append(item)
        return PRICES[item] * count


class ShopTask(vf.Task[ShopData, ShopState]):
    @classmethod
    def toolsets(cls, config):
        return [ShopTools(vf.ToolsetConfig())]

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return len(trace.state.asked) >= 3

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.total) in trace.last_reply)

    @vf.reward(weight=-0.25)
    async def questions(self, trace: vf.Trace) -> float:
        return float(len(trace.state.asked))


class ShopTaskset(vf.Taskset[ShopTask, vf.TasksetConfig]):
    def load(self):
        system = "You sell. Ask for prices."
        return [
            ShopTask(ShopData(prompt="A pen and an ink?", system_prompt=system, total=11)),
            ShopTask(ShopData(prompt="Two pens?", system_prompt=system, total=6)),
        ]


__all__ = ["ShopTaskset"]
'''
"""Several turns, a tool with a state, a stop."""
GUESS = """\
import itertools

import verifiers.v1 as vf


class GuessTask(vf.Task[vf.TaskData]):
    pass


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        number = 10 + task.data.idx
        async with agents.player.interaction(task) as talk:
            said = await talk.turn()
            while not said.terminated:
                if said.last_reply == str(number):
                    break
                said = await talk.turn("more" if int(said.last_reply) < number else "less")
        talk.trace.record_reward("found", float(talk.trace.last_reply == str(number)))
        talk.trace.record_reward("turns", talk.trace.num_turns, -0.1)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for n in itertools.count():
            yield GuessTask(vf.TaskData(prompt=f"Game {n}: I think of a number from 1 to 99. Which?"))


__all__ = ["GuessEnv", "GuessTaskset"]
"""
"""An env of its own, which is the user, and endless tasks."""

COUNTING = """\
import verifiers.v1 as vf


class CountingTask(vf.Task[vf.TaskData]):
    pass


class CountingConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class CountingEnv(vf.Env[CountingConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            said = await talk.turn()
            while not said.terminated and talk.trace.num_turns < 3:
                count = sum(character.isdigit() for character in said.last_reply)
                said = await talk.turn(f"{count} digits. Again:")
        text = "".join(message.content for message in talk.trace.assistant_messages)
        talk.trace.record_reward("digits", sum(c.isdigit() for c in text) / max(len(text), 1))


class CountingTaskset(vf.Taskset[CountingTask, vf.TasksetConfig]):
    def load(self):
        return [CountingTask(vf.TaskData(prompt=f"{n}: write digits.")) for n in range(64)]


__all__ = ["CountingEnv", "CountingTaskset"]
"""
"""Three turns that any policy can take, between which the env says something."""


def write_package(folder: Path, name: str, source: str) -> Path:
    """The project of an environment. Returns its folder."""
    project = folder / name.replace("_", "-")
    (project / name).mkdir(parents=True)
    (project / "pyproject.toml").write_text(PROJECT.format(name=name, dashed=name.replace("_", "-")))
    (project / name / "__init__.py").write_text(source)
    return project
