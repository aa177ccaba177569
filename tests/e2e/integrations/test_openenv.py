"""OpenEnv's own clients against OpenEnv's own server, over a WebSocket on this machine.

The package takes seconds to import, so it is imported where it is used.
"""

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import create_model

from repl_rl.integrations.gym_environment_sampler import EnvironmentSampler
from repl_rl.trajectory.trajectory import Stop
from tests.support.samplers.marked_text import play

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]
PAGE = Path(__file__).parents[3] / "docs" / "samplers" / "environments.md"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server of numbers to guess; each session thinks of its own."""
    uvicorn, openenv = import_module("uvicorn"), import_module("openenv.core.env_server")

    guess = create_model("Guess", __base__=openenv.Action, guess=(int, ...))
    told = create_model("Told", __base__=openenv.Observation, text=(str, ""))

    def reset(self: SimpleNamespace, seed: int = 0, **_: object) -> object:
        self.number = 10 + seed
        return told(text="I think of a number from 1 to 20. Which?")

    def step(self: SimpleNamespace, action: SimpleNamespace, **_: object) -> object:
        right = action.guess == self.number
        text = "" if right else "more" if action.guess < self.number else "less"
        return told(text=text, reward=1.0 if right else -0.1, done=right)

    methods = {"reset": reset, "step": step, "state": property(lambda self: openenv.State())}
    number = type("Number", (openenv.Environment,), {**methods, "SUPPORTS_CONCURRENT_SESSIONS": True})
    app = openenv.create_fastapi_app(number, guess, told, max_concurrent_envs=8)
    running = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not running.started and time.monotonic() < deadline:
        thread.join(0.05)
    yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    running.should_exit = True
    with suppress(RuntimeError):
        thread.join(10)


def page_sampler(server: str) -> EnvironmentSampler:
    (source,) = re.findall(r"```openenv\n(.*?)```", PAGE.read_text(), re.DOTALL)
    namespace: dict[str, object] = {}
    exec(source.replace("http://localhost:8000", server), namespace)
    sampler = namespace["sampler"]
    assert isinstance(sampler, EnvironmentSampler)
    return sampler


def plain_sampler(server: str) -> EnvironmentSampler:
    """The same with the client's plain face."""
    client = import_module("openenv.core").GenericEnvClient
    asking = page_sampler(server)
    asking.make = lambda task: client(base_url=server).sync()
    return asking


@pytest.mark.parametrize("sampler_of", [page_sampler, plain_sampler])
def test_a_client_of_openenv_plays_against_its_server_token_by_token(
    server: str, sampler_of: Callable[[str], EnvironmentSampler]
) -> None:
    sampler = sampler_of(server)
    tasks = asyncio.run(sampler.make_tasks(5))
    assert {task.question for task in tasks} == {"I think of a number from 1 to 20. Which?"}
    t = play(sampler, f"{tasks[4].question}\n⟦10\n⟧more\n⟦15\n⟧less\n⟦14\n⟧", tasks[4])
    assert (t.stop, t.answer, t.solved) == (Stop.ANSWERED, "solved", True)
    assert t.outcome == pytest.approx(1.0 - 0.1 - 0.1), "the sum of what the environment paid"
    assert [[(r.name, r.value) for r in line.rewards] for line in t.lines] == [
        [("environment", -0.1)],
        [("environment", -0.1)],
        [("environment", 1.0)],
    ]


def test_rollouts_have_sessions_of_their_own(server: str) -> None:
    sampler = page_sampler(server)
    first, *_, last = asyncio.run(sampler.make_tasks(3))
    for task, number in ((first, 10), (last, 12)):
        assert play(sampler, f"{task.question}\n⟦{number}\n⟧", task).outcome == 1.0
