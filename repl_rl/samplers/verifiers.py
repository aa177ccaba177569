"""Sampler for environments of the package `verifiers`. They decide the order of turns and give the rewards."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.rollout.chat_template import Message
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.samplers.chat_format import ChatFormat
from repl_rl.samplers.environment import NOT_SOLVED, SOLVED, Environment, EnvironmentSampler
from repl_rl.samplers.tool_call_parsing import ToolCall, ToolCallParser, detect_call_parser
from repl_rl.samplers.verifiers_agent import AgentReply, Trace, build_opening_messages, convert_message, play_episode
from repl_rl.samplers.verifiers_tools import VerifiersTools
from repl_rl.settings.value_bounds import Above
from repl_rl.tasks import Split, Task
from repl_rl.tasks.environments import EnvironmentTask, VerifiersEnvironment, load_environment
from repl_rl.trajectory.trajectory import Line, LineEnd, Prompt


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
