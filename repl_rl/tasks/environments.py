"""Environments of the package `verifiers` that are installed here: found by name, held to what can be played, as tasks.

In its words a taskset yields tasks, which reward what was said, and an env decides who speaks when. Nothing of the
package is imported before an environment is named, and all that is asked of it goes by its module `verifiers.v1`.
"""

import importlib
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import count as numbers
from itertools import islice
from types import ModuleType
from typing import Protocol
from urllib.parse import parse_qsl

from repl_rl.errors import ConfigError, ReplRLError, UserCodeError
from repl_rl.tasks.model import Split, Task, split_of

VERIFIERS = "verifiers"
"""Kind of a source of tasks, and name of the sampler that plays them."""
SOLVED = "solved"
_KEY = re.compile(r"\b[A-Z][A-Z0-9_]*(?:KEY|TOKEN|SECRET)\b")
_LOOKED_AT = 20
"""Tasks of an endless environment that are looked at, at most, for each one that is wanted."""


class EnvironmentData(Protocol):
    """What a task of an environment says."""

    prompt: object
    prompt_text: str
    system_prompt: str | None
    image: str | None


class Toolset(Protocol):
    """Tools of an environment; it would have a server of their own."""

    server_name: str

    async def setup(self) -> None:
        """Called before the first turn, as is the next."""

    async def setup_task(self, data: object) -> None:
        """Prepare it for a task."""


class EnvironmentTask(Protocol):
    """A task of an environment, as far as it is used here."""

    data: EnvironmentData
    config: Iterable[tuple[str, object]]
    key: str
    hash: str

    def hooks(self, attr: str) -> Sequence[Callable[..., object]]:
        """Its functions that are marked so, such as `stop`."""

    def toolsets(self, config: object) -> Iterable[Toolset]:
        """Its tools."""

    def setup(self, trace: object, runtime: object) -> Awaitable[None]:
        """Called before the first turn."""

    def finalize(self, trace: object, runtime: object) -> Awaitable[None]:
        """Called after the last one."""

    def score(self, trace: object, runtime: object) -> Awaitable[None]:
        """Records its rewards in the trace."""


@cache
def installed(place: str) -> "Installed":
    """The environment that `place` names; raises as `Installed`. A process loads it once."""
    return Installed(place)


class Installed:
    """An environment that is installed, and whose one agent a policy can be."""

    def __init__(self, place: str) -> None:
        """`place` is its name, which may end in `?field=value&...`: fields of its taskset's config.

        Raises:
            ConfigError: there is none of that name, it needs a key that is not set, or what cannot be had here.
            UserCodeError: it raised while it was loaded.
        """
        self.place = place
        self.name, _, query = place.partition("?")
        self.thing = f"environment {self.name!r} of verifiers"
        """What messages call it."""
        try:
            self.v1: ModuleType = importlib.import_module("verifiers.v1")
        except ImportError as error:
            raise ConfigError("package verifiers", None, f"install repl_rl[verifiers] ({error})") from error
        self._import()
        config = self._config(dict(parse_qsl(query, keep_blank_values=True)))
        try:
            self.env = self.v1.load_environment(config)
        except Exception as error:
            raise self.explained(error, "loading it") from error
        self.seat = self._only_seat()
        """What it calls its agent."""
        self._coming = iter(self.env.taskset)
        self._tasks: dict[int, EnvironmentTask] = {}

    def part(self, name: str) -> ModuleType:
        """A module below `verifiers.v1`."""
        return importlib.import_module(f"verifiers.v1.{name}")

    def task(self, number: int) -> EnvironmentTask | None:
        """Its task of that number, from 0, in its own words; None: it has fewer.

        Raises:
            ConfigError: the task cannot be played here.
            UserCodeError: making it raised.
        """
        while number not in self._tasks:
            try:
                found = next(self._coming, None)
                if found is not None:
                    self._check(found)
            except Exception as error:
                raise self.explained(error, "making a task") from error
            if found is None:
                return None
            self._tasks[len(self._tasks)] = found
        return self._tasks[number]

    def drawn(self, side: Split, count: int | None, usual: int) -> Iterator[Task]:
        """Its tasks that lie in `side`: at most `count`; None: all of them, or `usual` of an endless environment."""
        wanted = count if self.env.taskset.bounded else count or usual
        read = None if self.env.taskset.bounded or wanted is None else wanted * _LOOKED_AT
        fitting = (t for t in islice(self._all(), read) if side is Split.ALL or split_of(t.question) is side)
        return islice(fitting, wanted)

    def _all(self) -> Iterator[Task]:
        plain = self.name.rpartition("/")[2]
        for number in numbers():
            found = self.task(number)
            if found is None:
                return
            fields = {"environment": self.place, "number": number}
            yield Task(f"{plain}-{number}", found.data.prompt_text, SOLVED, family=plain, fields=fields)

    def explained(self, error: Exception, doing: str) -> ReplRLError:
        """What a person is told of an error in its code: of a key that is missing, or what it raised."""
        if isinstance(error, ReplRLError):
            return error
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        for name in _KEY.findall(told):
            if not os.environ.get(name):
                return ConfigError(f"environment variable {name}", None, f"the {self.thing} needs it; set it ({told})")
        return UserCodeError(f"the {self.thing}: {doing} raised {told}")

    def _import(self) -> None:
        """Find its package. Raises: as `__init__`."""
        module = self.name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
        if not module.isidentifier():
            remedy = f"name one that is installed, as in {VERIFIERS}:NAME"
            raise ConfigError("environment of verifiers", self.name, remedy)
        try:
            self.v1.import_taskset(self.name)
        except ModuleNotFoundError as error:
            missing = getattr(error.__cause__, "name", None) or module
            if missing == module:
                remedy = "there is none of that name here; install its package first"
                raise ConfigError("environment of verifiers", self.name, remedy) from error
            raise ConfigError(f"module {missing}", None, f"the {self.thing} needs it; install it") from error
        except Exception as error:
            raise self.explained(error, "importing it") from error

    def _config(self, fields: dict[str, str]) -> object:
        """Raises: ConfigError: it is no environment, or has no such field."""
        try:
            config: object = self.v1.resolve_env_config({"taskset": {**fields, "id": self.name}})
        except (AttributeError, TypeError, ValueError) as error:
            remedy = f"verifiers refuses it: {' '.join(str(error).split())[:300]}"
            raise ConfigError("environment of verifiers", self.place, remedy) from error
        return config

    def _only_seat(self) -> str:
        """Raises: ConfigError: it has several agents, an agent program, or resources of its own."""
        seats = list(self.part("configs.agent").agent_config_fields(self.env.config))
        if len(seats) != 1:
            raise ConfigError(f"agents of the {self.thing}", ", ".join(seats), "a policy can be one agent, not several")
        env, taskset = self.env, self.env.taskset
        brought = {
            "an agent program of its own": self.v1.default_harness_id(self.name) == self.name,
            "tool servers that all rollouts share": bool(taskset.toolsets(taskset.config)),
            "resources that are started and stopped": type(env).start is not self.v1.Env.start,
            "a container": type(taskset).task_type().NEEDS_CONTAINER,
        }
        for what, there in brought.items():
            if there:
                raise ConfigError(self.thing, f"one with {what}", "that cannot be had here; play another")
        return str(seats[0])

    def _check(self, task: EnvironmentTask) -> None:
        """Raises: ConfigError: it needs what cannot be had here, or a key that is not set."""
        data = task.data
        hooks = self.part("session").hook_boundary
        needs = {
            "without a prompt": data.prompt is None,
            "with an image of a container": data.image is not None,
            "with pictures in its prompt": "image_url" in str(data.prompt),
            "that rewrites requests": bool(self.part("utils.decorators").discover_decorated(task, "intercept")),
            "that stops on a request": any(
                hooks(stop, allow_trace=True) is not self.v1.Trace for stop in task.hooks("stop")
            ),
        }
        for what, there in needs.items():
            if there:
                raise ConfigError(f"task of the {self.thing}", f"one {what}", "that cannot be played here")
        told = [value for _, value in task.config]
        plugged = [each for value in told if isinstance(value, list) for each in value]
        for judge in (value for value in (*told, *plugged) if isinstance(value, self.v1.JudgeConfig)):
            if self.part("configs.client").resolve_api_key(judge) == "EMPTY":
                remedy = f"a judge of the {self.thing} asks a model with it; set it"
                raise ConfigError(f"environment variable {judge.api_key_var}", None, remedy)
