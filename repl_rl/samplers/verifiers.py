"""Sampler for environments of the package `verifiers`. They decide the order of turns and give the rewards."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.record.trajectory import Line, LineEnd, Prompt
from repl_rl.rollout.chat_template import Message
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.renderer import Renderer
from repl_rl.samplers.chat import ChatFormat
from repl_rl.samplers.environment import NOT_SOLVED, SOLVED, Environment, EnvironmentSampler
from repl_rl.samplers.tool_format import Reader, detect
from repl_rl.samplers.tools import Call
from repl_rl.samplers.verifiers_seat import Reply, Trace, opening, plain, play
from repl_rl.samplers.verifiers_tools import Tools
from repl_rl.settings.bounds import Above
from repl_rl.tasks import Split, Task
from repl_rl.tasks.environments import EnvironmentTask, Installed, installed


class Played:
    """One episode of an environment, with `reset` and `step`.

    An observation is the list of messages since the last turn.
    """

    def __init__(self, environment: Installed, task: EnvironmentTask, tool_timeout_s: float) -> None:
        self._environment, self._task, self._tool_timeout_s = environment, task, tool_timeout_s
        self._asked: asyncio.Queue[list[Message]] = asyncio.Queue()
        self._replies: asyncio.Queue[Reply | None] = asyncio.Queue()
        self._running: asyncio.Task[Trace] | None = None
        self.trace: Trace | None = None
        """Record of the episode with its rewards. None means that the episode has not ended."""

    async def reset(self) -> list[Message]:
        """Start the episode and return the messages before the first turn.

        Raises:
            UserCodeError: the environment raised, or its first messages differ from those of its task.
        """
        episode = play(self._environment, self._task, self._reply_to, self._tool_timeout_s)
        # The env calls its agent, so it runs in a task, and two queues turn its calls into `reset` and `step`.
        self._running = asyncio.create_task(episode, name=self._environment.thing)
        first = await self._next()
        expected = [plain(message) for message in opening(self._environment, self._task)]
        if first != expected:
            told = f"the {self._environment.thing} begins with {first!r:.80}, its task with {expected!r:.80}"
            raise UserCodeError(f"{told}; the rollouts of a task share one prompt")
        return first

    async def step(self, action: object) -> list[Message]:
        """Send `action`, a `Reply`, and return the messages that answer it.

        None as `action` ends the conversation. An empty list means that the episode is over.

        Raises:
            UserCodeError: the environment raised.
        """
        assert isinstance(action, Reply | None)
        await self._replies.put(action)
        return await self._next()

    async def close(self) -> None:
        """Cancel the episode if it still runs."""
        if self._running is not None and not self._running.done():
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _reply_to(self, messages: Sequence[Message]) -> Reply | None:
        await self._asked.put(list(messages))
        return await self._replies.get()

    async def _next(self) -> list[Message]:
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
            raise self._environment.explained(error, "playing it") from error
        return []


class VerifiersSampler(EnvironmentSampler):
    """Sampler for an environment of `verifiers`. The outcome is its reward, with one part per reward function.

    If a budget ends a rollout, the conversation so far is scored, as in `verifiers`. Otherwise `solved` or `not solved`
    is submitted at the end; a reward of at least `solved_at` counts as solved.
    """

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
            ConfigError, UserCodeError: as `Installed`.
        """
        super().__init__(self._begin, chat=chat, solved_at=solved_at, per_turn=False)
        self.environment = installed(environment)
        self.tool_timeout_s = tool_timeout_s
        self._known: tuple[Renderer, ChatFormat, Reader | None] | None = None

    async def tasks(self, count: int) -> list[Task]:
        """See `EnvironmentSampler.tasks`. The list is shorter if the environment has fewer."""
        return list(self.environment.drawn(Split.ALL, count, count))

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        own = self._own(task)
        # The probe task of a check, which no environment knows.
        if own is None:
            return super().prompt(task, renderer, template, version)
        messages = [plain(message) for message in opening(self.environment, own)]
        if self.chat:
            return self._format(renderer)[0].prompt(messages)
        return renderer.plain_prompt("".join(f"{message['content']}\n" for message in messages))

    def check_policy(self, renderer: Renderer, template: str) -> None:
        """See `RolloutSampler.check_policy`. If the environment has tools, their calls must be read and answered."""
        super().check_policy(renderer, template)
        if self._schemas and not self.chat:
            remedy = f"the {self.environment.thing} has tools, which are called in a chat; leave it out"
            raise ConfigError("chat", False, remedy)
        if self._schemas:
            self._format(renderer)[0].reply([{"role": "tool", "content": "?"}], 16, [next(iter(self._schemas))])

    async def _play(self, episode: Episode, environment: Environment) -> None:
        assert isinstance(environment, Played)
        told: list[Message] = [{}]
        while told and not episode.ended:
            reply = self._reply(episode, await (episode.turn() if self.chat else episode.sample()))
            told = await environment.step(reply)
            if told and not episode.ended:
                self._say(episode, reply, told)
        # An empty answer means that the env has ended the conversation, not a budget.
        whole = not told
        if told:
            await environment.step(None)
        assert environment.trace is not None
        parts = {name: part.value for name, part in environment.trace.rewards.items() if part is not None}
        # The first part sets the outcome, and the others are added.
        for number, (name, value) in enumerate((parts or {"environment": 0.0}).items()):
            episode.outcome(value, name=name, add=number > 0)
        if whole and not episode.ended:
            episode.submit(SOLVED if environment.trace.reward >= self.solved_at else NOT_SOLVED)

    def _begin(self, task: Task) -> Environment:
        own = self._own(task)
        if own is None:
            remedy = f"{type(self).__name__} plays the {self.environment.thing} alone"
            raise ConfigError("task", task.id, remedy)
        return Played(self.environment, own, self.tool_timeout_s)

    def _own(self, task: Task) -> EnvironmentTask | None:
        """Return the task of the environment, or None for a task from another source."""
        number = task.fields.get("number")
        ours = task.fields.get("environment") == self.environment.place and isinstance(number, int)
        return self.environment.task(number) if ours and isinstance(number, int) else None

    def _reply(self, episode: Episode, line: Line) -> Reply:
        cut = line.end is LineEnd.LENGTH
        reader = self._format(episode.renderer)[1] if self._schemas else None
        return Reply(line.text.strip(), tuple(reader.parse(line.text)) if reader and not cut else (), cut)

    def _say(self, episode: Episode, reply: Reply, messages: Sequence[Message]) -> None:
        """Splice the environment's messages in."""
        if not self.chat:
            episode.observe("".join(f"{message['content']}\n" for message in messages))
            return
        chat = self._format(episode.renderer)[0]
        first = next(iter(self._schemas), "")
        names = [call.name if isinstance(call, Call) and call.name in self._schemas else first for call in reply.calls]
        episode.observe(chat.reply(messages, episode.limits.max_observation_tokens, names))

    @cached_property
    def _schemas(self) -> Mapping[str, Mapping[str, object]]:
        """Schemas of its tools, by name."""
        first = self.environment.task(0)
        if first is None:
            raise ConfigError(self.environment.thing, "one without tasks", "name another")
        return Tools(self.environment, first).schemas

    def _format(self, renderer: Renderer) -> tuple[ChatFormat, Reader | None]:
        """Return the chat format of a policy and the reader of its tool calls, if any. They are computed once."""
        if self._known is None or self._known[0] is not renderer:
            chat = ChatFormat(renderer, tuple(self._schemas.values()))
            self._known = renderer, chat, detect(chat) if self._schemas else None
        return self._known[1:]
