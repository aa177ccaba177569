"""The judge as a tool: the policy may have an answer checked, and never sees the reference answer."""

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
    """Chat-style tool calls with one tool more, `check_answer`, which asks the task's judge.

    The policy is told "right" or "wrong", a bit a check, so the checks are few: without a bound it could guess until
    it is right. A score is never told, and an error of the judge, which may quote the reference answer, drops the
    rollout. The final answer is graded as always; having had it checked earns nothing.
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
        """Args:
            tools: further functions, as for `ChatToolSampler`.
            checks: answers that a rollout may have checked, >= 1.
            reveal: `verdict`: right or wrong; `nothing`: the answer is only acknowledged.
            system: the system message; "" for none.
            parse: reads the calls of a turn; None: found out from the chat template.

        Raises:
            ConfigError: `checks` is below 1, or as `ChatToolSampler`.
        """
        if checks < 1:
            raise ConfigError("checks", checks, "give at least 1")
        super().__init__([check_answer, *tools], system=system, parse=parse)
        self.checks = checks
        self.reveal = reveal
        call = '<tool_call>\n{"name": "check_answer", "arguments": {"answer": "1"}}\n</tool_call>'
        self.rehearsals = ((call, call, "It is \\boxed{1}."), (call + call, "\\boxed{2}"))

    def runner_of(self, episode: Episode) -> RunCall:
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
