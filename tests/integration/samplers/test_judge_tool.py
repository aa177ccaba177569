"""The judge as a tool: right or wrong, a few times, and never the reference answer."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.errors import ConfigError
from repl_rl.samplers.chat_tool_sampler import JudgeToolSampler
from repl_rl.tasks import Task
from repl_rl.trainer.logprobs import broadcast_to_tokens
from repl_rl.trajectory.trajectory import Observed, Stop
from tests.support.samplers.marked_text import chat_renderer, play, rollouts_of, written

EGGS = Task("eggs", "16 eggs, 3 eaten, 4 baked, the rest sold at 2 dollars: how much?", "18", judge="numeric")


def check(answer: str) -> str:
    return f'<tool_call>\n{{"name": "check_answer", "arguments": {{"answer": {answer}}}}}\n</tool_call>'


def told(text: str) -> str:
    return f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def asked(sampler: JudgeToolSampler) -> str:
    return sampler.prompt(EGGS, chat_renderer(), "chat", "3.11").text


def test_an_answer_is_checked_corrected_and_given() -> None:
    sampler = JudgeToolSampler(checks=2)
    t = play(
        sampler,
        f"{asked(sampler)}⟦13 - 4 = 9. {check('9')}<|im_end|>⟧{told('wrong')}⟦9 * 2! {check(chr(34) + '18' + chr(34))}"
        f"<|im_end|>⟧{told('right')}⟦\\boxed{{18}}<|im_end|>⟧",
        EGGS,
    )
    assert (t.stop, t.answer, t.outcome) == (Stop.ANSWERED, "18", 1.0)


def test_advantages_are_aligned_with_the_tokens_of_the_turns_whatever_the_padding() -> None:
    sampler = JudgeToolSampler()
    t = play(sampler, f"{asked(sampler)}⟦{check('9')}<|im_end|>⟧{told('wrong')}⟦\\boxed{{18}}<|im_end|>⟧", EGGS)
    first, second = (len(line.token_ids) for line in t.lines)
    observed = t.observed_tokens
    for padding in (0, 1, 100):
        row = broadcast_to_tokens([[-1.0, 2.0]], [t], len(t.completion_ids) + padding)[0].tolist()
        assert row == [-1.0] * first + [0.0] * observed + [2.0] * second + [0.0] * padding


def test_checks_are_few_and_can_reveal_nothing() -> None:
    once = JudgeToolSampler(checks=1)
    play(
        once,
        f"{asked(once)}⟦{check('1')}<|im_end|>⟧{told('wrong')}⟦{check('18')}<|im_end|>⟧"
        f"{told('PermissionError: no checks are left')}⟦hm<|im_end|>⟧",
        EGGS,
    )
    silent = JudgeToolSampler(reveal="nothing")
    play(silent, f"{asked(silent)}⟦{check('18')}<|im_end|>⟧{told('noted')}⟦\\boxed{{18}}<|im_end|>⟧", EGGS)


@given(
    reference=st.integers(10_000, 10**9).map(str),
    tries=st.lists(st.integers(0, 9_999).map(str), min_size=1, max_size=3),
)
def test_what_is_shown_never_holds_the_reference_answer(reference: str, tries: list[str]) -> None:
    sampler = JudgeToolSampler(checks=2)
    renderer = chat_renderer()
    task = Task("t", "How much?", reference, judge="numeric")
    turns = [*map(check, tries), "\\boxed{1}"]
    ids = written(renderer, "".join(f"{turn}<|im_end|>" for turn in turns))
    (t,) = asyncio.run(rollouts_of(sampler, [ids], renderer).collect([task]))
    assert reference not in t.prompt.text
    assert not any(reference in s.text for s in t.segments if isinstance(s, Observed))


def test_an_error_of_the_judge_is_never_shown_to_the_policy() -> None:
    sampler = JudgeToolSampler()
    renderer = chat_renderer()
    good = [Task(str(i), f"q{i}", "1", judge="numeric") for i in range(2)]
    bad = Task("bad", "q", "the secret", judge="numeric")  # no number: the judge's complaint quotes it
    ids = written(renderer, f"{check('1')}<|im_end|>\\boxed{{1}}<|im_end|>")
    found = asyncio.run(rollouts_of(sampler, [ids], renderer).collect([bad, *good]))
    assert [t.stop for t in found] == [Stop.FAULT, Stop.ANSWERED, Stop.ANSWERED]
    assert not any("secret" in s.text for s in found[0].segments if isinstance(s, Observed))


@pytest.mark.parametrize("arguments", ["{}", '{"answer": "1", "hint": true}', '{"reply": 1}'])
def test_wrong_arguments_cost_no_check(arguments: str) -> None:
    sampler = JudgeToolSampler()
    bad = f'<tool_call>\n{{"name": "check_answer", "arguments": {arguments}}}\n</tool_call>'
    play(
        sampler,
        f"{asked(sampler)}⟦{bad}<|im_end|>⟧{told('TypeError: check_answer() takes one argument, answer')}"
        f"⟦{check('18')}<|im_end|>⟧{told('right')}⟦\\boxed{{18}}<|im_end|>⟧",
        EGGS,
    )


def test_no_checks_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match="checks"):
        JudgeToolSampler(checks=0)
