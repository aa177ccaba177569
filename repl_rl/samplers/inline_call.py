"""Sampler for calls inside running text: detected while the policy streams, executed at once, and answered in place."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from repl_rl.record.trajectory import Execution, LineEnd, Prompt, Trajectory
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.renderer import Renderer
from repl_rl.rollout.sampler import RolloutSampler
from repl_rl.samplers.call_text import parse_calls
from repl_rl.samplers.chat import opening
from repl_rl.samplers.patterns import framed, one_group, one_place
from repl_rl.samplers.tools import Call, CallResult, Function, Toolbox, tool_figures
from repl_rl.tasks import Task


@dataclass(frozen=True, slots=True)
class CallConvention:
    """Format of calls, their results and the final answer."""

    call: str = r"<fn>(.*?)</fn>"
    """Regular expression of calls; its one group is a call, or several, see `call_text`. `.` matches newlines."""
    results: str = "<fn_results>{}</fn_results>"
    """Text spliced in per call; `{}` is the result of the function, as text."""
    error: str = "<fn_error>{}</fn_error>"
    """Text spliced in per failed call; `{}` is the class and the message of the error."""
    answer: str = r"<answer>(.*?)</answer>"
    """Regular expression of the final answer; its one group is submitted. "" disables it."""

    def __post_init__(self) -> None:
        one_group("convention.call", self.call)
        if self.answer:
            one_group("convention.answer", self.answer)
        one_place("convention.results", self.results)
        one_place("convention.error", self.error)


class InlineCallSampler(RolloutSampler):
    """Sampler that executes each call in the text as soon as it is closed, and splices its result in.

    Several calls that are closed together run one after the other, and one observation has all of their results. An end
    token or an answer ends the rollout. Only text of the policy is searched for calls and answers.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        *,
        convention: CallConvention | None = None,
        system: str = "",
        timeout_s: float = 10.0,
    ) -> None:
        """Offer `functions` under their own names.

        Args:
            functions: plain or async; arguments are literals, and the result is shown as `str` gives it.
            convention: format of calls and results.
            system: text or message before the question; see `opening`.
            timeout_s: wall clock of one call, seconds (> 0).

        Raises:
            ConfigError: as `Toolbox`.
        """
        self.toolbox = Toolbox(functions, timeout_s)
        self.convention = convention or CallConvention()
        self.system = system
        self._call = re.compile(self.convention.call, re.DOTALL)
        # `(?!)` never matches: no answer ends the rollout.
        self._answer = re.compile(self.convention.answer or r"(?!)", re.DOTALL)
        self._until = re.compile(f"(?:{self._call.pattern})|(?:{self._answer.pattern})", re.DOTALL)
        name = next(iter(self.toolbox.functions))
        self.rehearsals = ((f"a <fn>{name}()</fn> b <fn>{name}(x=</fn><answer>c</answer>",), ("no call",))

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        return opening(renderer, self.system, task.asked, template)

    async def rollout(self, episode: Episode) -> None:
        while not episode.ended:
            line = await episode.sample(until=self._until)
            call, answer = self._call.search(line.text), self._answer.search(line.text)
            # Sampling stops at the first call or answer. An answer takes precedence.
            if answer is not None:
                episode.submit(answer[1].strip())
            elif call is not None and line.end is not LineEnd.LENGTH:
                results = [await self.toolbox.run(each) for each in parse_calls(call[1])]
                deciding = next((result for result in results if not result.ok), results[0])
                episode.executed(Execution(deciding.status, sum(result.elapsed_s for result in results)))
                if not episode.ended:
                    episode.observe("".join(map(self._shown, results)))

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return the metrics of each function: see `tool_figures`."""
        found: list[tuple[str, bool]] = []
        for line in (line for t in trajectories for line in t.lines if line.execution is not None):
            written = self._call.search(line.text)
            if written is not None and line.execution is not None:
                # The record has one status per line, which counts for all calls of that line.
                names = [call.name if isinstance(call, Call) else "" for call in parse_calls(written[1])]
                found.extend((name, not line.execution.status.is_error) for name in names)
        return tool_figures(found, self.toolbox.functions, max(len(trajectories), 1))

    def _shown(self, result: CallResult) -> str:
        return framed(self.convention.results if result.ok else self.convention.error, result.text)
