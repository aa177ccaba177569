"""Agent of a `verifiers` environment, whose turns the policy writes. The environment calls it turn by turn.

An env calls `agents.NAME.run(task)`, or opens an `interaction` and writes the user's turns itself. In both cases there
is one conversation that only grows, and a callback answers each of the agent's turns. All messages are recorded in the
trace of `verifiers`, which its stops, rewards and metrics read.
"""

import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Protocol

from repl_rl.errors import UserCodeError
from repl_rl.rollout.chat_template import Message
from repl_rl.samplers.tool_call_parsing import ToolCall, ToolResult
from repl_rl.samplers.verifiers_tools import VerifiersTools
from repl_rl.tasks.environments import EnvironmentTask, VerifiersEnvironment


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
    """Conversation of one episode with its trace. Envs call it an interaction."""

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
