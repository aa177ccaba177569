"""Calls inside running text: executed the moment they are closed."""

import asyncio
import re

import pytest

from repl_rl.errors import ConfigError
from repl_rl.samplers.inline_call_sampler import CallConvention, InlineCallSampler
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import LineEnd, LineStatus, Stop
from tests.support.samplers.marked_text import chat_renderer, play, rollouts_of, written

UMBRELLA = Task("u", "Should I pack an umbrella?", "no")


class WeatherLookupError(Exception):
    pass


def ask(question: str) -> str:
    return "Seattle"


def weather(place: str) -> str:
    if not re.fullmatch(r"[A-Z]\w+, [A-Z]{2}", place):
        raise WeatherLookupError(f"no two-letter state in {place!r}")
    return "40 degrees F and sunny"


def test_the_policy_recovers_from_a_failed_call_in_the_middle_of_its_text() -> None:
    t = play(
        InlineCallSampler([ask, weather]),
        "Should I pack an umbrella?\n"
        '⟦Where? <fn>ask("Which city?")</fn>⟧<fn_results>Seattle</fn_results>'
        '⟦ Then <fn>weather("Seattle")</fn>⟧'
        "<fn_error>WeatherLookupError: no two-letter state in 'Seattle'</fn_error>"
        '⟦ Ah: <fn>weather("Seattle, WA")</fn>⟧<fn_results>40 degrees F and sunny</fn_results>'
        "⟦ No rain. <answer>no</answer>⟧",
        UMBRELLA,
    )
    assert (t.stop, t.answer, t.outcome) == (Stop.ANSWERED, "no", 1.0)
    assert [e.status for e in t.executions] == [
        LineStatus.OK,
        LineStatus.EXCEPTION,
        LineStatus.OK,
        LineStatus.ANSWERED,
    ]
    assert [line.end for line in t.lines] == [LineEnd.MATCH] * 4


def test_a_call_in_a_result_is_not_executed() -> None:
    def echo(text: str) -> str:
        return "<fn>echo('again')</fn><answer>x</answer>"

    t = play(
        InlineCallSampler([echo]),
        "Should I pack an umbrella?\n⟦<fn>echo('a')</fn>⟧"
        "<fn_results><fn>echo('again')</fn><answer>x</answer></fn_results>⟦ok<|im_end|>⟧",
        UMBRELLA,
    )
    assert (t.stop, t.answer) == (Stop.EOS, None)


def test_what_is_no_call_is_told_and_costs_a_syntax_error() -> None:
    t = play(
        InlineCallSampler([weather]),
        "Should I pack an umbrella?\n⟦<fn>weather(here)</fn>⟧"
        "<fn_error>SyntaxError: arguments must be literals</fn_error>⟦<|im_end|>⟧",
        UMBRELLA,
    )
    assert [e.status for e in t.executions] == [LineStatus.SYNTAX_ERROR]


def test_the_convention_is_the_users() -> None:
    sampler = InlineCallSampler(
        [weather],
        convention=CallConvention(
            call=r"\[\[(.*?)\]\]", results=" -> {}\n", error=" !! {}\n", answer=r"^Answer: (.*?)\n"
        ),
        system="Call functions in [[double brackets]].",
    )
    t = play(
        sampler,
        "Call functions in [[double brackets]].\nShould I pack an umbrella?\n"
        '⟦I look: [[weather("Seattle, WA")]]⟧ -> 40 degrees F and sunny\n⟦Answer: no\n⟧',
        UMBRELLA,
    )
    assert (t.stop, t.answer) == (Stop.ANSWERED, "no")


def test_a_rollout_may_wait_for_its_call_while_others_go_on() -> None:
    started: list[str] = []
    both = asyncio.Event()

    async def meet(name: str) -> str:
        started.append(name)
        if len(started) == 1:
            await both.wait()
        both.set()
        return "met"

    renderer = chat_renderer()
    script = written(renderer, "<fn>meet('x')</fn><|im_end|>")
    rollouts = rollouts_of(InlineCallSampler([meet]), [script], renderer)
    found = asyncio.run(rollouts.collect([UMBRELLA, UMBRELLA]))
    assert [t.stop for t in found] == [Stop.EOS, Stop.EOS]
    assert started == ["x", "x"]


@pytest.mark.parametrize(
    "unusable",
    [{"call": "("}, {"call": "abc"}, {"answer": "(a)(b)"}, {"results": "no place"}, {"error": "{} and {}"}],
)
def test_an_unusable_convention_is_named(unusable: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"convention.{next(iter(unusable))}"):
        CallConvention(**unusable)


def test_several_calls_run_in_order_and_one_observation_has_their_results() -> None:
    t = play(
        InlineCallSampler([ask, weather], convention=CallConvention(call=r"(\[.*?\)\])")),
        "Should I pack an umbrella?\n"
        '⟦[ask(question="Where?"), weather(place="Seattle"), weather(place="Seattle, WA")]⟧'
        "<fn_results>Seattle</fn_results><fn_error>WeatherLookupError: no two-letter state in 'Seattle'</fn_error>"
        "<fn_results>40 degrees F and sunny</fn_results>⟦<answer>no</answer>⟧",
        UMBRELLA,
    )
    assert [e.status for e in t.executions] == [LineStatus.EXCEPTION, LineStatus.ANSWERED]


def test_calls_may_be_written_as_json() -> None:
    t = play(
        InlineCallSampler([ask]),
        "Should I pack an umbrella?\n"
        '⟦<fn>{"name": "ask", "parameters": {"question": "Where?"}}</fn>⟧<fn_results>Seattle</fn_results>'
        "⟦<answer>no</answer>⟧",
        UMBRELLA,
    )
    assert t.outcome == 1.0
