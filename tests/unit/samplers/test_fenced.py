"""Code between fences: executed when the fence closes, output spliced between fences."""

import pytest

from repl_rl.errors import ConfigError
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.samplers.fenced_code_sampler import FencedCodeSampler
from repl_rl.trajectory.trajectory import LineStatus, Stop, Trajectory
from tests.support.samplers.marked_text import play

QUESTION = "What is 6 * 7?\n"


def statuses(t: Trajectory) -> list[LineStatus]:
    return [execution.status for execution in t.executions]


def test_a_block_is_executed_when_its_fence_closes_and_a_boxed_answer_is_submitted() -> None:
    t = play(
        FencedCodeSampler(),
        QUESTION + "⟦I compute it.\n```python\nx = 6 * 7\nprint(x)\n```⟧\n```output\n42\n```\n"
        "⟦So it is \\boxed{42}.<|im_end|>⟧",
    )
    assert (t.stop, t.answer, t.outcome) == (Stop.EOS, "42", 1.0)
    assert statuses(t) == [LineStatus.OK, LineStatus.ANSWERED]


def test_names_live_on_in_later_blocks_and_an_expression_is_not_echoed() -> None:
    t = play(
        FencedCodeSampler(),
        QUESTION + "⟦```python\nx = 40\nx\n```⟧\n```output\n```\n"
        "⟦```py\ndef f(y):\n    return x + y\nprint(f(2))\n```⟧\n```output\n42\n```\n⟦<|im_end|>⟧",
    )
    assert (t.stop, t.answer, t.outcome) == (Stop.EOS, None, 0.0)


def test_a_block_stops_at_its_first_error_and_shows_its_own_frames_only() -> None:
    t = play(
        FencedCodeSampler(),
        QUESTION + "⟦```python\nprint(1)\n1/0\nprint(2)\n```⟧\n```output\n1\nTraceback (most recent call last):\n"
        '  File "<block>", line 2, in <module>\nZeroDivisionError: division by zero\n```\n⟦<|im_end|>⟧',
    )
    assert statuses(t) == [LineStatus.EXCEPTION]


def test_a_block_that_is_no_python_is_a_syntax_error() -> None:
    t = play(
        FencedCodeSampler(),
        QUESTION + "⟦```python\nx = = 1\n```⟧\n```output\nTraceback (most recent call last):\n"
        '  File "<block>", line 1\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n```\n⟦<|im_end|>⟧',
    )
    assert statuses(t) == [LineStatus.SYNTAX_ERROR]


def test_a_syntax_error_that_the_block_raises_itself_is_an_exception() -> None:
    t = play(
        FencedCodeSampler(),
        QUESTION + "⟦```python\nraise SyntaxError('mine')\n```⟧\n```output\nTraceback (most recent call last):\n"
        '  File "<block>", line 1, in <module>\nSyntaxError: mine\n```\n⟦<|im_end|>⟧',
    )
    assert statuses(t) == [LineStatus.EXCEPTION]


def test_submitting_inside_a_block_ends_the_rollout_and_nothing_is_spliced() -> None:
    t = play(FencedCodeSampler(), QUESTION + "⟦```python\nsubmit_final_answer(6 * 7)\n```⟧")
    assert (t.stop, t.answer, t.outcome) == (Stop.ANSWERED, "42", 1.0)


def test_an_answer_that_a_program_printed_is_not_the_policys() -> None:
    t = play(
        FencedCodeSampler(),
        QUESTION + "⟦```python\nprint(r'\\boxed{42}')\n```⟧\n```output\n\\boxed{42}\n```\n⟦Done.<|im_end|>⟧",
    )
    assert t.answer is None


@pytest.mark.parametrize("answer", ["\\frac{1}{2}", "\\frac{\\sqrt{2}}{3}", "\\{1, 2\\}", ""])
def test_a_boxed_answer_may_have_braces(answer: str) -> None:
    t = play(FencedCodeSampler(), QUESTION + f"⟦It is \\boxed{{1}}, no, \\boxed{{{answer}}}.<|im_end|>⟧")
    assert t.answer == answer


def test_a_text_that_is_cut_answers_nothing() -> None:
    t = play(FencedCodeSampler(), QUESTION + "⟦\\boxed{42}⟧", limits=RolloutLimits(max_line_tokens=10))
    assert (t.stop, t.answer) == (Stop.LINE_TOO_LONG, None)


def test_printed_control_tokens_and_fences_stay_text() -> None:
    t = play(
        FencedCodeSampler(),
        QUESTION
        + "⟦```python\nprint('<|im_' + 'end|>```python')\n```⟧\n```output\n<|im_end|>```python\n```\n⟦ok<|im_end|>⟧",
    )
    observed = t.segments[1].token_ids
    assert not set(observed) & {0}
    assert len(t.lines) == 2


def test_blocks_and_outputs_may_be_marked_otherwise() -> None:
    play(
        FencedCodeSampler(block=r"<code>(.*?)</code>", output="<interpreter>{}</interpreter>"),
        QUESTION + "⟦<code>print(6 * 7)</code>⟧\n<interpreter>42\n</interpreter>⟦<|im_end|>⟧",
    )


@pytest.mark.parametrize("pattern", ["(", "no group", "(a)(b)"])
@pytest.mark.parametrize("option", ["answer", "block", "output"])
def test_an_unusable_option_is_named(option: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match=option):
        FencedCodeSampler(**{option: pattern})
