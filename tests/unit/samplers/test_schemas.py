"""Schemas of tools: malformed ones are refused at load, arguments of another type are told to the policy."""

from collections.abc import Mapping

import pytest

from repl_rl.errors import ConfigError
from repl_rl.samplers.chat_tool_sampler import ChatToolSampler
from repl_rl.samplers.tool_call_parsing import find_wrong_argument, validate_tool_schema
from repl_rl.trajectory.trajectory import LineStatus
from tests.support.samplers.marked_text import chat_renderer, play
from tests.support.scripted_rollouts import TASK

Schema = Mapping[str, object]


def triple(number: int) -> int:
    """Three times a number.

    Args:
        number: Which number.
    """
    return number * 3


def tool(parameters: object) -> Schema:
    return {"type": "function", "function": {"name": "triple", "parameters": parameters}}


def having(number: object, **more: object) -> Schema:
    return tool({"type": "object", "properties": {"number": number}, **more})


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (tool({"type": "array"}), 'parameters is .*; give {"type": "object"'),
        (tool("none"), "parameters is 'none'"),
        ({"function": {"name": "triple"}}, 'give {"type": "function"'),
        ({"type": "function", "function": {"name": "other"}}, 'give {"type": "function"'),
        (having({"type": "int"}), "parameters, number, type is 'int'; choose among string, integer"),
        (having("integer"), "parameters, number is 'integer'; give a JSON schema"),
        (having({"enum": []}), "number, enum is .*; give a list, not empty"),
        (having({"type": "array", "items": {"type": "text"}}), "number, items, type is 'text'"),
        (having({"anyOf": [{"type": "long"}]}), "number, anyOf 0, type is 'long'"),
        (having({}, required=["count"]), "required is .*; list names of its properties: number"),
        (having({}, required="number"), "required is 'number'"),
        (tool({"type": "object", "properties": []}), "properties is .*; give an object"),
    ],
)
def test_a_malformed_schema_is_refused_when_the_sampler_is_made(schema: Schema, told: str) -> None:
    with pytest.raises(ConfigError, match=f"schema of tool triple.*{told}"):
        ChatToolSampler([triple], schemas={"triple": schema})


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ({"type": "string"}, ["", "17"], [17, None, ["a"]]),
        ({"type": "integer"}, [17, 17.0, -1], ["17", 17.5, True, None]),
        ({"type": "number"}, [17, 0.5], ["17", False]),
        ({"type": "boolean"}, [True, False], [1, "true", None]),
        ({"type": "null"}, [None], [0]),
        ({"type": ["integer", "null"]}, [1, None], ["1"]),
        ({"type": "integer", "nullable": True}, [1, None], ["1"]),
        ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [[1, "2"], "12", {}]),
        ({"enum": ["a", 1]}, ["a", 1], ["b", True, 1.0]),
        ({"const": "a"}, ["a"], ["b"]),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [1.5, None]),
        (
            {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
            [{"x": 1}, {"x": 1, "y": 2}],
            [{}, {"x": "1"}, [1]],
        ),
        ({}, [1, "a", None], []),
    ],
)
def test_arguments_are_held_to_their_schema(kind: Schema, right: list[object], wrong: list[object]) -> None:
    schema = having(kind)
    validate_tool_schema("triple", schema)
    assert [find_wrong_argument(schema, {"number": value}) for value in right] == [None] * len(right)
    assert all(find_wrong_argument(schema, {"number": value}) for value in wrong)
    assert find_wrong_argument(schema, {"other": object()}) is None


@pytest.mark.parametrize(
    ("written", "told", "status"),
    [
        ("[17]", "TypeError: triple(): number is [17]; give a whole number", LineStatus.EXCEPTION),
        ("17", "51", LineStatus.OK),
    ],
)
def test_an_argument_of_another_type_is_told_to_the_policy_and_reaches_no_function(
    written: str, told: str, status: LineStatus
) -> None:
    sampler = ChatToolSampler([triple])
    call = f'<tool_call>\n{{"name": "triple", "arguments": {{"number": {written}}}}}\n</tool_call>'
    answered = f"\n<|im_start|>user\n<tool_response>\n{told}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    asked = sampler.prompt(TASK, chat_renderer(), "chat", "3.11").text
    t = play(sampler, f"{asked}⟦{call}<|im_end|>⟧{answered}⟦\\boxed{{42}}<|im_end|>⟧")
    assert next(iter(t.executions)).status is status
