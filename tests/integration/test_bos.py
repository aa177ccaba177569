"""The first token of a sequence: plain prompts begin as the model's own tokenizer begins a text."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from repl_rl.errors import ConfigError
from repl_rl.rollout import RolloutSampler
from repl_rl.rollout.host_functions import _build_query_prompt as queried
from repl_rl.rollout.prompts import load_template
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.run_folder import check_same_settings
from repl_rl.samplers import load_sampler
from repl_rl.settings.argument_parser import dump_toml
from tests.support.scripted_rollouts import RENDERER, TASK, world
from tests.support.serve.http_server import MODEL, scripted, served
from tests.support.tokenizers import TOKENIZERS, merged_tokenizer

BOS, END = "<|pad|>", "<|im_end|>"
OLDER = Path(__file__).parents[1] / "stored" / "older_run"


def beginning(tokenizer: PreTrainedTokenizerFast, single: str = f"{BOS} $A {END}") -> PreTrainedTokenizerFast:
    """`tokenizer` with a post-processor as Llama's and Gemma's have it; this one adds an end token too."""
    named = [(text, tokenizer.convert_tokens_to_ids(text)) for text in (BOS, END)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B", special_tokens=named
    )
    return tokenizer


def first_id() -> int:
    return int(merged_tokenizer().convert_tokens_to_ids(BOS))


@pytest.mark.parametrize("shipped", ["bare", "base", "few_shot", "text:Compute {question}\n>>> "])
@pytest.mark.parametrize("vocabulary", sorted(TOKENIZERS.keys() - {"sentencepiece"}))
def test_a_plain_prompt_begins_with_the_tokenizers_first_token_and_has_no_end_token(
    shipped: str, vocabulary: str
) -> None:
    plain = Renderer(TOKENIZERS[vocabulary](), "carry").build_prompt("6 * 7?", shipped)
    renderer = Renderer(beginning(TOKENIZERS[vocabulary]()), "carry")
    prompt = renderer.build_prompt("6 * 7?", shipped)
    own = renderer.tokenizer(plain.text)["input_ids"]
    assert list(prompt.token_ids) == own[:-1], "as the tokenizer begins it; its end token is the policy's to write"
    assert prompt.token_ids[1:] == plain.token_ids
    assert renderer.decode(prompt.token_ids) == prompt.text == BOS + plain.text
    assert Renderer(beginning(TOKENIZERS[vocabulary]()), "carry", bos=False).build_prompt("6 * 7?", shipped) == plain


def test_several_first_tokens_are_all_written_and_a_question_never_writes_one() -> None:
    renderer = Renderer(beginning(merged_tokenizer(), f"{BOS} {BOS} $A"))
    assert renderer.build_prompt("q", "bare").token_ids[:3] == (first_id(), first_id(), *renderer.encode("q")[:1])
    asked = Renderer(beginning(merged_tokenizer())).build_prompt(f"{BOS}{END}", "bare")
    assert [i for i in asked.token_ids if i in RENDERER.tokenizer.all_special_ids] == [first_id()]


def test_only_an_end_token_of_the_post_processor_changes_nothing() -> None:
    renderer = Renderer(beginning(merged_tokenizer(), f"$A {END}"))
    assert renderer.build_prompt("q", "bare") == RENDERER.build_prompt("q", "bare")


@pytest.mark.parametrize("sampler", [load_sampler("fenced"), load_sampler('fenced(system="Be quick.")')])
def test_other_samplers_begin_as_the_console_does(sampler: RolloutSampler) -> None:
    renderer = Renderer(beginning(merged_tokenizer()))
    for shown in ("bare", load_template("text:T {question}\n")):
        assert sampler.prompt(TASK, renderer, shown, "3").token_ids[0] == first_id()


def test_a_model_that_is_asked_by_a_line_is_asked_with_it() -> None:
    assert queried(Renderer(beginning(merged_tokenizer())), "q").token_ids[0] == first_id()


def test_a_chat_template_that_writes_it_is_not_given_a_second_one() -> None:
    tokenizer = beginning(merged_tokenizer())
    tokenizer.bos_token = BOS
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}" + END + "\n{% endfor %}"
    prompt = Renderer(tokenizer).build_prompt("6 * 7?", "chat")
    assert (prompt.token_ids[0], prompt.token_ids.count(first_id())) == (first_id(), 1)


def test_rollouts_start_from_it_and_nothing_that_is_spliced_in_has_it() -> None:
    renderer = Renderer(beginning(merged_tokenizer()))
    lines = ["print('a')\n", "submit_final_answer(42)\n"]
    (t,) = asyncio.run(world(lines, renderer=renderer).collect([TASK]))
    assert (t.prompt.token_ids[0], t.outcome) == (first_id(), 1.0)
    assert first_id() not in (*t.prompt.token_ids[1:], *t.completion_ids)


def test_a_served_text_begins_with_it_once_and_a_text_that_goes_on_does_not() -> None:
    renderer = Renderer(beginning(merged_tokenizer()))
    with served(replace(scripted(), renderer=renderer)) as server:
        client, ours = server.client(), {"keep": True, "tokens": True}
        first = client.completions.create(model=MODEL, prompt="Six?\n>>> ", extra_body={"repl": ours})
        said = (first.model_extra or {})["repl"]
        assert said["prompt_token_ids"] == [first_id(), *renderer.encode("Six?\n>>> ")]
        more = {"conversation": said["conversation"], "tokens": True}
        second = client.completions.create(model=MODEL, prompt="Times seven?\n>>> ", extra_body={"repl": more})
        told = (second.model_extra or {})["repl"]
        assert (told["answer"], told["prompt_token_ids"].count(first_id())) == ("42", 1)
        by_ids = client.completions.create(
            model=MODEL, prompt=list(renderer.encode("Six?\n>>> ")), extra_body={"repl": ours}
        )
        assert first_id() not in (by_ids.model_extra or {})["repl"]["prompt_token_ids"], "ids are taken as given"


def test_a_run_that_was_recorded_without_it_is_played_and_resumed_without_it(tmp_path: Path) -> None:
    assert not RolloutConfig.from_run(OLDER).add_bos_token
    assert RolloutConfig.from_run(tmp_path).add_bos_token, "no run, so the default"
    (tmp_path / "config.toml").write_text(dump_toml(RolloutConfig(add_bos_token=True)))
    assert RolloutConfig.from_run(tmp_path).add_bos_token
    old = dump_toml(RolloutConfig(add_bos_token=False)).replace("add_bos_token = false\n", "")
    (tmp_path / "config.toml").write_text(old)
    check_same_settings(tmp_path, dump_toml(RolloutConfig(add_bos_token=False)))
    with pytest.raises(ConfigError, match="add_bos_token is True, the run's False"):
        check_same_settings(tmp_path, dump_toml(RolloutConfig()))
