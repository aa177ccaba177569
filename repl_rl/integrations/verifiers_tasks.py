"""Source of tasks from environments of the package `verifiers`, which are loaded by name and checked.

In the terms of that package, a taskset yields tasks, a task rewards messages, and an env decides which agent speaks
next. The package is an extra that takes seconds to import, so it is imported only when an environment is named. All
access to it goes through its module `verifiers.v1`.
"""

import importlib
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count as numbers
from itertools import islice
from types import ModuleType
from typing import ClassVar, Protocol
from urllib.parse import parse_qsl

from repl_rl.errors import ConfigError, ReplRLError, UserCodeError
from repl_rl.settings.component_registry import search_working_folder_for
from repl_rl.tasks import Split, Task, TaskRequest, TaskSource, get_split
from repl_rl.tasks.load_tasks import DEFAULT_COUNT

VERIFIERS = "verifiers"
"""Prefix of the tasks, and name of the sampler that plays them."""
SOLVED = "solved"
"""Reference answer of every task: the environment itself computes the reward."""
_SECRET_NAME = re.compile(r"\b[A-Z][A-Z0-9_]*(?:KEY|TOKEN|SECRET)\b")
"""Name of an environment variable that holds a key."""
_TASKS_EXAMINED = 20
"""Largest number of tasks that are examined per wanted task of an endless environment."""


class EnvironmentData(Protocol):
    """Data of a task of an environment."""

    prompt: object
    prompt_text: str
    system_prompt: str | None
    image: str | None


class Toolset(Protocol):
    """Tools of an environment. In verifiers they would have a separate server."""

    server_name: str

    async def setup(self) -> None:
        """Prepare the tools, before the first turn."""

    async def setup_task(self, data: object) -> None:
        """Prepare the tools for a task, before the first turn."""


class EnvironmentTask(Protocol):
    """A task of an environment: the part of it that is used here."""

    data: EnvironmentData
    config: Iterable[tuple[str, object]]
    key: str
    hash: str

    def hooks(self, attr: str) -> Sequence[Callable[..., object]]:
        """Return its functions with the mark `attr`, such as `stop`."""

    def toolsets(self, config: object) -> Iterable[Toolset]:
        """Return its tools."""

    def setup(self, trace: object, runtime: object) -> Awaitable[None]:
        """Prepare the task, before the first turn."""

    def finalize(self, trace: object, runtime: object) -> Awaitable[None]:
        """Finish the task, after the last turn."""

    def score(self, trace: object, runtime: object) -> Awaitable[None]:
        """Record the rewards of the task in the trace."""


class VerifiersTasks(TaskSource):
    """Tasks of an installed environment. The place is its name."""

    kind: ClassVar[str] = VERIFIERS
    about: ClassVar[str] = "an environment of the package verifiers"
    sampler: ClassVar[str | None] = VERIFIERS

    def load(self, place: str, request: TaskRequest) -> Iterable[Task]:
        """See `TaskSource.load`. Raises as `VerifiersEnvironment`."""
        return load_environment(place).draw_tasks(request.split, request.count, DEFAULT_COUNT)

    def get_sampler_options(self, place: str) -> Mapping[str, object]:
        """See `TaskSource.get_sampler_options`."""
        return {"environment": place}


@cache
def load_environment(place: str) -> "VerifiersEnvironment":
    """Return the environment that `place` names, loaded once per process. Raises as `VerifiersEnvironment`."""
    return VerifiersEnvironment(place)


class VerifiersEnvironment:
    """An installed environment with exactly one agent, which is the policy."""

    def __init__(self, place: str) -> None:
        """Load the environment that `place` names. `?field=value&...` after the name sets fields of its taskset's
        config.

        Raises:
            ConfigError: no environment has that name, or it needs a key that is not set or a feature that is not
                supported.
            UserCodeError: the environment raised while it was loaded.
        """
        self.reference = place
        self.name, _, query = place.partition("?")
        self.label = f"environment {self.name!r} of verifiers"
        """Name of the environment in messages."""
        try:
            self.verifiers_v1: ModuleType = importlib.import_module("verifiers.v1")
        except ImportError as error:
            raise ConfigError("package verifiers", None, f"install repl_rl[verifiers] ({error})") from error
        # Import the package of the environment, then build its settings and load it.
        self._import_package()
        config = self._build_config(dict(parse_qsl(query, keep_blank_values=True)))
        try:
            self.env = self.verifiers_v1.load_environment(config)
        except Exception as error:
            raise self.make_error(error, "loading it") from error
        self.agent_name = self._find_single_agent()
        """Name of its agent."""
        self._coming = iter(self.env.taskset)
        self._tasks: dict[int, EnvironmentTask] = {}

    def import_submodule(self, name: str) -> ModuleType:
        """Import a module below `verifiers.v1`."""
        return importlib.import_module(f"verifiers.v1.{name}")

    def get_task(self, number: int) -> EnvironmentTask | None:
        """Return the task with that number, from 0, as verifiers represents it, or None if fewer exist.

        Raises:
            ConfigError: the task cannot be played here.
            UserCodeError: creating it raised.
        """
        # The taskset only iterates, so every task up to this one is made and kept.
        while number not in self._tasks:
            try:
                found = next(self._coming, None)
                if found is not None:
                    self._validate_task(found)
            except Exception as error:
                raise self.make_error(error, "making a task") from error
            if found is None:
                return None
            self._tasks[len(self._tasks)] = found
        return self._tasks[number]

    def draw_tasks(self, side: Split, count: int | None, usual: int) -> Iterator[Task]:
        """Yield at most `count` tasks of split `side`. None as `count` means all, or `usual` if they are endless."""
        wanted = count if self.env.taskset.bounded else count or usual
        # Too few tasks of an endless environment may fit, so the search ends after a number of them.
        read = None if self.env.taskset.bounded or wanted is None else wanted * _TASKS_EXAMINED
        fitting = (t for t in islice(self._iterate_tasks(), read) if side is Split.ALL or get_split(t.question) is side)
        return islice(fitting, wanted)

    def _iterate_tasks(self) -> Iterator[Task]:
        plain = self.name.rpartition("/")[2]
        for number in numbers():
            found = self.get_task(number)
            if found is None:
                return
            fields = {"environment": self.reference, "number": number}
            yield Task(f"{plain}-{number}", found.data.prompt_text, SOLVED, family=plain, fields=fields)

    def make_error(self, error: Exception, doing: str) -> ReplRLError:
        """Return the error to report for an exception in the environment's code.

        It names a missing key if the exception mentions one, and otherwise the exception.
        """
        if isinstance(error, ReplRLError):
            return error
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        for name in _SECRET_NAME.findall(told):
            if not os.environ.get(name):
                return ConfigError(f"environment variable {name}", None, f"the {self.label} needs it; set it ({told})")
        return UserCodeError(f"the {self.label}: {doing} raised {told}")

    def _import_package(self) -> None:
        """Import its package. Raises the errors of `__init__`."""
        module = self.name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
        if not module.isidentifier():
            remedy = f"name one that is installed, as in {VERIFIERS}:NAME"
            raise ConfigError("environment of verifiers", self.name, remedy)
        # The environment may be a module of the working folder instead of an installed package.
        search_working_folder_for(module)
        try:
            self.verifiers_v1.import_taskset(self.name)
        except ModuleNotFoundError as error:
            # The missing module is the environment itself, or one that it imports.
            missing = getattr(error.__cause__, "name", None) or module
            if missing == module:
                remedy = "there is none of that name here; install its package first"
                raise ConfigError("environment of verifiers", self.name, remedy) from error
            raise ConfigError(f"module {missing}", None, f"the {self.label} needs it; install it") from error
        except Exception as error:
            raise self.make_error(error, "importing it") from error

    def _build_config(self, fields: dict[str, str]) -> object:
        """Return its config. Raises ConfigError if no such environment or field exists."""
        try:
            config: object = self.verifiers_v1.resolve_env_config({"taskset": {**fields, "id": self.name}})
        except (AttributeError, TypeError, ValueError) as error:
            remedy = f"verifiers refuses it: {' '.join(str(error).split())[:300]}"
            raise ConfigError("environment of verifiers", self.reference, remedy) from error
        return config

    def _find_single_agent(self) -> str:
        """Return the name of its only agent.

        Raises:
            ConfigError: the environment has several agents, an agent program, or separate resources.
        """
        seats = list(self.import_submodule("configs.agent").agent_config_fields(self.env.config))
        if len(seats) != 1:
            raise ConfigError(f"agents of the {self.label}", ", ".join(seats), "a policy can be one agent, not several")
        env, taskset = self.env, self.env.taskset
        # Features that are not supported here.
        brought = {
            "an agent program of its own": self.verifiers_v1.default_harness_id(self.name) == self.name,
            "tool servers that all rollouts share": bool(taskset.toolsets(taskset.config)),
            "resources that are started and stopped": type(env).start is not self.verifiers_v1.Env.start,
            "a container": type(taskset).task_type().NEEDS_CONTAINER,
        }
        for what, there in brought.items():
            if there:
                raise ConfigError(self.label, f"one with {what}", "that is not supported here; use another environment")
        return str(seats[0])

    def _validate_task(self, task: EnvironmentTask) -> None:
        """Check that a task can be played here.

        Raises:
            ConfigError: the task needs a feature that is not supported, or a key that is not set.
        """
        data = task.data
        hooks = self.import_submodule("session").hook_boundary
        # Features that are not supported here.
        needs = {
            "without a prompt": data.prompt is None,
            "with an image of a container": data.image is not None,
            "with pictures in its prompt": "image_url" in str(data.prompt),
            "that rewrites requests": bool(
                self.import_submodule("utils.decorators").discover_decorated(task, "intercept")
            ),
            "that stops on a request": any(
                hooks(stop, allow_trace=True) is not self.verifiers_v1.Trace for stop in task.hooks("stop")
            ),
        }
        for what, there in needs.items():
            if there:
                raise ConfigError(f"task of the {self.label}", f"one {what}", "that cannot be played here")
        # The judges of a task are values of its config, or entries of a list in it.
        told = [value for _, value in task.config]
        plugged = [each for value in told if isinstance(value, list) for each in value]
        for judge in (value for value in (*told, *plugged) if isinstance(value, self.verifiers_v1.JudgeConfig)):
            if self.import_submodule("configs.client").resolve_api_key(judge) == "EMPTY":
                remedy = f"a judge of the {self.label} asks a model with it; set it"
                raise ConfigError(f"environment variable {judge.api_key_var}", None, remedy)
