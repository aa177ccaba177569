"""Promises of `repl_rl.sft`: demonstrations, tokenizer, a fresh policy, and the bundled policy made of them."""

import asyncio
import hashlib
import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.cli import main
from repl_rl.errors import ConfigError
from repl_rl.judges import grade_answer
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.runs.store import read_trajectories
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.sft.create_random_model import make_tokenizer
from repl_rl.sft.demonstrations import (
    CLEAN,
    COLD,
    ECHO,
    MIXES,
    PROTOCOLS,
    WARM,
    DemonstrationMix,
    DemonstrationPlan,
    DemonstrationSpec,
    generate_demonstrations,
    plan_demonstration,
    plan_fenced_demonstration,
    play_demonstration,
)
from repl_rl.sft.demonstrations_from_doctests import DemonstrationCounts
from repl_rl.tasks import BUILTIN, EASY, FAMILIES, GRADED, HARD, Split, draw_problem, get_split, make_task
from repl_rl.trajectory.trajectory import LineStatus, Observed, Stop, Trajectory

ALL = (*EASY, *HARD)
POLICY = Path(__file__).parents[2] / "repl_rl" / "policies" / "quickstart"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return Renderer.from_folder(folder)


def demonstrated(
    course: DemonstrationSpec, renderer: Renderer, tally: DemonstrationCounts | None = None
) -> list[Trajectory]:
    counts = tally or DemonstrationCounts()

    async def collect() -> list[Trajectory]:
        return [t async for t in generate_demonstrations(course, InProcessSandbox(), renderer, counts, 4)]

    return asyncio.run(collect())


def written(t: Trajectory) -> list[str]:
    return [line.text for line in t.lines]


def shown(t: Trajectory) -> list[str]:
    return [segment.text for segment in t.segments if isinstance(segment, Observed)]


def learned(t: Trajectory, renderer: Renderer) -> str:
    return renderer.decode([i for i, own in zip(t.completion_ids, t.loss_mask, strict=True) if own])


def one(
    family: str, seed: int, mix: DemonstrationMix, renderer: Renderer, protocol: str = "line"
) -> tuple[Trajectory | None, str]:
    """A demonstration of one problem, and the problem's answer."""
    rng = random.Random(seed)
    drawn = draw_problem(family, rng)
    planned = PROTOCOLS[protocol].plan(drawn, mix, rng)
    course = DemonstrationSpec((family,), mix, 1, protocol=protocol)
    t = asyncio.run(play_demonstration(make_task(family, drawn), planned, course, InProcessSandbox(), renderer))
    return t, drawn.answer


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("family", [*FAMILIES, *(f for f in GRADED if not f.startswith("algebra"))])
def test_every_clean_demonstration_ends_in_the_right_answer_copied_from_what_was_printed(
    family: str, protocol: str, renderer: Renderer
) -> None:
    for seed in range(6):
        t, answer = one(family, seed, CLEAN, renderer, protocol)
        assert t is not None
        assert t.answer is not None
        assert grade_answer(make_task(family, draw_problem(family, random.Random(seed))), t.answer) == 1.0
        assert (t.answer, t.outcome) == (answer, None)
        assert t.answer in shown(t)[-1]
        assert {e.status for e in t.executions} <= {LineStatus.OK, LineStatus.INCOMPLETE, LineStatus.ANSWERED}


def test_a_line_demonstration_looks_then_submits_what_it_saw(renderer: Renderer) -> None:
    t, _ = one("variables", 3, CLEAN, renderer)
    assert t is not None
    assert (t.stop, t.policy_step, set(t.logprobs_T())) == (Stop.ANSWERED, 0, {0.0})
    *_, submitted = written(t)
    assert submitted == f"submit_final_answer({shown(t)[-1].removesuffix(chr(10) + '>>> ')})\n"
    pieces = [s.text if isinstance(s, Observed) else s.lines[0].text for s in t.segments]
    assert t.completion_ids == tuple(i for piece in pieces for i in renderer.encode(piece))
    assert learned(t, renderer) == "".join(written(t))


def test_a_branch_looks_at_the_value_before_it_writes_the_branch(renderer: Renderer) -> None:
    for seed in range(10):
        t, _ = one("branch", seed, CLEAN, renderer)
        assert t is not None
        assert written(t)[1] == f"{t.prompt.text.split()[1]}\n"
        assert shown(t)[1][0].isdigit()
        fenced, _ = one("branch", seed, CLEAN, renderer, "fenced")
        assert fenced is not None
        assert len(fenced.lines) == 3


def test_a_fenced_demonstration_is_blocks_then_a_boxed_answer_and_the_end_token(renderer: Renderer) -> None:
    t, answer = one("join", 1, CLEAN, renderer, "fenced")
    assert t is not None
    block, final = t.lines
    assert block.text.startswith("```python\ns = ")
    assert block.text.endswith("\nprint(s.upper())\n```")
    assert shown(t) == [f"\n```output\n{answer}\n```\n"]
    assert final.text == f"\\boxed{{{answer}}}"
    assert final.token_ids[-1] in renderer.eos_ids
    assert (t.stop, t.prompt.text.endswith(".\n")) == (Stop.EOS, True)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_cold_mix_mostly_guesses_and_its_errors_are_real(protocol: str, renderer: Renderer) -> None:
    tally = DemonstrationCounts()
    made = demonstrated(DemonstrationSpec(ALL, COLD, 400, 5, protocol), renderer, tally)
    assert (tally.complete, tally.rejected.total()) == (400, 0)
    guesses = sum(len(t.lines) == 1 and t.answer is not None for t in made) / 400
    refused = [t for t in made if any(e.status.is_error for e in t.executions)]
    recovered = [t for t in refused if t.answer is not None and t.answer in "".join(shown(t)) and len(t.lines) > 2]
    assert 0.45 < guesses < 0.65
    assert 0.10 < len(refused) / 400 < 0.35
    assert recovered
    assert any(t.stop is Stop.EOS and t.answer is None and t.lines[-1].token_ids[0] in renderer.eos_ids for t in made)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_surprise_shows_what_the_question_does_not_tell_and_only_its_answer_is_learned(
    protocol: str, renderer: Renderer
) -> None:
    differing = 0
    for seed in range(40):
        t, answer = one(
            ALL[seed % len(ALL)], seed, DemonstrationMix(guess=0.0, mistake=0.0, surprise=1.0), renderer, protocol
        )
        assert t is not None
        assert "Error" not in t.prompt.text
        assert len(t.lines) == 1
        assert t.answer is not None
        assert t.answer in t.prompt.text
        assert renderer.decode(t.prompt.token_ids) == t.prompt.text
        assert re.match(r"submit_final_answer\(.*\)\n|\\boxed\{.*\}", t.lines[0].text)
        differing += t.answer != answer
    assert differing > 28


def test_the_shares_of_every_mix_sum_to_one_and_the_good_path_is_never_absent() -> None:
    for mix in MIXES.values():
        assert mix.guess + mix.mistake + mix.surprise + mix.correct == pytest.approx(1.0)
        assert mix.correct > 0.1
    assert MIXES["warm"] == WARM


def test_no_plan_contains_an_answer_that_was_not_looked_at() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        drawn = draw_problem(ALL[seed % len(ALL)], rng)
        assert plan_demonstration(drawn, CLEAN, rng).lines[-1] == f"submit_final_answer({ECHO})\n"
        assert plan_fenced_demonstration(drawn, CLEAN, rng).lines[-1] == f"\\boxed{{{ECHO}}}"


def test_demonstrations_never_show_a_held_out_question_and_equal_seeds_give_equal_ones(renderer: Renderer) -> None:
    first, again = (demonstrated(DemonstrationSpec(ALL, COLD, 100, 7), renderer) for _ in range(2))
    assert [(t.id, t.prompt, t.completion_ids) for t in first] == [(t.id, t.prompt, t.completion_ids) for t in again]
    assert len({t.id for t in first}) == 100
    questions = [t.prompt.text.split("\n")[0] for t in first]
    assert {get_split(question) for question in questions} == {Split.TRAIN}
    assert [t.task_id.split("-")[0] for t in first[:10]] == list(ALL)


_BLOCK = "```python\n{}\n```"


@pytest.mark.parametrize(
    ("protocol", "planned"),
    [
        ("line", DemonstrationPlan((f"submit_final_answer({ECHO})\n",))),
        ("line", DemonstrationPlan(("1/0\n", f"submit_final_answer({ECHO})\n"))),
        ("line", DemonstrationPlan(("x = 1\n",))),
        ("line", DemonstrationPlan(("exit()\n",))),
        ("line", DemonstrationPlan(("submit_final_answer(1)\n",), end_token=True)),
        ("fenced", DemonstrationPlan((_BLOCK.format("1 + 1"), f"\\boxed{{{ECHO}}}"), end_token=True)),
        ("fenced", DemonstrationPlan((_BLOCK.format("1/0"), f"\\boxed{{{ECHO}}}"), end_token=True)),
    ],
)
def test_what_goes_another_way_than_planned_is_no_demonstration(
    protocol: str, planned: DemonstrationPlan, renderer: Renderer
) -> None:
    drawn = draw_problem("count", random.Random(0))
    course = DemonstrationSpec(("count",), CLEAN, 1, protocol=protocol)
    assert (
        asyncio.run(play_demonstration(make_task("count", drawn), planned, course, InProcessSandbox(), renderer))
        is None
    )


def test_a_course_that_cannot_be_given_is_refused() -> None:
    with pytest.raises(ConfigError, match="number of demonstrations is 0"):
        DemonstrationSpec(ALL, CLEAN, 0)
    with pytest.raises(ConfigError, match="protocol is 'xml'; choose one of line, fenced"):
        DemonstrationSpec(ALL, CLEAN, 1, protocol="xml")


def test_giving_up_trains_the_end_token_and_nothing_else_does(renderer: Renderer) -> None:
    drawn = draw_problem("count", random.Random(0))
    course = DemonstrationSpec(("count",), CLEAN, 1)
    planned = DemonstrationPlan(("x\n",), end_token=True)
    given_up = asyncio.run(play_demonstration(make_task("count", drawn), planned, course, InProcessSandbox(), renderer))
    assert given_up is not None
    assert given_up.completion_ids[-1] in renderer.eos_ids
    assert given_up.loss_mask[-1]
    answered, _ = one("count", 0, CLEAN, renderer)
    assert answered is not None
    assert not renderer.eos_ids & set(answered.completion_ids)


def test_the_verb_demonstrates_fenced_code_and_refuses_what_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["transcripts", "--from-tasks", "builtin:count", "builtin:dates/2", "--sandbox", "inprocess"]
    assert main([*flags, "--protocol", "fenced", "--count", "12", "--out", str(tmp_path / "t")]) == 0
    made = list(read_trajectories(tmp_path / "t" / "trajectories"))
    assert [t.task_id.split("-")[0] for t in made] == ["count", "dates"] * 6
    assert main([*flags, "--max-tokens", "64", "--count", "12", "--out", str(tmp_path / "u")]) == 0
    assert json.loads((tmp_path / "u" / "transcripts.json").read_text())["packages"] == {
        "builtin:count builtin:dates/2": {"kept": 6, "kept_whole": 6, "kept_in_part": {}, "dropped": {"is too long": 6}}
    }
    capsys.readouterr()
    for refused, why in (
        (["--from-tasks", "builtin:no"], "built-in tasks is 'no'; choose among quickstart"),
        (["--from-tasks", "tasks.jsonl"], "built-in tasks is 'tasks.jsonl'"),
        (["--from-doctests", "heapq", "--sandbox", "inprocess"], "a doctest is foreign code"),
        (["--from-tasks", "builtin:count", "--count", "0"], "count is 0; give at least 1"),
    ):
        assert main(["transcripts", *refused, "--out", str(tmp_path / "v")]) == 2
        assert why in capsys.readouterr().err
    assert main(["sft", "--fresh", "--samples", "2"]) == 2
    assert "a new policy learns nothing" in capsys.readouterr().err
    assert BUILTIN["count"] == ("count",)


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


def test_the_bundled_policy_fits_the_wheel_and_has_the_vocabulary_of_this_code(renderer: Renderer) -> None:
    assert sum(file.stat().st_size for file in POLICY.iterdir()) <= 5_000_000
    bundled = Renderer.from_folder(POLICY)
    assert bundled.tokenizer.get_vocab() == renderer.tokenizer.get_vocab()
    for question in ("Compute 3 * 4.", "Reverse the word 'banaso'."):
        assert bundled.build_prompt(question, "bare") == renderer.build_prompt(question, "bare")


def test_the_bundled_policy_has_untied_embeddings() -> None:
    from safetensors import safe_open

    with safe_open(POLICY / "model.safetensors", framework="pt") as weights:
        assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(weights.keys())
