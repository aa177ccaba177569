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
from repl_rl.samplers.tools import Call, CallResult
from repl_rl.samplers.verifiers_tools import Tools
from repl_rl.tasks.environments import EnvironmentTask, Installed


@dataclass(frozen=True, slots=True)
class Reply:
    """Turn of the policy."""

    text: str
    calls: tuple[Call | CallResult, ...] = ()
    """Tool calls in order, with an error result for each unreadable one."""
    cut: bool = False
    """True if a budget ended the turn early. None of its calls is run."""


Answers = Callable[[Sequence[Message]], Awaitable[Reply | None]]
"""Function that answers the messages since the last turn. None means that no further turn is possible."""


class NoRuntime:
    """Placeholder for a runtime of `verifiers`, in which an environment runs programs."""

    def __init__(self, thing: str) -> None:
        self._thing = thing

    def __getattr__(self, name: str) -> object:
        raise UserCodeError(f"the {self._thing} asks its runtime for {name!r}; there is none here, play another")


@dataclass(frozen=True, slots=True)
class Segment:
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


class Talk:
    """Conversation of one episode with its trace. Envs call it an interaction."""

    def __init__(self, installed: Installed, task: EnvironmentTask, answers: Answers, timeout_s: float) -> None:
        """Raises: as `Tools`."""
        v1 = installed.v1
        self._installed = installed
        self._task = task
        self._answers = answers
        about = v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        state = installed.part("state").state_cls(type(task))()
        made: Trace = v1.Trace(
            task=about, agent=v1.AgentInfo(config=v1.AgentConfig(), name=installed.seat), state=state
        )
        self.trace = made
        self._tools = Tools(installed, task, state, timeout_s)
        self._said: list[object] = []
        self._untold = 0
        self._runtime = NoRuntime(installed.thing)

    async def open(self) -> None:
        """Prepare the tools and the task before the first turn."""
        for toolset in self._tools.toolsets:
            await toolset.setup()
            await toolset.setup_task(self._task.data)
        await self._hook(self._task.setup)

    async def turn(self, message: object = None) -> Segment:
        """Sample the policy's turn, and further ones while it calls tools.

        Args:
            message: the user's text or messages before the turn, or None. The task's prompt precedes the first turn.
        """
        if not self._said:
            self._said += opening(self._installed, self._task)
        if message is not None:
            self._said += self._typed(message)
        begun, text = len(self._said), None
        while await self._goes_on():
            # Send only the messages since the last turn.
            reply = await self._answers([plain(said) for said in self._said[self._untold :]])
            # `verifiers` has this stop condition for an exhausted budget.
            if reply is None:
                self.trace.stop("max_total_tokens")
                break
            text = reply.text
            self._commit(reply)
            if reply.cut or not reply.calls:
                break
            for number, call in enumerate(reply.calls):
                told, id = await self._tools.run(call), _id(self._untold, number)
                self._said.append(self._installed.v1.ToolMessage(tool_call_id=id, content=told, name=_called(call)))
        if text is None:
            return Segment((), terminated=True)
        return Segment(self._said[begun:], text.strip())

    async def close(self) -> None:
        """Finish the episode after the last turn and score it."""
        await self._hook(self._task.finalize)
        await self._task.score(self.trace, self._runtime)
        self.trace.is_completed = self.trace.ok = True

    async def _hook(self, hook: Callable[..., Awaitable[None]]) -> None:
        """Call a hook of the task with the arguments that it requests by name."""
        given = {"trace": self.trace, "runtime": self._runtime}
        await self._installed.part("utils.decorators").invoke(hook, given)

    async def _goes_on(self) -> bool:
        """Return True if another turn is possible, because no stop condition of the task holds."""
        for stop in self._task.hooks("stop") if self.trace.stop_condition is None else ():
            # Stop conditions may be plain or async.
            found = self._installed.part("utils.decorators").invoke(stop, {self._installed.v1.Trace: self.trace})
            if await found if inspect.isawaitable(found) else found:
                self.trace.stop(stop.__name__)
        return self.trace.stop_condition is None

    def _commit(self, reply: Reply) -> None:
        v1 = self._installed.v1
        calls = [
            v1.ToolCall(
                id=_id(len(self._said) + 1, number),
                name=_called(call),
                arguments=_arguments(call),
            )
            for number, call in enumerate(reply.calls)
        ]
        message = v1.AssistantMessage(content=reply.text, tool_calls=calls or None)
        reason = "length" if reply.cut else "tool_calls" if calls else "stop"
        tools = [v1.Tool.model_validate(schema["function"]) for schema in self._tools.schemas.values()]
        # Record the turn in the trace like the response of a model.
        pending = self._installed.part("graph").prepare_turn(self.trace, list(self._said), tools)
        node = pending.commit(v1.Response(id="", created=0, model="policy", message=message, finish_reason=reason))
        self.trace.calls.append(self._installed.part("trace").ModelCall(node=node, finish_reason=reason))
        self._said.append(message)
        self._untold = len(self._said)

    def _typed(self, message: object) -> list[object]:
        if isinstance(message, str):
            return [self._installed.v1.UserMessage(content=message)]
        if not isinstance(message, Sequence):
            raise UserCodeError(f"the {self._installed.thing} says {message!r:.80} in a turn; say a text, or messages")
        parse = self._installed.part("dialects").parse_message
        return [parse(each) if isinstance(each, dict) else each for each in message]


class Seat:
    """Object that an env calls as its agent."""

    def __init__(self, installed: Installed, answers: Answers, timeout_s: float) -> None:
        self._installed, self._answers, self._timeout_s = installed, answers, timeout_s
        self.talks: list[Talk] = []
        self.trainable = True

    async def run(self, task: EnvironmentTask) -> Trace:
        """Play a whole conversation, from the prompt of `task` to the first turn that calls no tool."""
        async with self.interaction(task) as talk:
            await talk.turn()
            talk.trace.stop("agent_completed")
        return talk.trace

    @asynccontextmanager
    async def interaction(self, task: EnvironmentTask) -> AsyncIterator[Talk]:
        """Open a conversation in which the env is the user."""
        # A rollout records a single sequence of ids.
        if self.talks:
            raise UserCodeError(f"the {self._installed.thing} begins a second conversation; a rollout is one")
        talk = Talk(self._installed, task, self._answers, self._timeout_s)
        self.talks.append(talk)
        await talk.open()
        yield talk
        talk.trace.stop("user_closed")
        await talk.close()


async def play(installed: Installed, task: EnvironmentTask, answers: Answers, timeout_s: float) -> Trace:
    """Play one episode and return the trace of its only conversation, with rewards.

    Raises: any error of the environment's code.
    """
    v1, seat = installed.v1, Seat(installed, answers, timeout_s)
    agents = SimpleNamespace(**{installed.seat: seat})
    about = v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    await installed.env.setup(agents)
    await installed.env.run(task, agents)
    if not seat.talks:
        raise UserCodeError(f"the {installed.thing} asked its agent nothing")
    (talk,) = seat.talks
    episode = v1.Episode(env=v1.EnvInfo(id=installed.name), task=about)
    episode.traces.append(talk.trace)
    # The env may still add rewards to the trace of the finished episode.
    await installed.env.finalize(task, episode)
    return talk.trace


def opening(installed: Installed, task: EnvironmentTask) -> list[object]:
    """Return the first messages of a conversation as those of `verifiers`: a system message, if any, and the prompt."""
    v1, prompt, system = installed.v1, task.data.prompt, task.data.system_prompt
    head = [v1.SystemMessage(content=system)] if system else []
    return [*head, *(prompt if isinstance(prompt, list) else [v1.UserMessage(content=prompt)])]


def plain(message: object) -> Message:
    """Convert a message of `verifiers` to one for chat templates."""
    content = getattr(message, "content", None)
    # Content may be a list of parts; only those with text count.
    parts = content if isinstance(content, list) else []
    text = "\n".join(part.text for part in parts if hasattr(part, "text")) if parts else str(content or "")
    return {"role": str(getattr(message, "role", "user")), "content": text}


def _called(call: Call | CallResult) -> str:
    return call.name if isinstance(call, Call) else "unreadable"


def _arguments(call: Call | CallResult) -> str:
    return json.dumps(dict(call.kwargs) if isinstance(call, Call) else {}, default=str)


def _id(turn: int, number: int) -> str:
    return f"call-{turn}-{number}"
