"""Sampler for fenced code blocks, each executed as a whole when its fence closes.

A block is the usual unit of execution in other work, and serves as a comparison with the execution by line. The
functions after the sampler convert the results of fenced code. `FencedLineSampler` and the replay of records use them
too.
"""

import re
from dataclasses import replace
from typing import ClassVar

from repl_rl.rollout.episode import Episode
from repl_rl.rollout.sampler_base import RolloutSampler
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.samplers.chat_format import (
    BOXED,
    build_opening_prompt,
    check_single_place,
    compile_single_group,
    fill_frame,
    find_last_match,
)
from repl_rl.sandbox.base import LineResult
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Execution, LineEnd, LineStatus, Prompt

BLOCK = r"^```(?:python|py)[ \t]*\n(.*?)^```"
"""Fenced block of Python code in Markdown."""
OUTPUT = "```output\n{}```\n"
"""Text spliced in after a block, with a place for its output."""
COMMENT = "# {}"
"""Form of a printed line that is spliced in within a block, with a place for its text."""
_ERROR_POSITION = re.compile(
    r"^Traceback \(most recent call last\):\n(?:  .*\n)+|^  File \"<stdin>\", line \d+\n(?:    .*\n)*", re.MULTILINE
)
"""Lines that show the position of an error: frames of a traceback, or file and code of a syntax error."""
_EXEC_FRAME = '  File "<stdin>", line 1, in <module>\n'
"""Frame of the line that executes a block."""
_BLOCK_FRAME = re.compile(r'^  File "<block>", line \d+, in ', re.MULTILINE)
_SYNTAX_ERROR = re.compile(r"^(SyntaxError|IndentationError|TabError): [^\n]*\n\Z", re.MULTILINE)
"""Message of a syntax error at the end of a traceback."""


class FencedCodeSampler(RolloutSampler):
    """Sampler for text with code between fences (```` ```python ````), as in ToRL and ReTool.

    A block is executed when its fence closes, in this rollout's console, so names persist in later blocks. Its output
    is spliced in. An expression is not echoed, and a block stops at its first error.

    The rollout ends at an end token, and the last boxed answer of the text counts. It also ends with
    `submit_final_answer(...)` inside a block.
    """

    kind: ClassVar[str] = "fenced"
    about: ClassVar[str] = "runs each fenced block"

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
            system: text or message before the question; see `build_opening_prompt`.

        Raises:
            ConfigError: a pattern is not a regular expression with one group, or `output` has no place for the text.
        """
        self.system = system
        self._block = compile_single_group("block", block, re.DOTALL | re.MULTILINE)
        self._output = check_single_place("output", output)
        self._answer = compile_single_group("answer", answer)

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        return build_opening_prompt(renderer, self.system, task.full_question, template)

    async def rollout(self, episode: Episode) -> None:
        while not episode.ended:
            line = await episode.sample(until=self._block)
            block, answer = self._block.search(line.text), find_last_match(self._answer, line.text)
            # At an end token without an answer, the rollout ends unanswered.
            if line.end is LineEnd.EOS and answer is not None:
                episode.submit(answer)
            elif block is not None and line.end is not LineEnd.LENGTH:
                result = await run_block(episode, block[1])
                if not episode.ended:
                    episode.observe(self._format_output(line.text, result.text), result.truncated)

    def _format_output(self, sampled_text: str, printed: str) -> str:
        """Return the text to splice in after a block. It begins and ends on separate lines."""
        start = "" if sampled_text.endswith("\n") else "\n"
        end = "" if printed.endswith("\n") or not printed else "\n"
        return start + fill_frame(self._output, printed + end)


async def run_block(episode: Episode, code: str) -> LineResult:
    """Execute `code` as a block in the rollout's console. Tracebacks show frames of the block only.

    Raises:
        SandboxFault: as `Episode.execute`.
    """
    result = normalize_block_result(await episode.execute(f"exec(compile({code!r}, '<block>', 'exec'))"))
    # The console reported an exception of `compile`; record the block's syntax error instead.
    if result.status is LineStatus.SYNTAX_ERROR:
        episode.record_execution(Execution(result.status, result.elapsed_s))
    return result


def normalize_block_result(result: LineResult) -> LineResult:
    """Convert the result of the line that executes a block to that of the block itself.

    This affects its traceback frames and its syntax errors.
    """
    # The outermost frame is that of `exec`, which is not a line of the block.
    text = result.text.replace(_EXEC_FRAME, "", 1)
    # The console saw an exception of `compile`; the real cause is that the block is not valid Python.
    unparsed = result.status is LineStatus.EXCEPTION and _SYNTAX_ERROR.search(text) and not _BLOCK_FRAME.search(text)
    return replace(result, text=text, status=LineStatus.SYNTAX_ERROR if unparsed else result.status)


def extract_error_message(result: LineResult) -> str:
    """Return the printed text of a line. If the line failed, the traceback frames or the position are removed."""
    return _ERROR_POSITION.sub("", result.text) if result.status.is_error else result.text


def format_as_comments(result: LineResult, form: str = COMMENT) -> str:
    """Return the output of a line as comments within the block that it belongs to. `form` is that of each line."""
    prefix, _, suffix = form.partition("{}")
    printed = extract_error_message(result)
    return "".join(f"{prefix}{line}{suffix}\n" for line in printed.removesuffix("\n").split("\n")) if printed else ""


def extract_printed_text(observed: str) -> str | None:
    """Return the output of a block from the text spliced in after it.

    None means that this text is not between the usual fences.
    """
    prefix, _, suffix = OUTPUT.partition("{}")
    # A newline precedes the fence if the policy has not written one.
    text = observed.removeprefix("\n")
    fenced = len(text) >= len(prefix + suffix) and text.startswith(prefix) and text.endswith(suffix)
    return text[len(prefix) : len(text) - len(suffix)] if fenced else None
