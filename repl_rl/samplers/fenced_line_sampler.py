"""Sampler for fenced code that is executed line by line: text as a chat model writes it, and a live console in it."""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Annotated, ClassVar

from repl_rl.rollout.episode import Episode
from repl_rl.rollout.prompts import OWN
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
from repl_rl.samplers.fenced_code_sampler import COMMENT, OUTPUT, extract_error_message, format_as_comments
from repl_rl.sandbox.base import LineResult
from repl_rl.settings.value_bounds import AtLeast
from repl_rl.tasks import Task
from repl_rl.trajectory.console_text import LineBuffer, begins_statement, is_open_block
from repl_rl.trajectory.trajectory import LineEnd, LineStatus, Prompt, Trajectory

OPENING = re.compile(r"^```(?:python|py)[ \t]*\n", re.MULTILINE)
"""Line that opens a block of Python code in Markdown."""
FENCE = "```"
"""Beginning of a line that closes a block."""
_LINE_END = re.compile(r"\A[ \t]*```|\n")
"""Pattern that ends the sampling of a line: its newline, or a closing fence at its beginning."""
TEXT_TOKENS = 1024
"""Default token budget of a text outside of a block."""
SYSTEM = (
    "Solve the problem step by step. You can use Python: code between ```python and ``` is executed in a live session,"
    " line by line, and what a line prints is shown as a comment below it. Look at the values that you need. End with"
    " the final answer, written as \\boxed{answer}."
)


class FencedLineSampler(RolloutSampler):
    """Sampler for text with code between fences (```` ```python ````) whose lines are executed while it is written.

    Each line of a block runs in this rollout's console when its newline is sampled. What the console prints follows
    the line as comments, and an expression is echoed. No prompt is spliced in, so a model writes code as it knows it.
    A block statement needs no blank line: the next statement ends it, and the output of both follows that line. Of an
    error only the message is shown, because policies continue a traceback that they see in comments.

    The rollout ends at an end token, and the last boxed answer of the text after the last block counts. It also ends
    with `submit_final_answer(...)` inside a block.
    """

    kind: ClassVar[str] = "fenced_lines"
    about: ClassVar[str] = "runs each line of a fenced block"

    rehearsals = (
        ("Let me see.\n```python\nx = 6 * 7\nx\n```\nSo it is \\boxed{42}.",),
        ("```python\nfor i in range(2):\n    i\nprint(i)\n1/0\nx = = 1\nsubmit_final_answer(1)\n```\n",),
    )

    def __init__(
        self,
        *,
        output: str = COMMENT,
        answer: str = BOXED,
        system: str = SYSTEM,
        text_tokens: Annotated[int, AtLeast(1)] = TEXT_TOKENS,
    ) -> None:
        """Create the sampler.

        Args:
            output: form of a printed line; `{}` is its text. A comment keeps the block valid Python.
            answer: regular expression of the final answer, with one group; the last match counts.
            system: text or message before the question; see `build_opening_prompt`. A prompt file replaces the default.
            text_tokens: token budget of each text outside of a block (>= 1). Lines of a block have `max_line_tokens`.

        Raises:
            ConfigError: `answer` is not a regular expression with one group, or `output` has no place for the text.
        """
        self.system = system
        self.text_tokens = text_tokens
        self._output = check_single_place("output", output)
        self._answer = compile_single_group("answer", answer)

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        # A prompt file has its own instructions, so the default is left out.
        system = "" if self.system == SYSTEM and template.startswith(OWN) else self.system
        return build_opening_prompt(renderer, system, task.full_question, template)

    async def rollout(self, episode: Episode) -> None:
        # A branch may begin within a block.
        if episode.has_lines and (cell := _find_open_cell(episode.build_trajectory())) is not None:
            await self._run_block(episode, "", cell)
        while not episode.ended:
            span = await episode.sample(until=OPENING, max_tokens=self.text_tokens)
            opening, answer = OPENING.search(span.text), find_last_match(self._answer, span.text)
            if opening is not None and span.end is not LineEnd.LENGTH:
                await self._run_block(episode, span.text[opening.end() :])
            # At an end token without an answer, the rollout ends unanswered.
            elif span.end is LineEnd.EOS and answer is not None:
                episode.submit(answer)

    async def _run_block(self, episode: Episode, text: str, cell: Sequence[str] = ()) -> None:
        """Run the lines of a block until its closing fence.

        Args:
            episode: the rollout.
            text: text that was sampled together with the opening fence.
            cell: lines of an incomplete cell, which the console has received already.
        """
        buffer = LineBuffer()
        while True:
            # An end token completes a line, and closes the block. So does a fence, which may lack its newline.
            fenced = (buffer.carry + text).lstrip().startswith(FENCE)
            lines = buffer.feed(f"{text}\n" if episode.ended or fenced else text)
            before_fence = list(takewhile(lambda physical: not physical.strip().startswith(FENCE), lines))
            is_closed = episode.ended or len(before_fence) < len(lines)
            # Run the lines before the fence, and keep those of an open block statement for the next round.
            output, truncated = "", False
            if run := _complete_statements(before_fence, cell, is_closed):
                result = await episode.execute(*run)
                cell = [*cell, *run] if result.incomplete else []
                output, truncated = self._format_output(result, is_closed), result.truncated
            # Observe also without output, because a closing fence may lack its newline.
            if not episode.ended and (run or is_closed):
                episode.observe(output if text.endswith("\n") else f"\n{output}", truncated)
            if is_closed or episode.ended:
                return
            line = await episode.sample(until=_LINE_END)
            if line.end is LineEnd.LENGTH:
                return
            text = line.text

    def _format_output(self, result: LineResult, is_closed: bool) -> str:
        """Return the text to splice in after a line, or after the newline of a closing fence."""
        if not is_closed:
            return format_as_comments(result, self._output)
        printed = extract_error_message(result)
        end = "" if printed.endswith("\n") else "\n"
        return fill_frame(OUTPUT, printed + end) if printed else ""


def _complete_statements(lines: Sequence[str], cell: Sequence[str], is_closed: bool) -> list[str]:
    """Return the physical lines to run for `lines`, with the blank lines that end open block statements.

    `cell` has the lines of an incomplete cell in the console. If `is_closed`, the fenced block has ended, so an open
    block statement ends as well.
    """
    run: list[str] = []
    for line in lines:
        # The console runs an open block statement when it gets a blank line.
        if begins_statement(line) and is_open_block("\n".join((*cell, *run))):
            run.append("")
        run.append(line)
    return [*run, ""] if is_closed and is_open_block("\n".join((*cell, *run))) else run


def _find_open_cell(trajectory: Trajectory) -> list[str] | None:
    """Return the lines of the incomplete cell in the open code block. None means that no code block is open."""
    in_block, cell = False, list[str]()
    for line in trajectory.lines:
        if in_block:
            in_block = not any(physical.lstrip().startswith(FENCE) for physical in line.text.split("\n"))
        else:
            in_block = OPENING.search(line.text) is not None
        # An incomplete line waits for more. Any other result completes the cell.
        if line.execution is not None:
            is_incomplete = line.execution.status is LineStatus.INCOMPLETE
            cell = [*cell, *line.execution.ran] if is_incomplete else []
    return cell if in_block else None
