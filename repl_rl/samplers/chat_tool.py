"""Sampler with tool calls in a chat: a turn, its calls, their results as tool messages, the next turn."""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence

from transformers.utils import get_json_schema

from repl_rl.errors import ConfigError
from repl_rl.record.trajectory import Execution, LineEnd, LineStatus, Prompt, Trajectory
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.renderer import Renderer
from repl_rl.rollout.sampler import RolloutSampler
from repl_rl.samplers.chat import ChatFormat, conversation
from repl_rl.samplers.patterns import BOXED, last_match, one_group
from repl_rl.samplers.schemas import check_tool, wrong_argument
from repl_rl.samplers.tool_format import ParseCalls, Reader, detect
from repl_rl.samplers.tools import Call, CallResult, Function, RunCall, Toolbox, tool_figures
from repl_rl.tasks import Task

ANSWERED, FAILED = "tools/answered", "tools/failed"
"""Names of the rewards of a turn, one per call."""
_log = logging.getLogger(__name__)


class ChatToolSampler(RolloutSampler):
    """Sampler that runs the tool calls of each chat turn, until a turn calls none.

    The boxed answer of that turn counts. Calls of one turn run concurrently. A turn that a budget truncates ends the
    rollout, and none of its calls is run. The middle of a long result is visibly left out. The run's prompt template
    has no effect here.
    """

    def __init__(
        self,
        tools: Sequence[Function],
        *,
        system: str = "",
        schemas: Mapping[str, Mapping[str, object]] | None = None,
        parse: ParseCalls | None = None,
        answer: str = BOXED,
        answered: float = 0.0,
        failed: float = 0.0,
        not_called: float = 0.0,
        timeout_s: float = 10.0,
    ) -> None:
        """Offer `tools` under their own names.

        Args:
            tools: plain or async functions with type hints and a docstring that describes each argument.
            system: the system message; "" for none.
            schemas: JSON schemas by the name of the tool, which replace those from type hints and docstring.
            parse: reads the calls of a turn. None detects the format from the chat template.
            answer: regular expression of the final answer, with one group; the last match of the last turn counts.
            answered: reward per call with a result, in reward units, for the turn that called.
            failed: the same per failed call.
            not_called: reward of the last turn of a rollout without any call.
            timeout_s: wall clock of one call, seconds (> 0).

        Raises:
            ConfigError: as `Toolbox`; or a schema cannot be made, is not JSON, or is malformed.
        """
        self.toolbox = Toolbox(tools, timeout_s)
        self.schemas = [_schema(name, tool, schemas or {}) for name, tool in self.toolbox.functions.items()]
        self._schema_of = dict(zip(self.toolbox.functions, self.schemas, strict=True))
        self.system = system
        self.rewards = {ANSWERED: answered, FAILED: failed}
        self.not_called = not_called
        self._parse = parse
        self._answer = one_group("answer", answer)
        self._first = name = next(iter(self.toolbox.functions))
        self._known: tuple[Renderer, ChatFormat, Reader] | None = None
        call = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
        self.rehearsals = ((call, call + call + "<tool_call>{", "It is \\boxed{1}."), ("Nothing to call.",))

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        return ChatFormat(renderer, self.schemas).prompt(conversation(self.system, task.question))

    def check_policy(self, renderer: Renderer, template: str) -> None:
        """See `RolloutSampler.check_policy`. The template must write results, and its calls must be readable."""
        super().check_policy(renderer, template)
        chat, _ = self._format(renderer)
        # Raises if the template cannot write the result of a tool.
        chat.reply([{"role": "tool", "content": "?"}], 16, [self._first])
        told = self.fallback(renderer)
        if told is not None:
            _log.warning("%s", told)

    def fallback(self, renderer: Renderer) -> str | None:
        """See `RolloutSampler.fallback`. Calls may be read by one of our formats."""
        reader = self._format(renderer)[1]
        if not reader.ours:
            return None
        return f"{renderer.chat.name}: neither it nor TRL says how calls are read; our format {reader.origin} does it"

    def _format(self, renderer: Renderer) -> tuple[ChatFormat, Reader]:
        """Return the chat format of a policy and the reader of its calls. They are computed once per renderer."""
        if self._known is None or self._known[0] is not renderer:
            chat = ChatFormat(renderer, self.schemas)
            self._known = renderer, chat, Reader("user", self._parse) if self._parse else detect(chat)
        return self._known[1:]

    async def rollout(self, episode: Episode) -> None:
        chat, reader = self._format(episode.renderer)
        run = self.runner_of(episode)
        called = False
        while not episode.ended:
            line = await episode.turn()
            if line.end is LineEnd.LENGTH:
                return
            # A truncated turn has returned above, so its calls are complete.
            calls = reader.parse(line.text)
            if not calls:
                self._conclude(episode, line.text, called)
                return
            called = True
            results = await asyncio.gather(*map(run, calls))
            self._record(episode, results)
            messages = [{"role": "tool", "content": result.text} for result in results]
            names = [self._named(call) for call in calls]
            episode.observe(chat.reply(messages, episode.limits.max_observation_tokens, names))

    def _named(self, call: Call | CallResult) -> str:
        """Return the tool name for the message with a call's result. Unknown names never enter the template's glue."""
        return call.name if isinstance(call, Call) and call.name in self.toolbox.functions else self._first

    def runner_of(self, episode: Episode) -> RunCall:
        """Return the function that runs the calls of one rollout.

        Override it for a tool that needs the task; names and schemas stay the same.
        """
        return self.run

    async def run(self, call: Call | CallResult) -> CallResult:
        """Run a call. Arguments of other types than in the tool's schema give an `exception`."""
        if isinstance(call, Call) and (schema := self._schema_of.get(call.name)) is not None:
            wrong = wrong_argument(schema, call.kwargs)
            if wrong is not None:
                return CallResult(LineStatus.EXCEPTION, f"TypeError: {call.name}(): {wrong}")
        return await self.toolbox.run(call)

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return call metrics of a batch, and those of each tool: see `tool_figures`.

        `tools/call_frequency` is the number of calls per rollout, `tools/failure_frequency` the share of failed calls.
        """
        names = [reward.name for t in trajectories for line in t.lines for reward in line.rewards]
        failures = names.count(FAILED)
        calls = names.count(ANSWERED) + failures
        return {
            "tools/call_frequency": calls / max(len(trajectories), 1),
            "tools/failure_frequency": failures / max(calls, 1),
            **tool_figures(self._calls(trajectories), self.toolbox.functions, max(len(trajectories), 1)),
        }

    def _calls(self, trajectories: Sequence[Trajectory]) -> list[tuple[str, bool]]:
        """Return name and success of each call of these rollouts. The calls are parsed again from the recorded text."""
        if self._known is None:
            return []
        found: list[tuple[str, bool]] = []
        for line in (line for t in trajectories for line in t.lines):
            # The rewards show which calls failed, but not the names of their tools.
            results = [reward.name == ANSWERED for reward in line.rewards if reward.name in (ANSWERED, FAILED)]
            calls = self._known[2].parse(line.text) if results else ()
            found += [
                (call.name if isinstance(call, Call) else "", ok) for call, ok in zip(calls, results, strict=False)
            ]
        return found

    def _record(self, episode: Episode, results: Sequence[CallResult]) -> None:
        """Record the calls of a turn and their rewards. The status is that of the first failed call."""
        deciding = next((result for result in results if not result.ok), results[0])
        episode.executed(Execution(deciding.status, max(result.elapsed_s for result in results)))
        for result in results:
            name = ANSWERED if result.ok else FAILED
            episode.reward(self.rewards[name], name=name)

    def _conclude(self, episode: Episode, text: str, called: bool) -> None:
        if not called:
            episode.reward(self.not_called, name="tools/not_called")
        answer = last_match(self._answer, text)
        if answer is not None:
            episode.submit(answer)


def _schema(name: str, tool: Function, given: Mapping[str, Mapping[str, object]]) -> Mapping[str, object]:
    try:
        schema: Mapping[str, object] = given[name] if name in given else get_json_schema(tool)
    # transformers raises its own classes, TypeError and ValueError.
    except Exception as error:
        remedy = f"give it type hints and a docstring with every argument, or a schema: {error}"
        raise ConfigError("tool", name, remedy) from error
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"schema of tool {name}", schema, f"it is not JSON: {error}") from error
    check_tool(name, schema)
    return schema
