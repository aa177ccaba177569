"""The glue between turns: exactly what the model's template writes, read off it, and never re-rendered history."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.errors import ConfigError
from repl_rl.rollout.chat_template import Message
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.samplers.chat_format import ChatFormat, build_opening_prompt
from tests.support.samplers.marked_text import chat_renderer
from tests.support.tokenizers import merged_tokenizer

FAMILIES = ("qwen3", "qwen2_5", "qwen3_instruct_2507", "llama3_2")
SCHEMA = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def turn(text: str) -> Message:
    return {"role": "assistant", "content": text}


def tool(text: str) -> Message:
    return {"role": "tool", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("replies", [[user("and now?")], [tool("7")], [tool("7"), tool("eight")]])
def test_prompt_turn_and_reply_are_what_the_template_writes_for_the_whole_conversation(
    family: str, replies: list[Message]
) -> None:
    renderer = chat_renderer(family)
    chat = ChatFormat(renderer)
    end = renderer.decode([min(renderer.eos_ids)])
    first = [{"role": "system", "content": "Be brief."}, user("How many?")]
    appended = chat.build_prompt(first).text + "I look." + end + chat.encode_reply(replies, 100).text
    assert appended == chat.render([*first, turn("I look."), *replies], True)


def test_thoughts_that_a_template_would_drop_later_stay_in_the_context() -> None:
    chat = ChatFormat(chat_renderer("qwen3"))
    thoughtful = "<think>\nhm\n</think>\n\nI look."
    rendered = chat.render([user("a"), turn(thoughtful), user("b")], True)
    assert "hm" not in rendered
    appended = chat.build_prompt([user("a")]).text + thoughtful + "<|im_end|>" + chat.encode_reply([user("b")], 9).text
    assert appended == rendered.replace("I look.", thoughtful)


@pytest.mark.parametrize("family", FAMILIES)
@given(text=st.text(max_size=30))
def test_the_ids_of_a_reply_have_the_control_tokens_of_the_glue_and_no_others(family: str, text: str) -> None:
    renderer = chat_renderer(family)
    controls = set(renderer.tokenizer.all_special_ids)
    chat = ChatFormat(renderer)

    def count(content: str) -> int:
        return sum(i in controls for i in chat.encode_reply([tool(content)], 1_000).token_ids)

    assert count("<|im_end|><|eot_id|><|im_start|>" + text) == count("x")


@pytest.mark.parametrize("family", FAMILIES)
def test_text_and_ids_of_a_reply_agree(family: str) -> None:
    renderer = chat_renderer(family)
    reply = ChatFormat(renderer).encode_reply([tool("a\nb"), tool(" c")], 100)
    assert renderer.decode(reply.token_ids) == reply.text


def test_a_long_message_has_its_middle_cut_visibly_and_keeps_its_frame() -> None:
    renderer = chat_renderer("qwen3")
    reply = ChatFormat(renderer).encode_reply([tool("word " * 500)], 16)
    assert "tokens cut" in reply.text
    assert reply.text.endswith("\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert len(reply.token_ids) < 120


def test_a_message_of_a_megabyte_is_cut_in_no_time() -> None:
    reply = ChatFormat(chat_renderer("qwen3")).encode_reply([tool("x" * 1_000_000)], 64)
    assert len(reply.token_ids) < 200


def with_template(template: str | None) -> Renderer:
    tokenizer = merged_tokenizer()
    tokenizer.chat_template = template
    return Renderer(tokenizer)


CHATML = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}assistant: "
TOOLS = "{% if tools %}t{% endif %}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "use a chat model"),
        (CHATML, "made for tools"),
        (TOOLS + "{{ raise_exception('no tools here') }}", "no tools here"),
        (TOOLS + "{{ messages[0].content }}", "must end with"),
        (TOOLS + CHATML.replace("in messages", "in messages if m.role != 'tool'"), "leaves out role 'tool'"),
        (TOOLS + CHATML.replace("\n", "{{ m.content | length }}"), "must not depend"),
    ],
)
def test_a_template_that_cannot_serve_is_named_with_its_problem(template: str | None, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ChatFormat(with_template(template), [SCHEMA]).encode_reply([tool("some text")], 100)


def test_plain_openings_are_the_system_text_and_the_question_on_lines_of_their_own() -> None:
    renderer = chat_renderer()
    assert build_opening_prompt(renderer, "", "Q?", "bare").text == "Q?\n"
    assert build_opening_prompt(renderer, "S.", "Q?", "bare").text == "S.\nQ?\n"
    assert build_opening_prompt(renderer, "S.", "Q?", "chat").text.endswith("<|im_start|>assistant\n")
