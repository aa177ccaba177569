"""The texts in `prompts/`: what they show is what the console does, and the banner is the sandbox's own."""

import asyncio
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from repl_rl.errors import ConfigError
from repl_rl.rollout import RolloutSettings
from repl_rl.rollout.prompts import OWN, read_template
from repl_rl.rollout.prompts import load_template as load_template
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.samplers.chat_format import build_opening_prompt
from repl_rl.sandbox import InProcessSandbox
from repl_rl.trajectory.console_text import PS1, PS2
from repl_rl.utils.package_data import find_asset
from tests.support.scripted_rollouts import RENDERER, TASK, world
from tests.support.tokenizers import merged_tokenizer

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def chat_renderer() -> Renderer:
    tokenizer = merged_tokenizer()
    tokenizer.chat_template = CHAT
    return Renderer(tokenizer)


async def replayed(transcript: str) -> str:
    """What a console shows for the lines of a transcript."""
    shown = ""
    async with InProcessSandbox().session() as console:
        more = False
        for line in transcript.split("\n"):
            if line.startswith((PS1, PS2)):
                result = await console.push(line[4:])
                shown += f"{PS2 if more else PS1}{line[4:]}\n{result.text}"
                more = result.incomplete
    return shown


@pytest.mark.parametrize("template", ["few_shot", "chat_few_shot"])
def test_every_worked_example_is_what_the_console_shows_and_ends_with_a_final_answer(template: str) -> None:
    text = find_asset(f"prompts/{template}.txt").read_text().replace("{banner}>>> ", "")
    turns = [example.session for example in read_template(template).examples]
    examples = turns or [part for part in re.split(r"(?m)^# Task: .*\n", text)[1:] if part.strip()]
    assert len(examples) >= 2
    for example in examples:
        assert asyncio.run(replayed(example)) == example.rstrip("\n") + "\n"
        assert re.search(r">>> submit_final_answer\(.*\)\s*$", example)
    assert any("Error" in example for example in examples)


def test_worked_examples_of_a_chat_are_turns_between_the_system_message_and_the_question(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("Be brief.\n\n[user]\n6 * 7?\n[assistant]\n>>> 6 * 7\n42\n\n[user]\n{1}?\n[assistant]\n>>> {1}\n")
    own = load_template(str(file))
    asked = chat_renderer().build_prompt("And {2}?", own)
    turns = "<system>Be brief.\n<user>6 * 7?\n<assistant>>>> 6 * 7\n42\n\n<user>{1}?\n<assistant>>>> {1}\n\n"
    assert asked.text == turns + "<user>And {2}?\n<assistant>>>> "
    assert build_opening_prompt(chat_renderer(), "", "And {2}?", own).text == turns + "<user>And {2}?\n<assistant>"


@pytest.mark.parametrize(
    "turns", ["[user]\n1?\n", "[assistant]\n>>> 1\n", "[user]\n1?\n[user]\n2?\n", "[assistant]\n1\n[user]\n2\n"]
)
def test_turns_that_do_not_alternate_are_refused(turns: str) -> None:
    with pytest.raises(ConfigError, match="let a line \\[user\\]"):
        read_template(f"{OWN}Be brief.\n{turns}")


@pytest.mark.parametrize("template", ["base", "few_shot", "chat"])
def test_a_prompt_ends_with_the_question_and_the_banner_of_the_sandboxs_own_python(template: str) -> None:
    rollouts = replace(
        world(["submit_final_answer(42)\n"], renderer=chat_renderer()), settings=RolloutSettings(template)
    )
    (t,) = asyncio.run(rollouts.collect([TASK]))
    version = ".".join(map(str, sys.version_info[:3]))
    head, _, tail = t.prompt.text.rpartition(TASK.question)
    assert head
    assert f"Python {version} on linux\n" in tail
    assert tail.endswith('"license" for more information.\n>>> ')
    assert not re.search(r"\{\w+\}", t.prompt.text)


@pytest.mark.parametrize("template", ["bare", "base", "few_shot"])
def test_a_question_with_braces_stays_as_it_is(template: str) -> None:
    assert "What is {banner} + {question}?" in RENDERER.build_prompt("What is {banner} + {question}?", template).text
