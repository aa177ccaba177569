"""The agent of an environment of `verifiers`, which a policy is: what the environment calls, turn by turn.

An env says `agents.NAME.run(task)`, or opens an `interaction` and says the user's turns itself. Here both end in one
conversation that only grows, and whoever answers its turns is asked for each. What is said is written into the trace of
`verifiers`, which its stops, rewards and metrics read.
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
    """What the policy said in a turn."""

    text: str
    calls: tuple[Call | CallResult, ...] = ()
    """Tools that it calls, in order; one that cannot be read is told so."""
    cut: bool = False
    """A budget ended it in the middle: none of its calls is run."""


Answers = Callable[[Sequence[Message]], Awaitable[Reply | None]]
"""Answers what was said since the turn before; None: no further turn may be taken."""


class NoRuntime:
    """What stands in the place of a runtime of `verifiers`, in which an environment runs programs."""

    def __init__(self, thing: str) -> None:
        self._thing = thing

    def __getattr__(self, name: str) -> object:
        raise UserCodeError(f"the {self._thing} asks its runtime for {name!r}; there is none here, play another")


@dataclass(frozen=True, slots=True)
class Segment:
    """What `Interaction.turn` returns there: what was said until the user has the word."""

    messages: Sequence[object]
    last_reply: str = ""
    terminated: bool = False
    """Nothing was said: the conversation is over."""
    root_reply: str | None = None


class Trace(Protocol):
    """The record of an episode in `verifiers`, as far as it is used here."""

    state: object
    calls: list[object]
    stop_condition: str | None
    is_completed: bool
    ok: bool
    reward: float
    rewards: Mapping[str, "Reward | None"]
    metrics: Mapping[str, float | None]

    def stop(self, condition: str) -> None:
        """It is over; the first reason stands."""


class Reward(Protocol):
    """A part of a trace's reward."""

    value: float
    """Its score times its weight."""


class Talk:
    """A conversation of one episode, with its trace: what envs call an interaction."""

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
        """What comes before the first turn."""
        for toolset in self._tools.toolsets:
            await toolset.setup()
            await toolset.setup_task(self._task.data)
        await self._hook(self._task.setup)

    async def turn(self, message: object = None) -> Segment:
        """The policy's turn, and further ones as long as it calls tools.

        Args:
            message: what the user says before it, a text or messages; None: the task's prompt is the beginning.
        """
        if not self._said:
            self._said += opening(self._installed, self._task)
        if message is not None:
            self._said += self._typed(message)
        begun, text = len(self._said), None
        while await self._goes_on():
            reply = await self._answers([plain(said) for said in self._said[self._untold :]])
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
        """What comes after the last turn: it is scored."""
        await self._hook(self._task.finalize)
        await self._task.score(self.trace, self._runtime)
        self.trace.is_completed = self.trace.ok = True

    async def _hook(self, hook: Callable[..., Awaitable[None]]) -> None:
        """Call it with what it asks for by name."""
        given = {"trace": self.trace, "runtime": self._runtime}
        await self._installed.part("utils.decorators").invoke(hook, given)

    async def _goes_on(self) -> bool:
        """Whether another turn may be taken: no stop of the task says otherwise."""
        for stop in self._task.hooks("stop") if self.trace.stop_condition is None else ():
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
                arguments=json.dumps(getattr(call, "kwargs", {})),
            )
            for number, call in enumerate(reply.calls)
        ]
        message = v1.AssistantMessage(content=reply.text, tool_calls=calls or None)
        reason = "length" if reply.cut else "tool_calls" if calls else "stop"
        tools = [v1.Tool.model_validate(schema["function"]) for schema in self._tools.schemas.values()]
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
    """What an env calls as its agent."""

    def __init__(self, installed: Installed, answers: Answers, timeout_s: float) -> None:
        self._installed, self._answers, self._timeout_s = installed, answers, timeout_s
        self.talks: list[Talk] = []
        self.trainable = True

    async def run(self, task: EnvironmentTask) -> Trace:
        """A whole conversation, from the prompt of `task` to the first turn that calls no tool."""
        async with self.interaction(task) as talk:
            await talk.turn()
            talk.trace.stop("agent_completed")
        return talk.trace

    @asynccontextmanager
    async def interaction(self, task: EnvironmentTask) -> AsyncIterator[Talk]:
        """A conversation in which the env is the user."""
        if self.talks:
            raise UserCodeError(f"the {self._installed.thing} begins a second conversation; a rollout is one")
        talk = Talk(self._installed, task, self._answers, self._timeout_s)
        self.talks.append(talk)
        await talk.open()
        yield talk
        talk.trace.stop("user_closed")
        await talk.close()


async def play(installed: Installed, task: EnvironmentTask, answers: Answers, timeout_s: float) -> Trace:
    """One episode. Returns the trace of its one conversation, with rewards.

    Raises: whatever code of the environment raises.
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
    await installed.env.finalize(task, episode)
    return talk.trace


def opening(installed: Installed, task: EnvironmentTask) -> list[object]:
    """The messages that a conversation begins with, in its words: the system's, where there is one, and the prompt."""
    v1, prompt, system = installed.v1, task.data.prompt, task.data.system_prompt
    head = [v1.SystemMessage(content=system)] if system else []
    return [*head, *(prompt if isinstance(prompt, list) else [v1.UserMessage(content=prompt)])]


def plain(message: object) -> Message:
    """A message of `verifiers` as chat templates take it."""
    content = getattr(message, "content", None)
    parts = content if isinstance(content, list) else []
    text = "\n".join(part.text for part in parts if hasattr(part, "text")) if parts else str(content or "")
    return {"role": str(getattr(message, "role", "user")), "content": text}


def _called(call: Call | CallResult) -> str:
    return call.name if isinstance(call, Call) else "unreadable"


def _arguments(call: Call | CallResult) -> str:
    return json.dumps(dict(call.kwargs) if isinstance(call, Call) else {}, default=str)


def _id(turn: int, number: int) -> str:
    return f"call-{turn}-{number}"
