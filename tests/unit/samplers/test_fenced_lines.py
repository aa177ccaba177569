"""Code between fences that runs line by line: what each line prints follows it as comments."""

import pytest

from repl_rl.errors import ConfigError
from repl_rl.rollout.prompts import OWN
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.samplers.fenced_line_sampler import SYSTEM, FencedLineSampler
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import LineStatus, Stop, Trajectory
from tests.support.samplers.marked_text import chat_renderer, play

QUESTION = "What is 6 * 7?\n"
OPENED = QUESTION + "⟦```python\n"


def statuses(t: Trajectory) -> list[LineStatus]:
    return [execution.status for execution in t.executions]


def test_each_line_of_a_block_runs_as_it_is_written_and_its_output_follows_as_a_comment() -> None:
    t = play(
        FencedLineSampler(system=""),
        QUESTION
        + "⟦I compute it.\n```python\nx = 6 * 7\n⟧⟦x\n⟧# 42\n⟦print(x, 'is it\\nand', x)\n⟧# 42 is it\n# and 42\n"
        "⟦```⟧\n⟦So it is \\boxed{42}.<|im_end|>⟧",
    )
    assert (t.stop, t.answer, t.outcome) == (Stop.EOS, "42", 1.0)
    assert statuses(t) == [LineStatus.OK, LineStatus.OK, LineStatus.OK, LineStatus.ANSWERED]


def test_an_error_ends_neither_block_nor_console() -> None:
    t = play(
        FencedLineSampler(system=""),
        OPENED + "x = 41\n⟧⟦x / 0\n⟧"
        "# ZeroDivisionError: division by zero\n"
        "⟦x + 1\n⟧# 42\n⟦submit_final_answer(x + 1)\n⟧",
    )
    assert (t.stop, t.answer, t.outcome) == (Stop.ANSWERED, "42", 1.0)
    assert statuses(t) == [LineStatus.OK, LineStatus.EXCEPTION, LineStatus.OK, LineStatus.ANSWERED]


def test_names_live_on_in_later_blocks() -> None:
    t = play(
        FencedLineSampler(system=""),
        OPENED + "x = 40\n⟧⟦```⟧\n⟦And two more.\n```py\nx + 2\n⟧# 42\n⟦```⟧\n⟦\\boxed{42}<|im_end|>⟧",
    )
    assert t.outcome == 1.0


@pytest.mark.parametrize(
    ("block", "printed"),
    [
        ("for i in range(2):\n⟧⟦    i\n⟧⟦i + 5\n⟧", "# 0\n# 1\n# 6\n"),
        ("if False:\n⟧⟦    1\n⟧⟦elif True:\n⟧⟦    2\n⟧⟦else:\n⟧⟦    3\n⟧⟦4\n⟧", "# 2\n# 4\n"),
        ("try:\n⟧⟦    1 / 0\n⟧⟦except ZeroDivisionError:\n⟧⟦    7\n⟧⟦finally:\n⟧⟦    8\n⟧⟦9\n⟧", "# 7\n# 8\n# 9\n"),
        ("def f(\n⟧⟦    x,\n⟧⟦):\n⟧⟦    return x\n⟧⟦f(1)\n⟧", "# 1\n"),
        ("def f():\n⟧⟦    return 1\n⟧⟦\n⟧⟦f()\n⟧", "# 1\n"),
        ("def f():\n⟧⟦    return 1\n⟧⟦# A comment at the margin.\n⟧⟦f()\n⟧", "# 1\n"),
        ("@staticmethod\n⟧⟦def f(): pass\n⟧⟦2\n⟧", "# 2\n"),
        ("x = '''\n⟧⟦  for\n⟧⟦at the margin'''\n⟧⟦len(x)\n⟧", "# 20\n"),
        ("x = [\n⟧⟦    1,\n⟧⟦2,\n⟧⟦]\n⟧⟦x\n⟧", "# [1, 2]\n"),
        ("match 3:\n⟧⟦    case 3:\n⟧⟦        5\n⟧⟦6\n⟧", "# 5\n# 6\n"),
    ],
)
def test_a_statement_at_the_left_margin_ends_a_block_statement_as_in_a_program(block: str, printed: str) -> None:
    t = play(FencedLineSampler(system=""), OPENED + block + printed + "⟦```⟧\n⟦\\boxed{42}<|im_end|>⟧")
    assert t.outcome == 1.0
    assert not any(status.is_error for status in statuses(t))


def test_a_block_statement_ends_with_its_block_of_code_and_its_output_stands_between_fences() -> None:
    t = play(
        FencedLineSampler(system=""),
        OPENED + "for i in range(2):\n⟧⟦    print(i)\n⟧⟦```⟧\n```output\n0\n1\n```\n⟦\\boxed{42}<|im_end|>⟧",
    )
    assert statuses(t)[:3] == [LineStatus.INCOMPLETE, LineStatus.INCOMPLETE, LineStatus.OK]


def test_an_end_token_within_a_block_ends_its_last_line() -> None:
    t = play(FencedLineSampler(system=""), OPENED + "submit_final_answer(6 * 7)<|im_end|>⟧")
    assert (t.answer, t.outcome) == ("42", 1.0)


def test_only_text_after_the_last_block_answers() -> None:
    t = play(
        FencedLineSampler(system=""),
        QUESTION + "⟦\\boxed{42}\n```python\nprint(r'\\boxed{42}')\n⟧# \\boxed{42}\n⟦```⟧\n⟦So.<|im_end|>⟧",
    )
    assert (t.stop, t.answer) == (Stop.EOS, None)


def test_text_and_lines_of_code_have_budgets_of_their_own() -> None:
    limits = RolloutLimits(max_line_tokens=4)
    long = play(FencedLineSampler(system=""), QUESTION + "⟦I compute it.\n```python\naaaa⟧", limits=limits)
    assert (long.stop, statuses(long)) == (Stop.LINE_TOO_LONG, [])
    short = play(FencedLineSampler(system="", text_tokens=4), QUESTION + "⟦\\box⟧")
    assert (short.stop, short.answer) == (Stop.LINE_TOO_LONG, None)


def test_lines_of_code_are_limited_in_number() -> None:
    t = play(
        FencedLineSampler(system=""),
        OPENED + "1\n⟧# 1\n⟦2\n⟧# 2\n",
        limits=RolloutLimits(max_lines=3, max_line_tokens=100),
    )
    assert t.stop is Stop.MAX_LINES


def test_printed_control_tokens_and_fences_stay_text() -> None:
    t = play(
        FencedLineSampler(system=""),
        OPENED + "print('<|im_' + 'end|>\\n```')\n⟧# <|im_end|>\n# ```\n⟦```⟧\n⟦ok<|im_end|>⟧",
    )
    assert len(statuses(t)) == 1


def test_outputs_may_be_marked_otherwise() -> None:
    play(FencedLineSampler(system="", output="#=> {}"), OPENED + "6 * 7\n⟧#=> 42\n⟦```⟧\n⟦<|im_end|>⟧")


def test_the_default_text_describes_the_protocol_and_a_prompt_file_replaces_it() -> None:
    renderer, task = chat_renderer(), Task("t", "What is 6 * 7?", "42")
    prompts = [
        FencedLineSampler().prompt(task, renderer, template, "3").text for template in ("chat", f"{OWN}Be quick.\n")
    ]
    assert [SYSTEM in text for text in prompts] == [True, False]
    with pytest.raises(ConfigError, match="system"):
        FencedLineSampler(system="Mine.").prompt(task, renderer, f"{OWN}Be quick.\n", "3")


def test_an_unusable_option_is_named() -> None:
    for answer in ("(", "(a)(b)"):
        with pytest.raises(ConfigError, match="answer"):
            FencedLineSampler(answer=answer)
    for output in ("none", "{}{}"):
        with pytest.raises(ConfigError, match="output"):
            FencedLineSampler(output=output)
