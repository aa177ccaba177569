"""Chat-style tools: calls parsed, run at the same time, answered as the template answers them, counted."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from repl_rl.errors import ConfigError
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.samplers.chat_format import ChatFormat
from repl_rl.samplers.chat_tool_sampler import ChatToolSampler
from repl_rl.samplers.tool_call_parsing import (
    ToolCall,
    ToolResult,
    detect_call_parser,
    parse_bare_json_call,
    parse_tagged_calls,
)
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import LineStatus, Stop
from tests.support.samplers.marked_text import LIMITS, chat_renderer, play, rollouts_of, written
from tests.support.scripted_rollouts import TASK
from tests.support.tokenizers import merged_tokenizer


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


GOOD, BAD = call("multiply", '{"a": 6, "b": 7}'), call("multiply", '{"a": 6, "c": 7}')
ANSWERED = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def asked(sampler: ChatToolSampler) -> str:
    return sampler.prompt(TASK, chat_renderer(), "chat", "3.11").text


def test_a_call_is_answered_in_the_models_own_format_and_the_last_turn_answers() -> None:
    sampler = ChatToolSampler([multiply])
    t = play(sampler, f"{asked(sampler)}⟦{GOOD}<|im_end|>⟧{ANSWERED}⟦It is \\boxed{{42}}.<|im_end|>⟧")
    assert (t.stop, t.answer, t.outcome) == (Stop.ANSWERED, "42", 1.0)
    assert "Multiply two integers" in t.prompt.text


def test_of_three_rollouts_two_call_and_one_of_them_wrongly() -> None:
    sampler = ChatToolSampler([multiply], answered=0.25, failed=-0.2, not_called=-0.3)
    renderer = chat_renderer()
    turns = [(GOOD, "\\boxed{42}"), (BAD, "\\boxed{13}"), ("I guess \\boxed{41}",)]
    scripts = [written(renderer, "".join(f"{text}<|im_end|>" for text in turn)) for turn in turns]
    found = [asyncio.run(rollouts_of(sampler, [script], renderer).collect([TASK]))[0] for script in scripts]
    assert dict(sampler.metrics(found)) == {
        "tools/call_frequency": 2 / 3,
        "tools/failure_frequency": 1 / 2,
        "tool/multiply/calls": pytest.approx(2 / 3),
        "tool/multiply/failures": pytest.approx(1 / 3),
    }
    rewards = [[(r.name, r.value) for line in t.lines for r in line.rewards] for t in found]
    assert rewards == [[("tools/answered", 0.25)], [("tools/failed", -0.2)], [("tools/not_called", -0.3)]]
    assert [t.outcome for t in found] == [1.0, 0.0, 0.0]


def test_metrics_of_no_rollouts_are_zero() -> None:
    figures = ChatToolSampler([multiply]).metrics([])
    assert dict.fromkeys(figures, 0.0) == dict(figures)


def test_calls_of_functions_that_nobody_offered_are_told_together() -> None:
    sampler = ChatToolSampler([multiply])
    renderer = chat_renderer()
    script = written(renderer, f"{call('a', '{}')}{call('b', '{}')}<|im_end|>\\boxed{{42}}<|im_end|>")
    found = asyncio.run(rollouts_of(sampler, [script], renderer).collect([TASK]))
    figures = sampler.metrics(found)
    assert (figures["tool/other/calls"], figures["tool/other/failures"], figures["tool/multiply/calls"]) == (2, 2, 0)


def test_calls_of_one_turn_run_at_the_same_time_and_are_answered_in_their_order() -> None:
    meeting = threading.Barrier(2, timeout=5)

    def meet(name: str) -> str:
        """Meet.

        Args:
            name: Who.
        """
        meeting.wait()
        return f"{name} was there"

    sampler = ChatToolSampler([meet])
    both = call("meet", '{"name": "a"}') + "\n" + call("meet", '{"name": "b"}')
    play(
        sampler,
        f"{asked(sampler)}⟦{both}<|im_end|>⟧\n<|im_start|>user\n<tool_response>\na was there\n</tool_response>"
        "\n<tool_response>\nb was there\n</tool_response><|im_end|>\n<|im_start|>assistant\n⟦bye<|im_end|>⟧",
    )


def test_a_tool_that_hangs_or_raises_hurts_nobody_else() -> None:
    release = threading.Event()

    def hang() -> str:
        """Hang."""
        release.wait()
        return ""

    def fail() -> str:
        """Fail."""
        raise KeyError("gone")

    sampler = ChatToolSampler([multiply, hang, fail], timeout_s=1.0)
    renderer = chat_renderer()
    scripts = {
        name: written(renderer, f"{text}<|im_end|>\\boxed{{42}}<|im_end|>")
        for name, text in {"good": GOOD, "hang": call("hang", "{}"), "fail": call("fail", "{}")}.items()
    }
    rollouts = rollouts_of(sampler, list(scripts.values()), renderer)
    found = asyncio.run(rollouts.collect([Task(str(i), f"q{i}", "42") for i in range(12)]))
    release.set()
    assert [t.outcome for t in found] == [1.0] * 12
    told = {t.lines[0].execution.status for t in found if t.lines[0].execution}
    assert told == {LineStatus.OK, LineStatus.TIMEOUT, LineStatus.EXCEPTION}


def test_a_turn_that_is_cut_ends_the_rollout_and_none_of_its_calls_is_run() -> None:
    ran = threading.Event()

    def touch() -> str:
        """Touch."""
        ran.set()
        return ""

    sampler = ChatToolSampler([touch])
    renderer = chat_renderer()
    text = call("touch", "{}")
    ids = written(renderer, text)
    limits = type(LIMITS)(max_line_tokens=len(ids))
    rollouts = rollouts_of(sampler, [[*ids, *written(renderer, "<|im_end|>")]], renderer, limits)
    (t,) = asyncio.run(rollouts.collect([TASK]))
    assert t.stop is Stop.LINE_TOO_LONG
    assert not ran.is_set()


def test_turns_are_bounded_by_the_lines_of_a_rollout() -> None:
    sampler = ChatToolSampler([multiply])
    renderer = chat_renderer()
    ids = written(renderer, f"{GOOD}<|im_end|>") * 20
    rollouts = rollouts_of(sampler, [ids], renderer, type(LIMITS)(max_lines=3, max_line_tokens=500))
    (t,) = asyncio.run(rollouts.collect([TASK]))
    assert (t.stop, len(t.lines)) == (Stop.MAX_LINES, 3)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("{", "not JSON"),
        ("[]", "write {"),
        ('{"name": 3}', "write {"),
        ('{"name": "f", "arguments": "x"}', "write {"),
        ("[" * 5_000, "not JSON"),
    ],
)
def test_what_looks_like_a_call_and_is_none_is_told(body: str, told: str) -> None:
    for text in (f"<tool_call>{body}</tool_call>", f"<tool_call>{body}"):
        (result,) = parse_tagged_calls(text)
        assert isinstance(result, ToolResult)
        assert result.status is LineStatus.SYNTAX_ERROR
        assert told in result.text


@pytest.mark.parametrize(
    ("family", "parse", "text"),
    [
        *((qwen, parse_tagged_calls, GOOD + BAD) for qwen in ("qwen3", "qwen2_5", "qwen3_instruct_2507")),
        ("llama3_2", parse_bare_json_call, '{"name": "multiply", "parameters": {"a": 6, "b": 7}}'),
    ],
)
def test_trls_reading_of_a_known_template_agrees_with_our_own_format(
    family: str, parse: Callable[[str], object], text: str
) -> None:
    reader = detect_call_parser(ChatFormat(chat_renderer(family)))
    assert (reader.source, reader.is_own_format) == ("trl", False)
    assert reader.parse(text) == parse(text) != []


def test_llama_calls_are_read() -> None:
    assert parse_bare_json_call('{"name": "f", "parameters": {"a": 1}}') == [ToolCall("f", (), {"a": 1})]
    assert parse_bare_json_call("The set {1, 2}") == []


def test_a_format_that_nobody_knows_is_named() -> None:
    tokenizer = merged_tokenizer()
    tokenizer.chat_template = (
        "{% if tools %}tools{% endif %}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{% endfor %}<|im_end|>{% endfor %}"
    )
    with pytest.raises(ConfigError, match="give parse=, a function from text to calls"):
        detect_call_parser(ChatFormat(Renderer(tokenizer)))


def undocumented(a: int) -> int:
    return a


def untyped(a):  # type: ignore[no-untyped-def]
    """Do.

    Args:
        a: It.
    """


@pytest.mark.parametrize("function", [undocumented, untyped])
def test_a_tool_without_a_schema_is_named(function: Callable[..., object]) -> None:
    with pytest.raises(ConfigError, match=rf"tool is '{function.__name__}'; give it type hints"):
        ChatToolSampler([function])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "function", "function": {"name": "undocumented", "x": {1, 2}}},
        {"type": "function", "function": {"name": "undocumented", "x": float("nan")}},
        {"type": "function", "function": {"name": "other"}},
        {"name": "undocumented"},
    ],
)
def test_a_schema_that_is_not_json_or_names_another_tool_is_refused(schema: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="schema of tool undocumented"):
        ChatToolSampler([undocumented], schemas={"undocumented": schema})
