"""Vocabularies of real models: lines end where the console takes them, and everything can be written."""

import asyncio
import string
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from repl_rl.errors import ConfigError
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox import InProcessSandbox
from repl_rl.sft.demonstrations import CLEAN, DemonstrationPlan, DemonstrationSpec, play_demonstration
from repl_rl.trajectory.trajectory import Stop
from tests.support.scripted_rollouts import TASK, world
from tests.support.vocabularies import VOCABULARIES, tekken

TEXT = st.text(alphabet=string.printable + "é€\u2028", max_size=60)
SLOW = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=VOCABULARIES)
def renderer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp(request.param)
    VOCABULARIES[request.param](folder)
    return Renderer.from_folder(folder)


@pytest.mark.heavy
def test_a_folder_says_what_its_vocabulary_does_with_newlines(renderer: Renderer) -> None:
    for i in renderer.newline_ids:
        assert renderer.decode((i,)).endswith("\n") == (i not in renderer.forbidden_ids)
    assert renderer.encode("\n")[0] in renderer.newline_ids - renderer.forbidden_ids
    assert renderer.stop_ids >= renderer.eos_ids
    assert len(renderer.eos_ids) == 1


@SLOW
@given(text=TEXT)
def test_every_text_can_be_written_without_a_forbidden_id(renderer: Renderer, text: str) -> None:
    assert renderer.decode(renderer.encode(text)) == text
    ids = renderer.encode_as_sampled(text)
    assert renderer.decode(ids) == text
    assert renderer.forbidden_ids.isdisjoint(ids)


@SLOW
@given(before=TEXT)
def test_no_text_becomes_a_control_token(renderer: Renderer, before: str) -> None:
    for i in sorted(renderer.eos_ids | {renderer.pad_id}):
        printed = before + renderer.decode((i,))
        assert i not in renderer.encode(printed)
        assert renderer.decode(renderer.encode(printed)) == printed


def test_a_block_of_several_lines_is_executed_and_spliced_as_the_console_shows_it(renderer: Renderer) -> None:
    lines = ["for i in range(3):\n", "    if i:\n", "        print(i)\n", "\n", "submit_final_answer(42)\n"]
    (rollout,) = asyncio.run(world(lines, renderer=renderer).collect([TASK]))
    assert rollout.stop is Stop.ANSWERED
    assert rollout.outcome == 1.0
    shown = "".join(s.text if not hasattr(s, "lines") else "".join(x.text for x in s.lines) for s in rollout.segments)
    assert shown.startswith(
        "for i in range(3):\n...     if i:\n...         print(i)\n... \n1\n2\n>>> submit_final_answer(42)\n"
    )
    assert [line.text for line in rollout.lines] == lines
    assert all(renderer.forbidden_ids.isdisjoint(line.token_ids) for line in rollout.lines)


def test_a_block_can_be_demonstrated_also_where_its_last_two_newlines_are_two_tokens(renderer: Renderer) -> None:
    plan = DemonstrationPlan(
        ("total = 0\n", "for n in [40, 2]:\n", "    total += n\n\n", "total\n", "submit_final_answer({echo})\n")
    )
    course = DemonstrationSpec(("sum",), CLEAN, 1)
    shown = asyncio.run(play_demonstration(TASK, plan, course, InProcessSandbox(), renderer))
    assert shown is not None
    assert shown.answer == "42"
    assert "".join(line.text for line in shown.lines) == "".join(plan.lines).replace("{echo}", "42")
    assert not any(e.status.is_error for e in shown.executions)


def test_most_newline_tokens_of_smollm2_go_on_with_indentation(tmp_path: Path) -> None:
    VOCABULARIES["smollm2"](tmp_path)
    renderer = Renderer.from_folder(tmp_path)
    assert (len(renderer.newline_ids), len(renderer.forbidden_ids)) == (129, 119)
    block = "for i in range(3):\n    print(i)\n"
    assert not renderer.forbidden_ids.isdisjoint(renderer.encode(block))
    with pytest.raises(ConfigError, match=r"text after a newline \(119\).*--newline-tokens forbid"):
        Renderer.from_folder(tmp_path, "refuse")


def test_a_chat_prompt_of_tekken_has_control_tokens_where_its_template_puts_them(tmp_path: Path) -> None:
    tekken(tmp_path)
    renderer = Renderer.from_folder(tmp_path)
    prompt = renderer.build_prompt("What is [INST] 6 * 7?", "chat")
    begin, end = (renderer.tokenizer.convert_tokens_to_ids(name) for name in ("[INST]", "[/INST]"))
    assert (prompt.token_ids.count(begin), prompt.token_ids.count(end)) == (1, 1)
    assert prompt.text.endswith("[/INST]" + prompt.text.rpartition("[/INST]")[2])
    assert prompt.text.endswith(">>> ")
    assert f"{renderer.decode(prompt.token_ids)} " == prompt.text
