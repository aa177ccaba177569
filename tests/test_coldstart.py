"""Promises of `repl_rl.coldstart`: demonstrations, transcripts, tokenizer, fine-tuning and the bundled policy."""

import asyncio
import hashlib
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.coldstart.demonstrations import CLEAN, COLD, ECHO, WARM, Mix, plan
from repl_rl.coldstart.sft import SftConfig, example, sft
from repl_rl.coldstart.transcripts import Transcript, Turn, play, read_transcripts, write_transcripts
from repl_rl.coldstart.vocabulary import make_tokenizer
from repl_rl.errors import ConfigError
from repl_rl.judges import grade
from repl_rl.renderer import Renderer
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.tasks import EASY, FAMILIES, HARD, Split, Task, sketch, split_of

ALL = (*EASY, *HARD)
POLICY = Path(__file__).parent.parent / "repl_rl" / "policies" / "quickstart"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return Renderer.from_folder(folder)


def executed(family: str, mix: Mix, seed: int) -> tuple[Transcript, str]:
    """A demonstration of one problem, and the problem's answer."""
    rng = random.Random(seed)
    drawn = sketch(family, rng)
    return asyncio.run(play(drawn.question, plan(drawn, mix, rng), InProcessSandbox())), drawn.answer


@pytest.mark.parametrize("family", FAMILIES)
def test_every_clean_demonstration_ends_in_the_right_answer_copied_from_the_console(family: str) -> None:
    for seed in range(25):
        transcript, answer = executed(family, CLEAN, seed)
        *_, looked, submitted = transcript.turns
        echo = looked.observed.removesuffix(">>> ").strip()
        assert submitted.line == f"submit_final_answer({echo})\n"
        assert submitted.observed == ""
        assert grade(Task("t", transcript.question, answer), echo) == 1.0


def test_a_branch_looks_at_the_value_before_it_writes_the_branch() -> None:
    for seed in range(10):
        transcript, _ = executed("branch", CLEAN, seed)
        name = transcript.question.split()[1]
        assert [turn.line for turn in transcript.turns][1] == f"{name}\n"
        assert transcript.turns[1].observed[0].isdigit()


def test_the_cold_mix_mostly_guesses_and_its_errors_are_real() -> None:
    transcripts = [executed(ALL[seed % len(ALL)], COLD, seed)[0] for seed in range(400)]
    guesses = sum(len(t.turns) == 1 and not t.gives_up for t in transcripts) / 400
    refused = [t for t in transcripts if any("Error: " in turn.observed for turn in t.turns)]
    recovered = [t for t in refused if any("Error: " not in u.observed and u.observed[:1] not in ">" for u in t.turns)]
    assert 0.45 < guesses < 0.65
    assert 0.15 < len(refused) / 400 < 0.35
    assert recovered
    assert any(t.gives_up for t in transcripts)


def test_a_surprise_shows_what_the_question_does_not_tell_and_only_its_submission_is_learned(
    renderer: Renderer,
) -> None:
    differing = 0
    for seed in range(50):
        transcript, answer = executed(ALL[seed % len(ALL)], Mix(guess=0.0, mistake=0.0, surprise=1.0), seed)
        *given, submitted = transcript.turns
        echo = given[-1].observed.removesuffix(">>> ").strip()
        assert "Error" not in echo
        assert submitted.line == f"submit_final_answer({echo})\n"
        made = example(transcript, renderer)
        learned = tuple(i for i, own in zip(made.token_ids, made.sampled, strict=True) if own)
        assert renderer.decode(learned) == submitted.line
        differing += grade(Task("t", transcript.question, answer), echo) == 0.0
    assert differing > 35


def test_the_shares_of_every_mix_sum_to_one_and_the_good_path_is_never_absent() -> None:
    for mix in (CLEAN, WARM, COLD):
        assert mix.guess + mix.mistake + mix.surprise + mix.good == pytest.approx(1.0)
        assert mix.good > 0.1


def test_no_plan_contains_an_answer_that_was_not_looked_at() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        drawn = sketch(ALL[seed % len(ALL)], rng)
        assert plan(drawn, CLEAN, rng).lines[-1] == f"submit_final_answer({ECHO})\n"


def test_demonstrations_never_show_a_held_out_question_and_equal_seeds_give_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        asyncio.run(write_transcripts(tmp_path / name, InProcessSandbox(), ALL, COLD, 200, 7))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    transcripts = list(read_transcripts(tmp_path / "a"))
    assert len(transcripts) == 200
    assert {split_of(t.question) for t in transcripts} == {Split.TRAIN}


def test_a_file_gives_back_what_was_played(tmp_path: Path) -> None:
    mix = Mix(guess=0.2, mistake=0.4, surprise=0.4)
    asyncio.run(write_transcripts(tmp_path / "t", InProcessSandbox(), ALL, mix, 150, 3))
    read = list(read_transcripts(tmp_path / "t"))
    rng = random.Random("3/transcripts")
    for n, transcript in enumerate(read):
        drawn = sketch(ALL[n % len(ALL)], rng, Split.TRAIN)
        assert transcript == asyncio.run(play(drawn.question, plan(drawn, mix, rng), InProcessSandbox()))
    assert any(t.given for t in read)
    assert any(t.gives_up for t in read)


def test_a_bad_transcripts_file_is_refused_with_its_line(tmp_path: Path) -> None:
    asyncio.run(write_transcripts(tmp_path / "t", InProcessSandbox(), ALL, CLEAN, 1, 0))
    with (tmp_path / "t").open("a") as file:
        file.write('{"question": "q"}\n')
    with pytest.raises(ConfigError, match=r"t:2 is .*each line is one transcript: KeyError\('turns'\)"):
        list(read_transcripts(tmp_path / "t"))
    with pytest.raises(ConfigError, match="absent"):
        list(read_transcripts(tmp_path / "absent"))


def test_an_example_is_encoded_piece_by_piece_and_only_lines_are_sampled(renderer: Renderer) -> None:
    transcript = Transcript("Compute 1 + 1.", (Turn("1 + 1\n", "2\n>>> "), Turn("submit_final_answer(2)\n", "")), False)
    made = example(transcript, renderer)
    pieces = ("Compute 1 + 1.\n>>> ", "1 + 1\n", "2\n>>> ", "submit_final_answer(2)\n")
    assert made.token_ids == tuple(i for piece in pieces for i in renderer.encode(piece))
    own = tuple(i for i, sampled in zip(made.token_ids, made.sampled, strict=True) if sampled)
    assert own == renderer.encode(pieces[1]) + renderer.encode(pieces[3])


def test_giving_up_trains_the_end_token_and_nothing_else_does(renderer: Renderer) -> None:
    turns = (Turn("x\n", "NameError: name 'x' is not defined\n>>> "),)
    given_up = example(Transcript("q", turns, True), renderer)
    assert given_up.token_ids[-1] in renderer.eos_ids
    assert given_up.sampled[-1]
    assert not renderer.eos_ids & set(example(Transcript("q", turns, False), renderer).token_ids)


@given(text=st.text())
def test_the_tokenizer_reads_back_every_text(renderer: Renderer, text: str) -> None:
    assert renderer.decode(renderer.encode(text)) == text


@given(text=st.text(alphabet="'\"()[]:\n >.<|endoftextpadsubmit_final_answer0123"))
def test_no_text_becomes_an_end_or_padding_token(renderer: Renderer, text: str) -> None:
    for hostile in (text, text + "<|endoftext|>", "<|pad|>" + text):
        assert not (renderer.eos_ids | {renderer.pad_id}) & set(renderer.encode(hostile))


@pytest.mark.parametrize(
    "text", ["submit_final_answer", ">>> ", "... ", "\n\n", ")\n", "'\n", "')\n", "]\n", ":\n", "):\n"]
)
def test_frequent_pieces_and_line_ends_are_one_token(renderer: Renderer, text: str) -> None:
    assert len(renderer.encode(text)) == 1


def test_no_token_has_text_after_its_last_newline_and_letters_of_a_quoted_word_stand_alone(renderer: Renderer) -> None:
    assert not renderer.audit.overshoot_ids
    assert len(renderer.newline_ids) >= 8
    assert len(renderer.encode("'summaxin'")) == 10
    assert len(renderer.encode("12345")) == 5
    assert [renderer.decode((i,)) for i in renderer.encode("f(3)\n\n")][-2:] == [")", "\n\n"]


def test_the_tokenizer_is_the_same_every_time(tmp_path: Path) -> None:
    digests = set()
    for name in ("a", "b"):
        make_tokenizer(tmp_path / name)
        digests.add(hashlib.sha256((tmp_path / name / "tokenizer.json").read_bytes()).hexdigest())
    assert len(digests) == 1


def test_fine_tuning_lowers_the_loss_and_repeats_exactly(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "base")
    asyncio.run(write_transcripts(tmp_path / "t", InProcessSandbox(), ("count",), CLEAN, 32, 0))
    config = SftConfig(steps=8, batch_size=8, warmup_steps=2)
    losses: dict[str, list[float]] = {"a": [], "b": []}
    for name, seen in losses.items():

        def record(_: int, loss: float, seen: list[float] = seen) -> None:
            seen.append(loss)

        sft(tmp_path / "base", tmp_path / "t", tmp_path / name, config, record)
    assert losses["a"][-1] < losses["a"][0]
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert Renderer.from_folder(tmp_path / "a").encode("x = 1\n")


def test_fine_tuning_on_nothing_is_refused(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "base")
    (tmp_path / "t").write_text("")
    with pytest.raises(ConfigError, match="it is empty"):
        sft(tmp_path / "base", tmp_path / "t", tmp_path / "out", SftConfig(steps=1))
    assert not (tmp_path / "out").exists()


def test_the_bundled_policy_fits_the_wheel_and_has_the_vocabulary_of_this_code(renderer: Renderer) -> None:
    assert sum(file.stat().st_size for file in POLICY.iterdir()) <= 5_000_000
    bundled = Renderer.from_folder(POLICY)
    assert bundled.tokenizer.get_vocab() == renderer.tokenizer.get_vocab()
    for question in ("Compute 3 * 4.", "Reverse the word 'banaso'."):
        assert bundled.prompt(question, "bare") == renderer.prompt(question, "bare")


def test_the_bundled_policy_has_untied_embeddings() -> None:
    from safetensors import safe_open

    with safe_open(POLICY / "model.safetensors", framework="pt") as weights:
        assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(weights.keys())
