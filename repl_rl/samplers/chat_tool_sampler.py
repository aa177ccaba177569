"""Samplers with tool calls in a chat: a turn, its calls, their results as tool messages, the next turn.

`ChatToolSampler` offers functions of the user. `JudgeToolSampler` adds the judge as a tool: the policy may check an
answer, and never sees the reference answer.
"""

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

from transformers.utils import get_json_schema

from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ConfigError
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.sampler_base import RolloutSampler
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.samplers.chat_format import BOXED, ChatFormat, build_conversation, compile_single_group, find_last_match
from repl_rl.samplers.tool_call_parsing import (
    ParseCallsFn,
    RunToolCall,
    Toolbox,
    ToolCall,
    ToolCallParser,
    ToolFunction,
    ToolResult,
    compute_tool_metrics,
    detect_call_parser,
    find_wrong_argument,
    validate_tool_schema,
)
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Execution, LineEnd, LineStatus, Prompt, Trajectory

ANSWERED, FAILED = "tools/answered", "tools/failed"
"""Names of rewards. Each call of a turn gives the turn one reward: for a result, or for a failure."""
Reveal = Literal["verdict", "nothing"]
"""Result of a check that the policy sees: `verdict` is right or wrong, `nothing` only acknowledges the answer."""
_log = logging.getLogger(__name__)


@keeps_old_names
class ChatToolSampler(RolloutSampler):
    """Sampler that runs the tool calls of each chat turn, until a turn calls none.

    The boxed answer of that turn counts. Calls of one turn run concurrently. A turn that a budget truncates ends the
    rollout, and none of its calls is run. The middle of a long result is visibly left out. The run's prompt template
    has no effect here.
    """

    def __init__(
        self,
        tools: Sequence[ToolFunction],
        *,
        system: str = "",
        schemas: Mapping[str, Mapping[str, object]] | None = None,
        parse: ParseCallsFn | None = None,
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
        self.schemas = [_build_schema(name, tool, schemas or {}) for name, tool in self.toolbox.functions.items()]
        self._schema_of = dict(zip(self.toolbox.functions, self.schemas, strict=True))
        self.system = system
        self.rewards = {ANSWERED: answered, FAILED: failed}
        self.not_called = not_called
        self._parse = parse
        self._answer = compile_single_group("answer", answer)
        self._first = name = next(iter(self.toolbox.functions))
        # Format of the last renderer. It is stored, because its detection tries many templates.
        self._known: tuple[Renderer, ChatFormat, ToolCallParser] | None = None
        call = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
        self.rehearsals = ((call, call + call + "<tool_call>{", "It is \\boxed{1}."), ("Nothing to call.",))

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        return ChatFormat(renderer, self.schemas).build_prompt(build_conversation(self.system, task.question))

    def check_policy(self, renderer: Renderer, template: str) -> None:
        """See `RolloutSampler.check_policy`. The template must write results, and its calls must be readable."""
        super().check_policy(renderer, template)
        chat, _ = self._get_format(renderer)
        # Raises if the template cannot write the result of a tool.
        chat.encode_reply([{"role": "tool", "content": "?"}], 16, [self._first])
        warning = self.fallback(renderer)
        if warning is not None:
            _log.warning("%s", warning)

    def fallback(self, renderer: Renderer) -> str | None:
        """See `RolloutSampler.fallback`. It reports that calls are parsed by a format of this package."""
        reader = self._get_format(renderer)[1]
        if not reader.is_own_format:
            return None
        name = renderer.chat_template.name
        return f"{name}: neither the template nor TRL defines a format of calls, so our format {reader.source} is used"

    def _get_format(self, renderer: Renderer) -> tuple[ChatFormat, ToolCallParser]:
        """Return the chat format of a policy and the reader of its calls. They are computed once per renderer."""
        if self._known is None or self._known[0] is not renderer:
            chat = ChatFormat(renderer, self.schemas)
            self._known = (
                renderer,
                chat,
                ToolCallParser("user", self._parse) if self._parse else detect_call_parser(chat),
            )
        return self._known[1:]

    async def rollout(self, episode: Episode) -> None:
        chat, reader = self._get_format(episode.renderer)
        run = self.make_call_runner(episode)
        has_called = False
        while not episode.ended:
            line = await episode.sample_turn()
            if line.end is LineEnd.LENGTH:
                return
            # A truncated turn has returned above, so its calls are complete.
            calls = reader.parse(line.text)
            if not calls:
                self._submit_or_finish(episode, line.text, has_called)
                return
            has_called = True
            # All calls of a turn run concurrently. Their results keep the order of the calls.
            results = await asyncio.gather(*map(run, calls))
            self._record_results(episode, results)
            messages = [{"role": "tool", "content": result.text} for result in results]
            names = [self._get_known_tool_name(call) for call in calls]
            episode.observe(chat.encode_reply(messages, episode.limits.max_observation_tokens, names))

    def _get_known_tool_name(self, call: ToolCall | ToolResult) -> str:
        """Return the tool name for the message with a call's result.

        The first tool's name replaces an unknown name, whose text could form control tokens in the chat template.
        """
        return call.name if isinstance(call, ToolCall) and call.name in self.toolbox.functions else self._first

    def make_call_runner(self, episode: Episode) -> RunToolCall:
        """Return the function that runs the calls of one rollout.

        Override it for a tool that needs the task; names and schemas stay the same.
        """
        return self.run

    async def run(self, call: ToolCall | ToolResult) -> ToolResult:
        """Run a call. Arguments of other types than in the tool's schema give an `exception`."""
        if isinstance(call, ToolCall) and (schema := self._schema_of.get(call.name)) is not None:
            problem = find_wrong_argument(schema, call.kwargs)
            if problem is not None:
                return ToolResult(LineStatus.EXCEPTION, f"TypeError: {call.name}(): {problem}")
        return await self.toolbox.run(call)

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return call metrics of a batch, and those of each tool: see `compute_tool_metrics`.

        `tools/call_frequency` is the number of calls per rollout, `tools/failure_frequency` the share of failed calls.
        """
        names = [reward.name for t in trajectories for line in t.lines for reward in line.rewards]
        failures = names.count(FAILED)
        calls = names.count(ANSWERED) + failures
        return {
            "tools/call_frequency": calls / max(len(trajectories), 1),
            "tools/failure_frequency": failures / max(calls, 1),
            **compute_tool_metrics(
                self._collect_calls(trajectories), self.toolbox.functions, max(len(trajectories), 1)
            ),
        }

    def _collect_calls(self, trajectories: Sequence[Trajectory]) -> list[tuple[str, bool]]:
        """Return name and success of each call of these rollouts. The calls are parsed again from the recorded text."""
        if self._known is None:
            return []
        outcomes: list[tuple[str, bool]] = []
        for line in (line for t in trajectories for line in t.lines):
            # The rewards show which calls failed, but not the names of their tools.
            results = [reward.name == ANSWERED for reward in line.rewards if reward.name in (ANSWERED, FAILED)]
            calls = self._known[2].parse(line.text) if results else ()
            outcomes += [
                (call.name if isinstance(call, ToolCall) else "", ok) for call, ok in zip(calls, results, strict=False)
            ]
        return outcomes

    def _record_results(self, episode: Episode, results: Sequence[ToolResult]) -> None:
        """Record the calls of a turn and their rewards. The status is that of the first failed call."""
        status_result = next((result for result in results if not result.is_ok), results[0])
        episode.record_execution(Execution(status_result.status, max(result.elapsed_s for result in results)))
        for result in results:
            name = ANSWERED if result.is_ok else FAILED
            episode.reward(self.rewards[name], name=name)

    def _submit_or_finish(self, episode: Episode, text: str, has_called: bool) -> None:
        """End a rollout after a turn without calls. A turn without an answer submits nothing."""
        if not has_called:
            episode.reward(self.not_called, name="tools/not_called")
        answer = find_last_match(self._answer, text)
        if answer is not None:
            episode.submit(answer)


def _build_schema(name: str, tool: ToolFunction, schemas: Mapping[str, Mapping[str, object]]) -> Mapping[str, object]:
    """Return the given schema of a tool, or one made from its type hints and docstring.

    Raises:
        ConfigError: the schema cannot be made, is not JSON, or is malformed.
    """
    try:
        schema: Mapping[str, object] = schemas[name] if name in schemas else get_json_schema(tool)
    # transformers raises its own classes, TypeError and ValueError.
    except Exception as error:
        remedy = f"give it type hints and a docstring with every argument, or a schema: {error}"
        raise ConfigError("tool", name, remedy) from error
    # The chat template writes schemas as JSON, which has no NaN.
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"schema of tool {name}", schema, f"it is not JSON: {error}") from error
    validate_tool_schema(name, schema)
    return schema


def check_answer(answer: str) -> str:
    """Check your answer before you give it as the final one.

    Args:
        answer: The answer, for example "18".
    """
    raise NotImplementedError("this only declares the tool; JudgeToolSampler.make_call_runner runs its calls")


class JudgeToolSampler(ChatToolSampler):
    """Sampler with tool calls in a chat and one additional tool, `check_answer`, which asks the task's judge.

    The policy sees "right" or "wrong", which is one bit per check. The number of checks is limited, since the policy
    could otherwise guess until it is right. It never sees a score. An error of the judge drops the rollout, because it
    may quote the reference answer. The final answer is graded as always, and a check earns no reward.
    """

    kind: ClassVar[str] = "judge_tool"
    about: ClassVar[str] = "tool calls, with the judge as a tool"

    def __init__(
        self,
        tools: Sequence[ToolFunction] = (),
        *,
        checks: int = 1,
        reveal: Reveal = "verdict",
        system: str = "",
        parse: ParseCallsFn | None = None,
    ) -> None:
        """Create the sampler.

        Args:
            tools: further functions, as for `ChatToolSampler`.
            checks: number of answers that a rollout may check, >= 1.
            reveal: `verdict` shows right or wrong; `nothing` only acknowledges the answer.
            system: the system message; "" for none.
            parse: reads the calls of a turn. None detects the format from the chat template.

        Raises:
            ConfigError: `checks` is below 1, or as `ChatToolSampler`.
        """
        if checks < 1:
            raise ConfigError("checks", checks, "give at least 1")
        # The function gives name and schema only. `_run` answers its calls.
        super().__init__([check_answer, *tools], system=system, parse=parse)
        self.checks = checks
        self.reveal = reveal
        call = '<tool_call>\n{"name": "check_answer", "arguments": {"answer": "1"}}\n</tool_call>'
        self.rehearsals = ((call, call, "It is \\boxed{1}."), (call + call, "\\boxed{2}"))

    def make_call_runner(self, episode: Episode) -> RunToolCall:
        # Each rollout has its own iterator of checks. Concurrent calls of a turn share it.
        return partial(self._run, episode, iter(range(self.checks)))

    async def _run(self, episode: Episode, remaining_checks: Iterator[int], call: ToolCall | ToolResult) -> ToolResult:
        """Run a call of one rollout. `remaining_checks` has one element per check that the rollout may still make."""
        if not (isinstance(call, ToolCall) and call.name == check_answer.__name__):
            return await self.run(call)
        if set(call.kwargs) != {"answer"}:
            return ToolResult(LineStatus.EXCEPTION, "TypeError: check_answer() takes one argument, answer")
        if next(remaining_checks, None) is None:
            return ToolResult(LineStatus.EXCEPTION, "PermissionError: no checks are left")
        # An error of the judge passes, because its text may quote the reference answer.
        score = await episode.judge(str(call.kwargs["answer"]))
        if self.reveal == "nothing":
            return ToolResult(LineStatus.OK, "noted")
        return ToolResult(LineStatus.OK, "right" if score >= 1.0 else "wrong")
