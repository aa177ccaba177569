"""Sampler for fenced code blocks, each executed when its fence closes: the usual unit elsewhere, for comparison."""

import re

from repl_rl.record.trajectory import Execution, LineEnd, LineStatus, Prompt
from repl_rl.rollout.blocks import OUTPUT, as_block
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.renderer import Renderer
from repl_rl.rollout.sampler import RolloutSampler
from repl_rl.samplers.chat import opening
from repl_rl.samplers.patterns import BOXED, framed, last_match, one_group, one_place
from repl_rl.sandbox.base import PushResult
from repl_rl.tasks import Task

BLOCK = r"^```(?:python|py)[ \t]*\n(.*?)^```"
"""Fenced block of Python code in Markdown."""


class FencedCodeSampler(RolloutSampler):
    """Sampler for text with code between fences (```` ```python ````), as in ToRL and ReTool.

    A block is executed when its fence closes, in this rollout's console, so names persist in later blocks. Its output
    is spliced in. An expression is not echoed, and a block stops at its first error.

    The rollout ends at an end token, and the last boxed answer of the text counts. It also ends with
    `submit_final_answer(...)` inside a block.
    """

    rehearsals = (
        ("Let me see.\n```python\nx = 6 * 7\nprint(x)\n```\nSo it is \\boxed{42}.",),
        ("```python\n1/0\n```\n```python\nx = = 1\n```\n```python\nsubmit_final_answer(1)\n```\n",),
    )

    def __init__(
        self,
        *,
        block: str = BLOCK,
        output: str = OUTPUT,
        answer: str = BOXED,
        system: str = "",
    ) -> None:
        """Create the sampler.

        Args:
            block: regular expression of a block, `^` matches at each line; its one group is the code.
            output: text that is spliced in after a block, on a separate line; `{}` is the block's output.
            answer: regular expression of the final answer, with one group; the last match counts.
            system: text or message before the question; see `opening`.

        Raises:
            ConfigError: a pattern is not a regular expression with one group, or `output` has no place for the text.
        """
        self.system = system
        self._block = one_group("block", block, re.DOTALL | re.MULTILINE)
        self._output = one_place("output", output)
        self._answer = one_group("answer", answer)

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        return opening(renderer, self.system, task.asked, template)

    async def rollout(self, episode: Episode) -> None:
        while not episode.ended:
            line = await episode.sample(until=self._block)
            block, answer = self._block.search(line.text), last_match(self._answer, line.text)
            # At an end token without an answer, the rollout ends unanswered.
            if line.end is LineEnd.EOS and answer is not None:
                episode.submit(answer)
            elif block is not None and line.end is not LineEnd.LENGTH:
                result = await run_block(episode, block[1])
                if not episode.ended:
                    episode.observe(self._shown(line.text, result.text), result.cut)

    def _shown(self, written: str, printed: str) -> str:
        start = "" if written.endswith("\n") else "\n"
        end = "" if printed.endswith("\n") or not printed else "\n"
        return start + framed(self._output, printed + end)


async def run_block(episode: Episode, code: str) -> PushResult:
    """Execute `code` as a block in the rollout's console. Tracebacks show frames of the block only.

    Raises:
        SandboxFault: as `Episode.execute`.
    """
    result = as_block(await episode.execute(f"exec(compile({code!r}, '<block>', 'exec'))"))
    # The console reported an exception of `compile`; record the block's syntax error instead.
    if result.status is LineStatus.SYNTAX_ERROR:
        episode.executed(Execution(result.status, result.elapsed_s))
    return result
