"""Every chat template that TRL ships, and what can be done with it."""

import asyncio

import pytest

from benchmarks.models.templates import (
    CALL,
    ENDS,
    PAGE,
    QUESTION,
    SCHEMA,
    SUMMARY,
    names,
    renderer_of,
    row,
    summary,
    table,
)
from repl_rl.errors import ConfigError
from repl_rl.samplers.chat_format import ChatFormat
from repl_rl.samplers.chat_tool_sampler import ChatToolSampler
from repl_rl.samplers.retry_with_feedback_sampler import FeedbackSampler
from repl_rl.samplers.tool_call_parsing import detect_call_parser
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Observed, Stop
from tests.support.samplers.marked_text import rollouts_of, written

UNREAD = {"lfm2": "writes no call", "muse_glimmer": "nobody says how it is read"}
TASK = Task("sum", "What is 40 + 2?", "42")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One of them.
        b: The other.
    """
    return a + b


def test_the_results_have_the_table_of_all_templates_and_the_page_its_counts() -> None:
    rows = [row(name) for name in names()]
    assert PAGE.text == table(rows)
    assert SUMMARY.text == summary(rows)


def test_all_templates_with_tools_are_read_but_those_that_are_named() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.text.splitlines()[2:-1]]
    assert len(rows) == len(names()) >= 41
    assert {name for name, feedback, *_ in rows if feedback == "no"} == set()
    assert {name for name, _, tools, parsed, *_ in rows if (tools, parsed) == ("yes", "no")} == set(UNREAD)
    assert sum(parsed == "yes" for _, _, _, parsed, *_ in rows) >= 26


def writing_tools() -> list[str]:
    found = []
    for name in names():
        text = ChatFormat(renderer_of(name)).template
        if text.render_text([QUESTION], True, [SCHEMA]) != text.render_text([QUESTION], True) and name not in UNREAD:
            found.append(name)
    return found


@pytest.mark.parametrize("name", writing_tools())
def test_a_policy_calls_a_tool_and_answers_in_the_format_of_its_template(name: str) -> None:
    renderer = renderer_of(name)
    sampler = ChatToolSampler([add])
    sampler.check_policy(renderer, "chat")
    chat = ChatFormat(renderer, sampler.schemas)
    opened = chat.render([QUESTION], True)
    whole = chat.render([QUESTION, CALL], False)
    call = whole[len(chat.render([QUESTION], False)) :].removeprefix(opened[len(chat.render([QUESTION], False)) :])
    end = next((end for end in ENDS if end in call), "")
    call = call.partition(end)[0] if end else call
    end = end or renderer.decode([renderer.end_id])
    script = written(renderer, f"{call}{end}It is \\boxed{{42}}.{renderer.decode([renderer.end_id])}")
    (t,) = asyncio.run(rollouts_of(sampler, [script], renderer).collect([TASK]))
    assert (t.stop, t.outcome, [r.name for r in t.lines[0].rewards]) == (Stop.ANSWERED, 1.0, ["tools/answered"])
    assert isinstance(t.segments[1], Observed)
    assert "42" in t.segments[1].text
    assert renderer.decode(t.segments[1].token_ids) == t.segments[1].text


@pytest.mark.parametrize("name", names())
def test_a_policy_is_told_something_and_tries_again_in_the_format_of_its_template(name: str) -> None:
    renderer = renderer_of(name)
    sampler = FeedbackSampler()
    sampler.check_policy(renderer, "chat")
    end = renderer.decode([renderer.end_id])
    script = written(renderer, f"\\boxed{{41}}{end}\\boxed{{42}}{end}")
    (t,) = asyncio.run(rollouts_of(sampler, [script], renderer).collect([TASK]))
    assert (t.stop, t.outcome, len(t.lines)) == (Stop.ANSWERED, 1.0, 2)


def test_text_of_the_question_reaches_templates_that_want_parts() -> None:
    for name in ("idefics3", "llava_next", "smolvlm"):
        assert "How many?" in ChatFormat(renderer_of(name)).build_prompt([QUESTION]).text


def test_a_template_that_trl_does_not_know_is_read_as_the_one_that_it_is_a_variant_of() -> None:
    renderer = renderer_of("gemma4")
    renderer.tokenizer.chat_template += "{# ours #}"
    assert detect_call_parser(ChatFormat(renderer, [SCHEMA])).source == "trl"


def test_a_format_of_ours_is_the_last_resort_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    renderer = renderer_of("qwen3")
    template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
        '{% for c in m.tool_calls or [] %}{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | '
        "tojson }} }{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    renderer.tokenizer.chat_template = template
    sampler = ChatToolSampler([add])
    sampler.check_policy(renderer, "chat")
    assert "our format bare_json" in (sampler.fallback(renderer) or "")
    assert "our format bare_json" in caplog.text
    assert ChatToolSampler([add]).fallback(renderer_of("qwen3")) is None


def test_what_is_no_call_is_told_to_the_policy_that_wrote_it() -> None:
    reader = detect_call_parser(ChatFormat(renderer_of("qwen3"), [SCHEMA]))
    (bad,) = reader.parse('<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>')
    assert "SyntaxError" in getattr(bad, "text", "")
    assert reader.parse("I call nothing.") == []


def test_a_turn_ends_with_the_end_token_that_the_template_writes_whichever_ids_are_lower() -> None:
    renderer = renderer_of("llama3_1")
    assert len(renderer.eos_ids) == 2
    assert ChatFormat(renderer).encode_reply([QUESTION], 9).text.startswith("<|start_header_id|>user")


def test_a_tokenizer_whose_end_token_is_another_than_the_templates_is_refused() -> None:
    renderer = renderer_of("qwen3")
    renderer.tokenizer.eos_token = "<think>"
    with pytest.raises(ConfigError, match=r"must end with '<think>'.*generation_config"):
        FeedbackSampler().check_policy(type(renderer)(renderer.tokenizer), "chat")
