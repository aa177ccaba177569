"""Arguments of the chat template, prompts of one's own, end tokens: read once, recorded, found again."""

import asyncio
import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from repl_rl.cli.train import TrainConfig
from repl_rl.errors import ConfigError
from repl_rl.rollout import ReplSampler, RolloutSettings
from repl_rl.rollout.prompts import load_template
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.rollout_config import RolloutConfig
from repl_rl.samplers import load_sampler
from repl_rl.samplers.chat_format import ChatFormat
from repl_rl.settings.argument_parser import dump_toml, parse
from tests.support.samplers.marked_text import chat_renderer
from tests.support.scripted_rollouts import RENDERER, TASK, world
from tests.support.tokenizers import merged_tokenizer

QWEN3 = chat_renderer("qwen3").tokenizer


def told(**arguments: bool | int | float | str) -> Renderer:
    return Renderer(QWEN3, chat=arguments)


def read(*flags: str) -> TrainConfig:
    return parse(TrainConfig, "train", flags)


def test_an_argument_reaches_the_prompt_and_what_is_spliced_between_turns() -> None:
    quiet, usual = told(enable_thinking=False), told()
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    for renderer, opened in ((quiet, closed), (usual, "<|im_start|>assistant\n")):
        assert renderer.build_prompt("Q?", "chat", console=False).text.endswith(opened)
        chat = ChatFormat(renderer)
        assert chat.build_prompt([{"role": "user", "content": "Q?"}]).text.endswith(opened)
        assert chat.encode_reply([{"role": "user", "content": "no"}], 9).text.endswith(opened)


@pytest.mark.parametrize("key", ["enable_thinkin", "messages", "tools", "tokenize", "content"])
def test_an_argument_that_the_template_does_not_read_is_refused(key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"chat_template_kwargs\.{key} is True; .* does not read it.*it reads enable_thinking"
    ):
        told(**{key: True})


def test_arguments_without_a_chat_template_in_the_prompt_are_refused() -> None:
    for sampler, prompt in (("repl", "bare"), ("fenced", "base")):
        with pytest.raises(ConfigError, match="no chat template is in the prompt"):
            load_sampler(sampler).check_policy(told(enable_thinking=True), prompt)
    load_sampler("repl").check_policy(told(enable_thinking=True), "chat")
    load_sampler("feedback").check_policy(told(enable_thinking=True), "bare")
    with pytest.raises(ConfigError, match=r"chat_template_kwargs\.enable_thinking .* it reads none"):
        Renderer(merged_tokenizer(), chat={"enable_thinking": True})


def test_values_are_those_of_toml_and_other_words_are_texts() -> None:
    given = ("enable-thinking false", "effort low", "budget 3", "top 0.5", "date-string 2024-07-26", 'quoted "true"')
    config = read(*f"--chat-template-kwargs.{' --chat-template-kwargs.'.join(given)} --seed 7".split())
    expected = {"enable_thinking": False, "effort": "low", "budget": 3, "top": 0.5, "date_string": "2024-07-26",
                "quoted": "true"}  # fmt: skip
    assert (config.chat_template_kwargs, config.seed) == (expected, 7)
    assert [type(value) for value in config.chat_template_kwargs.values()] == [bool, str, int, float, str, str]
    assert tomllib.loads(dump_toml(config))["chat_template_kwargs"] == expected
    assert read().chat_template_kwargs == {}
    assert "[chat]" not in dump_toml(read())


def test_flags_win_over_the_table_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('seed = 3\n[chat_template_kwargs]\nenable_thinking = true\neffort = "true"\n')
    config = read("--config", str(file), "--chat-template-kwargs.enable-thinking", "false")
    assert (config.chat_template_kwargs, config.seed) == ({"enable_thinking": False, "effort": "true"}, 3)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--chat-template-kwargs.x",), "option is '--chat-template-kwargs.x'; give its value after it"),
        (("--chat-template-kwargs.a b", "1"), "key is '--chat-template-kwargs.a b'; name it with letters"),
        (("--chat-template-kwargs.", "1"), "key is '--chat-template-kwargs.'; name it with letters"),
        (("--chats.x", "1"), "unknown option"),
    ],
)
def test_what_is_no_argument_is_named(flags: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(*flags)


@pytest.mark.parametrize("value", ["[1]", "{ a = 1 }", "2024-07-26"])
def test_a_file_may_not_say_lists_tables_and_dates(value: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[chat]\nx = {value}\n")
    with pytest.raises(ConfigError, match=r"chat_template_kwargs\.x"):
        read("--config", str(file))


def test_a_recorded_run_has_its_arguments_and_the_text_of_its_prompt_though_the_file_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text('Say "hi", then {question}\n{banner}>>> \n')
    world = RolloutConfig(prompt=str(file), chat_template_kwargs={"enable_thinking": False, "effort": "low"})
    (tmp_path / "config.toml").write_text(dump_toml(world))
    file.unlink()
    found = RolloutConfig.from_run(tmp_path)
    assert found == world
    assert found.prompt == 'text:Say "hi", then {question}\n{banner}>>> '


def own(tmp_path: Path, text: str) -> str:
    (tmp_path / "mine.txt").write_text(text)
    return str(tmp_path / "mine.txt")


def test_a_plain_prompt_of_ones_own_is_filled_in_and_begins_a_console(tmp_path: Path) -> None:
    settings = RolloutSettings(own(tmp_path, "T: {question}\n{banner}>>> \n"))
    rollouts = replace(world(["submit_final_answer(42)\n"]), settings=settings)
    (t,) = asyncio.run(rollouts.collect([TASK]))
    assert t.prompt.text.startswith("T: What is 6 * 7?\nPython 3.")
    assert t.prompt.text.endswith("\n>>> ")
    assert t.outcome == 1.0


def test_a_prompt_of_ones_own_without_a_place_for_the_question_is_the_system_message(tmp_path: Path) -> None:
    prompt = own(tmp_path, "Be quick.\n")
    text = told().build_prompt("Q?", prompt).text
    assert text.startswith("<|im_start|>system\nBe quick.<|im_end|>\n<|im_start|>user\nQ?<|im_end|>")
    with pytest.raises(ConfigError, match="chat template"):
        RENDERER.build_prompt("Q?", prompt)
    fenced = load_sampler("fenced")
    assert fenced.prompt(TASK, told(), load_template(prompt), "3").text.startswith("<|im_start|>system\nBe quick.")
    with pytest.raises(ConfigError, match="system message already"):
        load_sampler('fenced(system="No.")').prompt(TASK, told(), load_template(prompt), "3")


def test_a_prompt_of_ones_own_that_a_sampler_does_not_use_is_refused(tmp_path: Path) -> None:
    prompt = load_template(own(tmp_path, "Be quick."))
    with pytest.raises(ConfigError, match="FeedbackSampler does not use it in its prompt"):
        load_sampler("feedback").check_policy(told(), prompt)
    load_sampler("repl").check_policy(told(), prompt)


@pytest.mark.parametrize(("content", "complaint"), [(b" \n", "it is empty"), (b"\xff\xfe", "cannot be read as UTF-8")])
def test_a_prompt_file_that_says_nothing_is_named(content: bytes, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=complaint):
        RolloutConfig(prompt=str(tmp_path / "mine.txt"))


@pytest.mark.parametrize("sampler", ["feedback", "judge_tool"])
def test_a_policy_that_a_sampler_cannot_play_is_refused_before_anything_is_opened(sampler: str) -> None:
    async def work() -> None:
        async with RolloutConfig(sampler=sampler, engine="transformers", sandbox="unsafe").open_rollouts():
            raise AssertionError("an engine was opened")

    with pytest.raises(ConfigError, match="use a chat model"):
        asyncio.run(work())


def saved(folder: Path, **files: object) -> Renderer:
    tokenizer = merged_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|also|>"]})
    tokenizer.save_pretrained(folder)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Renderer.from_folder(folder)


def test_all_end_tokens_that_a_model_folder_names_end_a_line(tmp_path: Path) -> None:
    tokenizer = merged_tokenizer()
    own, first, second = tokenizer.eos_token_id, len(tokenizer), len(tokenizer) + 1
    renderer = saved(tmp_path / "a", generation_config={"eos_token_id": [first, second]}, config={"eos_token_id": own})
    assert renderer.eos_ids == {own, first, second}
    assert renderer.stop_ids >= renderer.eos_ids
    assert renderer.end_id == own
    nested = saved(tmp_path / "b", config={"text_config": {"eos_token_id": second}, "eos_token_id": None})
    assert nested.eos_ids == {own, second}
    assert saved(tmp_path / "c", generation_config={"eos_token_id": [10**6, -1]}).eos_ids == {own}


def test_a_rollout_ends_at_any_of_them(tmp_path: Path) -> None:
    renderer = saved(tmp_path, generation_config={"eos_token_id": [len(merged_tokenizer())]})
    other = max(renderer.eos_ids)
    rollouts = world([], ReplSampler(), renderer=renderer)
    rollouts.engine.scripts = [[*renderer.encode("submit_final_answer(42)"), other]]  # type: ignore[attr-defined]
    (t,) = asyncio.run(rollouts.collect([TASK]))
    assert (t.outcome, t.lines[-1].token_ids[-1], t.lines[-1].text) == (1.0, other, "submit_final_answer(42)")
