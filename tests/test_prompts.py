"""The texts in `prompts/`: what they show is what the console does, and the banner is the sandbox's own."""

import asyncio
import re
import sys
from dataclasses import replace

import pytest

from repl_rl.machine.assets import asset
from repl_rl.record.console import PS1, PS2
from repl_rl.rollout.renderer import Renderer
from repl_rl.sandbox import InProcessSandbox
from tests.conftest import merged_tokenizer
from tests.worlds import RENDERER, TASK, world

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
                more = result.more
    return shown


@pytest.mark.parametrize("template", ["few_shot", "chat_few_shot"])
def test_every_worked_example_is_what_the_console_shows_and_ends_with_a_final_answer(template: str) -> None:
    text = asset(f"prompts/{template}.txt").read_text().replace("{banner}>>> ", "")
    examples = [part for part in re.split(r"(?m)^(?:# Task|The task): .*\n", text)[1:] if part.strip()]
    assert len(examples) >= 2
    for example in examples:
        assert asyncio.run(replayed(example)) == example.rstrip("\n") + "\n"
        assert re.search(r">>> submit_final_answer\(.*\)\s*$", example)
    assert any("Error" in example for example in examples)


@pytest.mark.parametrize("template", ["base", "few_shot", "chat", "chat_few_shot"])
def test_a_prompt_ends_with_the_question_and_the_banner_of_the_sandboxs_own_python(template: str) -> None:
    rollouts = replace(world(["submit_final_answer(42)\n"], renderer=chat_renderer()), template=template)
    (t,) = asyncio.run(rollouts.collect([TASK]))
    version = ".".join(map(str, sys.version_info[:3]))
    head, _, tail = t.prompt.text.rpartition(TASK.question)
    assert head
    assert f"Python {version} on linux\n" in tail
    assert tail.endswith('"license" for more information.\n>>> ')
    assert not re.search(r"\{\w+\}", t.prompt.text)


@pytest.mark.parametrize("template", ["bare", "base", "few_shot"])
def test_a_question_with_braces_stays_as_it_is(template: str) -> None:
    assert "What is {banner} + {question}?" in RENDERER.prompt("What is {banner} + {question}?", template).text
