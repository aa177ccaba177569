"""Tools of a `verifiers` environment, called in this process instead of one server per rollout."""

import inspect
import json
from collections.abc import Awaitable, Mapping
from functools import wraps
from importlib import import_module

from repl_rl.errors import ConfigError
from repl_rl.samplers.tool_call_parsing import (
    Toolbox,
    ToolCall,
    ToolFunction,
    ToolResult,
    find_wrong_argument,
    validate_tool_schema,
)
from repl_rl.tasks.environments import EnvironmentTask, VerifiersEnvironment


class VerifiersTools:
    """Tools of one rollout, by the names that the policy uses."""

    def __init__(
        self, installed: VerifiersEnvironment, task: EnvironmentTask, state: object = None, timeout_s: float = 10.0
    ) -> None:
        """Collect the tools.

        `state` is that of the rollout's trace, which its tools share. `timeout_s` is the wall clock of one call,
        seconds.

        Raises:
            ConfigError: a tool has no schema with which a call can be validated, or two tools have the same name.
        """
        self.toolsets = list(task.toolsets(task.config))
        self.schemas: dict[str, Mapping[str, object]] = {}
        functions: list[ToolFunction] = []
        for toolset in self.toolsets:
            # A tool server would get the state through a channel. In this process it is set directly.
            if isinstance(state, vars(toolset)["_state_cls"]):
                vars(toolset)["_inert_state"] = state
            for function in installed.import_submodule("utils.decorators").discover_decorated(toolset, "tool"):
                plain = getattr(function, "tool_name", None) or function.__name__
                name = f"{toolset.server_name}_{plain}" if toolset.server_name else plain
                if name in self.schemas:
                    raise ConfigError(f"tool of the {installed.label}", name, "two have this name")
                self.schemas[name] = _build_tool_schema(name, function)
                functions.append(_wrap_tool(name, function))
        self._toolbox = Toolbox(functions, timeout_s) if functions else None

    async def run(self, call: ToolCall | ToolResult) -> str:
        """Run a call and return its result as text for the policy."""
        if isinstance(call, ToolResult) or self._toolbox is None:
            return call.text if isinstance(call, ToolResult) else f"NameError: there is no tool {call.name!r}"
        # The toolbox reports unknown names and missing arguments, so check only the types here.
        schema = self.schemas.get(call.name)
        wrong = find_wrong_argument(schema, call.kwargs) if schema is not None else None
        return f"TypeError: {call.name}(): {wrong}" if wrong is not None else (await self._toolbox.run(call)).text


def _build_tool_schema(name: str, function: ToolFunction) -> Mapping[str, object]:
    """Return the schema that the environment's server would offer, from the function's annotations and docstring."""
    # The schema is made by the library that `verifiers` uses for its servers.
    made = import_module("mcp.server.mcpserver.tools").Tool.from_function(function, name=name)
    about = {"name": name, "description": inspect.getdoc(function) or "", "parameters": made.parameters}
    schema = {"type": "function", "function": about}
    validate_tool_schema(name, schema)
    return schema


def _wrap_tool(name: str, function: ToolFunction) -> ToolFunction:
    """Return the function under the name that the policy uses. Its result becomes text as on the tool's server."""

    @wraps(function)
    def call_tool(*args: object, **kwargs: object) -> object:
        value = function(*args, **kwargs)
        return _await_text(value) if inspect.isawaitable(value) else _format_result(value)

    call_tool.__name__ = name
    return call_tool


async def _await_text(value: Awaitable[object]) -> str:
    """Return the result of an async tool as text."""
    return _format_result(await value)


def _format_result(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, indent=2)
