"""Tools of a `verifiers` environment, called in this process instead of one server per rollout."""

import inspect
import json
from collections.abc import Awaitable, Mapping
from functools import wraps
from importlib import import_module

from repl_rl.errors import ConfigError
from repl_rl.samplers.schemas import check_tool, wrong_argument
from repl_rl.samplers.tools import Call, CallResult, Function, Toolbox
from repl_rl.tasks.environments import EnvironmentTask, Installed


class Tools:
    """Tools of one rollout, by the names that the policy uses."""

    def __init__(
        self, installed: Installed, task: EnvironmentTask, state: object = None, timeout_s: float = 10.0
    ) -> None:
        """Collect the tools.

        `state` is that of the rollout's trace, which its tools share. `timeout_s` is the wall clock of one call,
        seconds.

        Raises:
            ConfigError: a tool has no schema with which a call can be validated, or two tools have the same name.
        """
        self.toolsets = list(task.toolsets(task.config))
        self.schemas: dict[str, Mapping[str, object]] = {}
        functions: list[Function] = []
        for toolset in self.toolsets:
            # A tool server would get the state through a channel.
            if isinstance(state, vars(toolset)["_state_cls"]):
                vars(toolset)["_inert_state"] = state
            for function in installed.part("utils.decorators").discover_decorated(toolset, "tool"):
                plain = getattr(function, "tool_name", None) or function.__name__
                name = f"{toolset.server_name}_{plain}" if toolset.server_name else plain
                if name in self.schemas:
                    raise ConfigError(f"tool of the {installed.thing}", name, "two have this name")
                self.schemas[name] = _schema(name, function)
                functions.append(_named(name, function))
        self._toolbox = Toolbox(functions, timeout_s) if functions else None

    async def run(self, call: Call | CallResult) -> str:
        """Run a call and return its result as text for the policy."""
        if isinstance(call, CallResult) or self._toolbox is None:
            return call.text if isinstance(call, CallResult) else f"NameError: there is no tool {call.name!r}"
        schema = self.schemas.get(call.name)
        wrong = wrong_argument(schema, call.kwargs) if schema is not None else None
        return f"TypeError: {call.name}(): {wrong}" if wrong is not None else (await self._toolbox.run(call)).text


def _schema(name: str, function: Function) -> Mapping[str, object]:
    """Return the schema that the environment's server would offer, from the function's annotations and docstring."""
    # Made by the library that `verifiers` uses for its servers.
    made = import_module("mcp.server.mcpserver.tools").Tool.from_function(function, name=name)
    about = {"name": name, "description": inspect.getdoc(function) or "", "parameters": made.parameters}
    schema = {"type": "function", "function": about}
    check_tool(name, schema)
    return schema


def _named(name: str, function: Function) -> Function:
    """Return the function under the name that the policy uses. Its result becomes text as on the tool's server."""

    @wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        value = function(*args, **kwargs)
        return _later(value) if inspect.isawaitable(value) else _told(value)

    call.__name__ = name
    return call


async def _later(value: Awaitable[object]) -> str:
    return _told(await value)


def _told(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, indent=2)
