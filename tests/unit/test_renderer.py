"""Token promises: exact captions, harmless observations, an audited vocabulary."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, normalizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from repl_rl.errors import ConfigError
from repl_rl.rollout.token_renderer import Renderer
from tests.support.tokenizers import TOKENIZERS, merged_tokenizer, overshooting_tokenizer, sentencepiece_tokenizer

RENDERERS = {name: Renderer(make(), "carry") for name, make in TOKENIZERS.items()}
RENDERERS["python"] = Renderer(ByT5Tokenizer())
_TEXTS = st.text(st.sampled_from("ab1 \n()'>.:[]é€"), max_size=40)


@pytest.mark.parametrize("name", sorted(RENDERERS))
@given(text=_TEXTS)
def test_an_encoded_text_decodes_to_itself(name: str, text: str) -> None:
    renderer = RENDERERS[name]
    assert renderer.decode(renderer.encode(text)) == text


@pytest.mark.parametrize("name", sorted(RENDERERS))
@pytest.mark.parametrize("printed", ["<|im_end|>", "</s>", "<s>", "<unk>", "<|pad|>"])
def test_printed_control_tokens_stay_text(name: str, printed: str) -> None:
    renderer = RENDERERS[name]
    ids = renderer.encode_observation(printed + "\n>>> ").token_ids
    assert not set(ids) & set(renderer.tokenizer.all_special_ids)
    assert renderer.decode(ids) == printed + ("\n>>>" if renderer.samples_space else "\n>>> ")


@pytest.mark.parametrize("name", sorted(RENDERERS.keys() - {"sentencepiece"}))  # which would add a space of its own
@given(text=_TEXTS)
def test_ids_and_captions_are_those_of_the_tokenizer(name: str, text: str) -> None:
    renderer = RENDERERS[name]
    ids = renderer.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert renderer.encode(text) == tuple(ids)
    assert renderer.decode(ids) == text


def test_nobody_elses_truncation_cuts_an_observation() -> None:
    renderer = Renderer(merged_tokenizer())
    renderer.tokenizer("some text", truncation=True, max_length=2, padding="max_length")
    assert renderer.decode(renderer.encode("a longer text\n>>> ")) == "a longer text\n>>> "


def test_i12_tokens_with_text_after_their_newline_are_forbidden_carried_or_refused() -> None:
    forbidding = Renderer(overshooting_tokenizer())
    assert forbidding.forbidden_ids == forbidding.audit.overshoot_ids != frozenset()
    carrying = Renderer(overshooting_tokenizer(), "carry")
    assert carrying.forbidden_ids == frozenset() != carrying.audit.overshoot_ids
    with pytest.raises(ConfigError, match=r"vocabulary of .*text after a newline.*--newline-tokens forbid"):
        Renderer(overshooting_tokenizer(), "refuse")


@pytest.mark.parametrize("make", [merged_tokenizer, sentencepiece_tokenizer])
def test_i12_the_audit_accepts_vocabularies_without_them(make: object) -> None:
    assert callable(make)
    assert Renderer(make()).audit.overshoot_ids == frozenset()


@pytest.mark.parametrize("name", sorted(RENDERERS))
def test_every_id_whose_text_holds_a_newline_ends_a_line(name: str) -> None:
    renderer = RENDERERS[name]
    expected = {i for i in range(len(renderer.tokenizer)) if "\n" in renderer.decode((i,))}
    assert renderer.newline_ids == expected
    assert renderer.stop_ids == expected | renderer.eos_ids


def test_merged_newlines_are_single_tokens_here() -> None:
    renderer = RENDERERS["merged"]
    assert {len(renderer.encode(text)) for text in (")\n", "\n\n", ":\n")} == {1}


def test_a_first_word_keeps_its_own_spaces() -> None:
    renderer = RENDERERS["sentencepiece"]
    for text in ("return", " return", "    return x\n"):
        assert renderer.decode(renderer.encode(text)) == text


def test_a_long_observation_keeps_head_and_tail_and_says_what_was_cut() -> None:
    renderer = RENDERERS["merged"]
    text = "".join(f"{i}\n" for i in range(500)) + ">>> "
    observed = renderer.encode_observation(text, max_tokens=32)
    assert observed.text.startswith("0\n1\n")
    assert observed.text.endswith("499\n>>> ")
    assert "tokens cut" in observed.text
    assert renderer.decode(observed.token_ids) == observed.text
    assert renderer.encode_observation("short\n>>> ", max_tokens=32).text == "short\n>>> "


def test_a_lone_surrogate_is_shown_escaped() -> None:
    assert RENDERERS["merged"].decode(RENDERERS["merged"].encode("\ud800")) == "\\ud800"


def test_a_question_may_contain_braces() -> None:
    prompt = RENDERERS["merged"].build_prompt("len({1: 2}) {x}", "bare")
    assert prompt.text == "len({1: 2}) {x}\n>>> "
    assert RENDERERS["merged"].decode(prompt.token_ids) == prompt.text


def test_the_base_prompt_shows_the_version_of_the_sandboxed_python() -> None:
    prompt = RENDERERS["merged"].build_prompt("What is 2 + 2?", "base", version="3.11.7")
    assert "Python 3.11.7 on linux\n" in prompt.text
    assert prompt.text.endswith("\n>>> ")


def test_a_chat_prompt_is_the_template_and_then_the_banner_as_the_beginning_of_the_answer() -> None:
    tokenizer = merged_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    renderer = Renderer(tokenizer)
    prompt = renderer.build_prompt("What is 2 + 2?", "chat", version="3.11.7")
    head, banner = prompt.text.split("assistant: ")
    assert "user: What is 2 + 2?<|im_end|>\n" in head
    assert banner.startswith("Python 3.11.7 on linux\n")
    assert banner.endswith(">>> ")
    # The template's own control tokens are control tokens; nothing after them is.
    assert [i for i in prompt.token_ids if i in renderer.eos_ids] == [tokenizer.eos_token_id] * 2


def test_a_chat_prompt_without_a_template_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"chat template of .* --prompt base"):
        RENDERERS["merged"].build_prompt("q", "chat")


def test_an_unknown_template_is_named() -> None:
    with pytest.raises(ConfigError, match="prompt is 'nope'; choose one of bare, base"):
        RENDERERS["merged"].build_prompt("q", "nope")


def test_a_vocabulary_without_an_end_token_is_refused() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merged_tokenizer().backend_tokenizer)
    with pytest.raises(ConfigError, match="eos_token"):
        Renderer(tokenizer)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="save the tokenizer next to the weights"):
        Renderer.from_folder(str(tmp_path))


def test_a_saved_tokenizer_is_loaded_with_the_same_audit(tmp_path: object) -> None:
    merged_tokenizer().save_pretrained(str(tmp_path))
    assert Renderer.from_folder(str(tmp_path)).audit == RENDERERS["merged"].audit


@pytest.mark.parametrize("way", ["text", "chat", "decoder"])
def test_a_tokenizer_whose_regex_comes_to_no_end_is_one_line(way: str) -> None:
    """Rust panics then, with an exception that is no `Exception`."""
    tokenizer = merged_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    endless = Regex("(?:a|a)+(?!a)(?<=b)")
    if way == "decoder":
        pieces = [tokenizer.backend_tokenizer.decoder, decoders.Fuse(), decoders.Replace(endless, "y")]
        tokenizer.backend_tokenizer.decoder = decoders.Sequence(pieces)
    else:
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace(endless, "y")
    renderer = Renderer(tokenizer)
    steps: dict[str, Callable[[], object]] = {
        "text": lambda: renderer.encode("a" * 40),
        "chat": lambda: renderer.encode_with_control_tokens("a" * 40),
        "decoder": lambda: renderer.decode([*renderer._anchor] * 40),
    }
    with pytest.raises(ConfigError, match=r"tokenizer of .*retry-limit.*it cannot (en|de)code this text; use another"):
        steps[way]()


@pytest.mark.parametrize("text", ["[]", "{", '{"version": "1.0"}', "not JSON"])
def test_a_tokenizer_file_that_cannot_be_read_is_one_line(text: str, tmp_path: Path) -> None:
    merged_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match="it cannot be loaded"):
        Renderer.from_folder(tmp_path)


@pytest.mark.parametrize("config", [{"vocab_size": 9}, {"vocab_size": 10**6, "text_config": {"vocab_size": 9}}])
def test_a_tokenizer_with_more_ids_than_the_model_embeds_is_refused(config: object, tmp_path: Path) -> None:
    merged_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="vocab_size of 9; save the tokenizer that belongs to these weights"):
        Renderer.from_folder(tmp_path)


def test_an_added_token_may_have_no_embedding(tmp_path: Path) -> None:
    tokenizer = merged_tokenizer()
    ordinary = max(tokenizer.get_vocab().values()) + 1
    tokenizer.add_tokens(["<image_soft_token>"])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": ordinary}))
    assert Renderer.from_folder(tmp_path).audit == RENDERERS["merged"].audit
