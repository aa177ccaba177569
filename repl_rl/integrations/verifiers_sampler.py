"""Sampler for environments of the package `verifiers`. They decide the order of turns and give the rewards.

The parts, bottom up:

- `VerifiersTools` calls the tools of an environment in this process instead of one server per rollout.
- `VerifiersAgent` is the agent of an environment, whose turns the policy writes. An env calls `agents.NAME.run(task)`,
  or opens an `interaction` and writes the user's turns itself. In both cases there is one conversation that only grows,
  and a callback answers each of the agent's turns. All messages are recorded in the trace of `verifiers`, which its
  stops, rewards and metrics read.
- `VerifiersEpisode` turns the calls of the agent into `reset` and `step`.
- `VerifiersSampler` is the sampler.
"""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from importlib import import_module
from types import SimpleNamespace
from typing import Annotated, ClassVar, Protocol

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.integrations.gym_environment_sampler import NOT_SOLVED, SOLVED, Environment, EnvironmentSampler
from repl_rl.integrations.verifiers_tasks import VERIFIERS, EnvironmentTask, VerifiersEnvironment, load_environment
from repl_rl.rollout.chat_template import Message
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.samplers.chat_format import ChatFormat
from repl_rl.samplers.tool_call_parsing import (
    Toolbox,
    ToolCall,
    ToolCallParser,
    ToolFunction,
    ToolResult,
    detect_call_parser,
    find_wrong_argument,
    validate_tool_schema,
)
from repl_rl.settings.value_bounds import Above
from repl_rl.tasks import Split, Task
from repl_rl.trajectory.trajectory import Line, LineEnd, Prompt


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


@dataclass(frozen=True, slots=True)
class AgentReply:
    """Turn of the policy."""

    text: str
    calls: tuple[ToolCall | ToolResult, ...] = ()
    """Tool calls in order, with an error result for each unreadable one."""
    truncated: bool = False
    """True if a budget ended the turn early. None of its calls is run."""


AnswerFn = Callable[[Sequence[Message]], Awaitable[AgentReply | None]]
"""Function that answers the messages since the last turn. None means that no further turn is possible."""


class MissingRuntime:
    """Placeholder for a runtime of `verifiers`, in which an environment runs programs."""

    def __init__(self, thing: str) -> None:
        self._thing = thing

    def __getattr__(self, name: str) -> object:
        raise UserCodeError(f"the {self._thing} asks its runtime for {name!r}; there is none here, play another")


@dataclass(frozen=True, slots=True)
class InteractionResult:
    """Counterpart of the result of `Interaction.turn` in `verifiers`: the messages up to the user's next turn."""

    messages: Sequence[object]
    last_reply: str = ""
    terminated: bool = False
    """True if there is no message, because the conversation is over."""
    root_reply: str | None = None


class Trace(Protocol):
    """Record of an episode in `verifiers`, with the members that are used here."""

    state: object
    calls: list[object]
    stop_condition: str | None
    is_completed: bool
    ok: bool
    reward: float
    rewards: Mapping[str, "Reward | None"]
    metrics: Mapping[str, float | None]

    def stop(self, condition: str) -> None:
        """End the episode. The first reason is kept."""


class Reward(Protocol):
    """Part of a trace's reward."""

    value: float
    """Score times weight."""


class VerifiersInteraction:
    """Conversation of one episode of a verifiers environment, with the trace that records it."""

    def __init__(
        self, installed: VerifiersEnvironment, task: EnvironmentTask, answers: AnswerFn, timeout_s: float
    ) -> None:
        """Create the trace of the conversation, and its tools.

        Raises:
            ConfigError: as `VerifiersTools`.
        """
        v1 = installed.verifiers_v1
        self._installed = installed
        self._task = task
        self._answers = answers
        about = v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        state = installed.import_submodule("state").state_cls(type(task))()
        made: Trace = v1.Trace(
            task=about, agent=v1.AgentInfo(config=v1.AgentConfig(), name=installed.agent_name), state=state
        )
        self.trace = made
        self._tools = VerifiersTools(installed, task, state, timeout_s)
        self._messages: list[object] = []
        # Index of the first message that the policy has not received.
        self._first_unsent = 0
        self._runtime = MissingRuntime(installed.label)

    async def open(self) -> None:
        """Prepare the tools and the task before the first turn."""
        for toolset in self._tools.toolsets:
            await toolset.setup()
            await toolset.setup_task(self._task.data)
        await self._call_hook(self._task.setup)

    async def turn(self, message: object = None) -> InteractionResult:
        """Sample the policy's turn, and further ones while it calls tools.

        Args:
            message: the user's text or messages before the turn, or None. The task's prompt precedes the first turn.
        """
        if not self._messages:
            self._messages += build_opening_messages(self._installed, self._task)
        if message is not None:
            self._messages += self._convert_messages(message)
        begun, text = len(self._messages), None
        while await self._may_continue():
            # Send only the messages since the last turn.
            reply = await self._answers([convert_message(each) for each in self._messages[self._first_unsent :]])
            # `verifiers` has this stop condition for an exhausted budget.
            if reply is None:
                self.trace.stop("max_total_tokens")
                break
            text = reply.text
            self._append_reply(reply)
            if reply.truncated or not reply.calls:
                break
            for number, call in enumerate(reply.calls):
                result, id = await self._tools.run(call), _make_call_id(self._first_unsent, number)
                self._messages.append(
                    self._installed.verifiers_v1.ToolMessage(
                        tool_call_id=id, content=result, name=_format_call_name(call)
                    )
                )
        if text is None:
            return InteractionResult((), terminated=True)
        return InteractionResult(self._messages[begun:], text.strip())

    async def close(self) -> None:
        """Finish the episode after the last turn and score it."""
        await self._call_hook(self._task.finalize)
        await self._task.score(self.trace, self._runtime)
        self.trace.is_completed = self.trace.ok = True

    async def _call_hook(self, hook: Callable[..., Awaitable[None]]) -> None:
        """Call a hook of the task with the arguments that it requests by name."""
        given = {"trace": self.trace, "runtime": self._runtime}
        await self._installed.import_submodule("utils.decorators").invoke(hook, given)

    async def _may_continue(self) -> bool:
        """Return True if another turn is possible, because no stop condition of the task holds."""
        for stop in self._task.hooks("stop") if self.trace.stop_condition is None else ():
            # Stop conditions may be plain or async.
            found = self._installed.import_submodule("utils.decorators").invoke(
                stop, {self._installed.verifiers_v1.Trace: self.trace}
            )
            if await found if inspect.isawaitable(found) else found:
                self.trace.stop(stop.__name__)
        return self.trace.stop_condition is None

    def _append_reply(self, reply: AgentReply) -> None:
        """Add the policy's turn to the conversation and to its trace."""
        v1 = self._installed.verifiers_v1
        # The ids of the calls and of their results are made from the position of the turn.
        calls = [
            v1.ToolCall(
                id=_make_call_id(len(self._messages) + 1, number),
                name=_format_call_name(call),
                arguments=_format_call_arguments(call),
            )
            for number, call in enumerate(reply.calls)
        ]
        message = v1.AssistantMessage(content=reply.text, tool_calls=calls or None)
        reason = "length" if reply.truncated else "tool_calls" if calls else "stop"
        tools = [v1.Tool.model_validate(schema["function"]) for schema in self._tools.schemas.values()]
        # Record the turn in the trace like the response of a model.
        pending = self._installed.import_submodule("graph").prepare_turn(self.trace, list(self._messages), tools)
        node = pending.commit(v1.Response(id="", created=0, model="policy", message=message, finish_reason=reason))
        self.trace.calls.append(self._installed.import_submodule("trace").ModelCall(node=node, finish_reason=reason))
        self._messages.append(message)
        self._first_unsent = len(self._messages)

    def _convert_messages(self, message: object) -> list[object]:
        """Return a text or messages of the env as messages of `verifiers`."""
        if isinstance(message, str):
            return [self._installed.verifiers_v1.UserMessage(content=message)]
        if not isinstance(message, Sequence):
            raise UserCodeError(f"the {self._installed.label} says {message!r:.80} in a turn; say a text, or messages")
        parse = self._installed.import_submodule("dialects").parse_message
        return [parse(each) if isinstance(each, dict) else each for each in message]


class VerifiersAgent:
    """Object that an env calls as its agent."""

    def __init__(self, installed: VerifiersEnvironment, answers: AnswerFn, timeout_s: float) -> None:
        self._installed, self._answers, self._timeout_s = installed, answers, timeout_s
        self.interactions: list[VerifiersInteraction] = []
        self.trainable = True

    async def run(self, task: EnvironmentTask) -> Trace:
        """Play a whole conversation, from the prompt of `task` to the first turn that calls no tool."""
        async with self.interaction(task) as talk:
            await talk.turn()
            talk.trace.stop("agent_completed")
        return talk.trace

    @asynccontextmanager
    async def interaction(self, task: EnvironmentTask) -> AsyncIterator[VerifiersInteraction]:
        """Open a conversation in which the env is the user."""
        # A rollout records a single sequence of ids.
        if self.interactions:
            raise UserCodeError(f"the {self._installed.label} begins a second conversation; a rollout is one")
        talk = VerifiersInteraction(self._installed, task, self._answers, self._timeout_s)
        self.interactions.append(talk)
        await talk.open()
        yield talk
        talk.trace.stop("user_closed")
        await talk.close()


async def play_episode(
    installed: VerifiersEnvironment, task: EnvironmentTask, answers: AnswerFn, timeout_s: float
) -> Trace:
    """Play one episode and return the trace of its only conversation, with rewards.

    Raises: any error of the environment's code.
    """
    v1, seat = installed.verifiers_v1, VerifiersAgent(installed, answers, timeout_s)
    agents = SimpleNamespace(**{installed.agent_name: seat})
    about = v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    await installed.env.setup(agents)
    await installed.env.run(task, agents)
    if not seat.interactions:
        raise UserCodeError(f"the {installed.label} asked its agent nothing")
    (talk,) = seat.interactions
    episode = v1.Episode(env=v1.EnvInfo(id=installed.name), task=about)
    episode.traces.append(talk.trace)
    # The env may still add rewards to the trace of the finished episode.
    await installed.env.finalize(task, episode)
    return talk.trace


def build_opening_messages(installed: VerifiersEnvironment, task: EnvironmentTask) -> list[object]:
    """Return the first messages of a conversation as those of `verifiers`: a system message, if any, and the prompt."""
    v1, prompt, system = installed.verifiers_v1, task.data.prompt, task.data.system_prompt
    head = [v1.SystemMessage(content=system)] if system else []
    return [*head, *(prompt if isinstance(prompt, list) else [v1.UserMessage(content=prompt)])]


def convert_message(message: object) -> Message:
    """Convert a message of `verifiers` to one for chat templates."""
    content = getattr(message, "content", None)
    # Content may be a list of parts; only those with text count.
    parts = content if isinstance(content, list) else []
    text = "\n".join(part.text for part in parts if hasattr(part, "text")) if parts else str(content or "")
    return {"role": str(getattr(message, "role", "user")), "content": text}


def _format_call_name(call: ToolCall | ToolResult) -> str:
    return call.name if isinstance(call, ToolCall) else "unreadable"


def _format_call_arguments(call: ToolCall | ToolResult) -> str:
    return json.dumps(dict(call.kwargs) if isinstance(call, ToolCall) else {}, default=str)


def _make_call_id(turn: int, number: int) -> str:
    return f"call-{turn}-{number}"


class VerifiersEpisode:
    """One episode of an environment, with `reset` and `step`.

    An observation is the list of messages since the last turn.
    """

    def __init__(self, environment: VerifiersEnvironment, task: EnvironmentTask, tool_timeout_s: float) -> None:
        self._environment, self._task, self._tool_timeout_s = environment, task, tool_timeout_s
        self._asked: asyncio.Queue[list[Message]] = asyncio.Queue()
        self._replies: asyncio.Queue[AgentReply | None] = asyncio.Queue()
        self._running: asyncio.Task[Trace] | None = None
        self.trace: Trace | None = None
        """Record of the episode with its rewards. None means that the episode has not ended."""

    async def reset(self) -> list[Message]:
        """Start the episode and return the messages before the first turn.

        Raises:
            UserCodeError: the environment raised, or its first messages differ from those of its task.
        """
        episode = play_episode(self._environment, self._task, self._exchange_turn, self._tool_timeout_s)
        # The env calls its agent, so it runs in a task, and two queues turn its calls into `reset` and `step`.
        self._running = asyncio.create_task(episode, name=self._environment.label)
        first = await self._receive_messages()
        expected = [convert_message(message) for message in build_opening_messages(self._environment, self._task)]
        if first != expected:
            problem = f"the {self._environment.label} begins with {first!r:.80}, its task with {expected!r:.80}"
            raise UserCodeError(f"{problem}; the rollouts of a task share one prompt")
        return first

    async def step(self, action: object) -> list[Message]:
        """Send `action`, an `AgentReply`, and return the messages that answer it.

        None as `action` ends the conversation. An empty list means that the episode is over.

        Raises:
            UserCodeError: the environment raised.
        """
        assert isinstance(action, AgentReply | None)
        await self._replies.put(action)
        return await self._receive_messages()

    async def close(self) -> None:
        """Cancel the episode if it still runs."""
        if self._running is not None and not self._running.done():
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _exchange_turn(self, messages: Sequence[Message]) -> AgentReply | None:
        """Pass the env's messages to the sampler, and wait for the policy's turn."""
        await self._asked.put(list(messages))
        return await self._replies.get()

    async def _receive_messages(self) -> list[Message]:
        """Return the next messages of the env, or an empty list at the end of the episode."""
        assert self._running is not None
        asked = asyncio.ensure_future(self._asked.get())
        try:
            # Wait for the next request of the env, or for the end of the episode.
            await asyncio.wait({asked, self._running}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
        finally:
            asked.cancel()
        try:
            self.trace = self._running.result()
        except Exception as error:
            raise self._environment.make_error(error, "playing it") from error
        return []


class VerifiersSampler(EnvironmentSampler):
    """Sampler for an environment of `verifiers`. The outcome is its reward, with one part per reward function.

    If a budget ends a rollout, the conversation so far is scored, as in `verifiers`. Otherwise `solved` or `not solved`
    is submitted at the end; a reward of at least `solved_at` counts as solved.
    """

    kind: ClassVar[str] = VERIFIERS
    about: ClassVar[str] = "plays --tasks verifiers:NAME"

    def __init__(
        self,
        environment: str,
        *,
        chat: bool = True,
        solved_at: float = 1.0,
        tool_timeout_s: Annotated[float, Above(0)] = 10.0,
    ) -> None:
        """Load the environment.

        Args:
            environment: its name, as behind `--tasks verifiers:`, which sets this option.
            chat: True uses the model's chat format for turns and messages. False uses one line per turn, and plain
                lines as messages.
            solved_at: reward that counts as solved.
            tool_timeout_s: wall clock of one tool call, seconds (> 0).

        Raises:
            ConfigError, UserCodeError: as `VerifiersEnvironment`.
        """
        super().__init__(self._start_episode, chat=chat, solved_at=solved_at, per_turn=False)
        self.environment = load_environment(environment)
        self.tool_timeout_s = tool_timeout_s
        self._known: tuple[Renderer, ChatFormat, ToolCallParser | None] | None = None

    async def make_tasks(self, count: int) -> list[Task]:
        """See `EnvironmentSampler.make_tasks`. The list is shorter if the environment has fewer."""
        return list(self.environment.draw_tasks(Split.ALL, count, count))

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        own = self._find_environment_task(task)
        # The probe task of a check, which no environment knows.
        if own is None:
            return super().prompt(task, renderer, template, version)
        messages = [convert_message(message) for message in build_opening_messages(self.environment, own)]
        if self.chat:
            return self._get_format(renderer)[0].build_prompt(messages)
        return renderer.build_plain_prompt("".join(f"{message['content']}\n" for message in messages))

    def check_policy(self, renderer: Renderer, template: str) -> None:
        """See `RolloutSampler.check_policy`. If the environment has tools, their calls must be read and answered."""
        super().check_policy(renderer, template)
        if self._tool_schemas and not self.chat:
            remedy = f"the {self.environment.label} has tools, which are called in a chat; leave it out"
            raise ConfigError("chat", False, remedy)
        if self._tool_schemas:
            self._get_format(renderer)[0].encode_reply(
                [{"role": "tool", "content": "?"}], 16, [next(iter(self._tool_schemas))]
            )

    async def _play(self, episode: Episode, environment: Environment) -> None:
        """Alternate the policy's turns and the env's messages, then set the outcome from the trace."""
        assert isinstance(environment, VerifiersEpisode)
        # An empty list ends the loop, so it starts with a placeholder.
        messages: list[Message] = [{}]
        while messages and not episode.ended:
            reply = self._parse_reply(episode, await (episode.sample_turn() if self.chat else episode.sample()))
            messages = await environment.step(reply)
            if messages and not episode.ended:
                self._append_messages(episode, reply, messages)
        # An empty answer means that the env has ended the conversation, not a budget.
        whole = not messages
        if messages:
            await environment.step(None)
        assert environment.trace is not None
        parts = {name: part.value for name, part in environment.trace.rewards.items() if part is not None}
        # The first part sets the outcome, and the others are added.
        for number, (name, value) in enumerate((parts or {"environment": 0.0}).items()):
            episode.set_outcome(value, name=name, add=number > 0)
        if whole and not episode.ended:
            episode.submit(SOLVED if environment.trace.reward >= self.solved_at else NOT_SOLVED)

    def _start_episode(self, task: Task) -> Environment:
        own = self._find_environment_task(task)
        if own is None:
            remedy = f"{type(self).__name__} plays the {self.environment.label} alone"
            raise ConfigError("task", task.id, remedy)
        return VerifiersEpisode(self.environment, own, self.tool_timeout_s)

    def _find_environment_task(self, task: Task) -> EnvironmentTask | None:
        """Return the task of the environment, or None for a task from another source."""
        number = task.fields.get("number")
        ours = task.fields.get("environment") == self.environment.reference and isinstance(number, int)
        return self.environment.get_task(number) if ours and isinstance(number, int) else None

    def _parse_reply(self, episode: Episode, line: Line) -> AgentReply:
        """Return the turn with its calls. A truncated turn has none."""
        cut = line.end is LineEnd.LENGTH
        reader = self._get_format(episode.renderer)[1] if self._tool_schemas else None
        return AgentReply(line.text.strip(), tuple(reader.parse(line.text)) if reader and not cut else (), cut)

    def _append_messages(self, episode: Episode, reply: AgentReply, messages: Sequence[Message]) -> None:
        """Splice the environment's messages in."""
        if not self.chat:
            episode.observe("".join(f"{message['content']}\n" for message in messages))
            return
        chat = self._get_format(episode.renderer)[0]
        first = next(iter(self._tool_schemas), "")
        # An unknown name never enters the template's text, so the first tool's name replaces it.
        names = [
            call.name if isinstance(call, ToolCall) and call.name in self._tool_schemas else first
            for call in reply.calls
        ]
        episode.observe(chat.encode_reply(messages, episode.limits.max_observation_tokens, names))

    @cached_property
    def _tool_schemas(self) -> Mapping[str, Mapping[str, object]]:
        """Schemas of its tools, by name."""
        first = self.environment.get_task(0)
        if first is None:
            raise ConfigError(self.environment.label, "one without tasks", "name another")
        return VerifiersTools(self.environment, first).schemas

    def _get_format(self, renderer: Renderer) -> tuple[ChatFormat, ToolCallParser | None]:
        """Return the chat format of a policy and the reader of its tool calls, if any. They are computed once."""
        if self._known is None or self._known[0] is not renderer:
            chat = ChatFormat(renderer, tuple(self._tool_schemas.values()))
            self._known = renderer, chat, detect_call_parser(chat) if self._tool_schemas else None
        return self._known[1:]
