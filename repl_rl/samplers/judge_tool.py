"""Sampler with the judge as a tool: the policy may check an answer, and never sees the reference answer."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

from repl_rl.errors import ConfigError
from repl_rl.record.trajectory import LineStatus
from repl_rl.rollout.episode import Episode
from repl_rl.samplers.chat_tool import ChatToolSampler
from repl_rl.samplers.tool_format import ParseCalls
from repl_rl.samplers.tools import Call, CallResult, Function, RunCall

Reveal = Literal["verdict", "nothing"]


def check_answer(answer: str) -> str:
    """Check your answer before you give it as the final one.

    Args:
        answer: The answer, for example "18".
    """
    raise NotImplementedError("each rollout has its own: see JudgeToolSampler.runner_of")


class JudgeToolSampler(ChatToolSampler):
    """Sampler with tool calls in a chat and one additional tool, `check_answer`, which asks the task's judge.

    The policy sees "right" or "wrong", which is one bit per check. The number of checks is limited, since the policy
    could otherwise guess until it is right. It never sees a score. An error of the judge drops the rollout, because it
    may quote the reference answer. The final answer is graded as always, and a check earns no reward.
    """

    def __init__(
        self,
        tools: Sequence[Function] = (),
        *,
        checks: int = 1,
        reveal: Reveal = "verdict",
        system: str = "",
        parse: ParseCalls | None = None,
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

    def runner_of(self, episode: Episode) -> RunCall:
        # Each rollout has its own iterator of checks. Concurrent calls of a turn share it.
        return partial(self._run, episode, iter(range(self.checks)))

    async def _run(self, episode: Episode, left: Iterator[int], call: Call | CallResult) -> CallResult:
        if not (isinstance(call, Call) and call.name == check_answer.__name__):
            return await self.run(call)
        if set(call.kwargs) != {"answer"}:
            return CallResult(LineStatus.EXCEPTION, "TypeError: check_answer() takes one argument, answer")
        if next(left, None) is None:
            return CallResult(LineStatus.EXCEPTION, "PermissionError: no checks are left")
        score = await episode.judge(str(call.kwargs["answer"]))
        if self.reveal == "nothing":
            return CallResult(LineStatus.OK, "noted")
        return CallResult(LineStatus.OK, "right" if score >= 1.0 else "wrong")
