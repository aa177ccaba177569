"""The space after a prompt: written by whoever writes it in the texts that a pretrained model has read."""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.models import prompt_space
from repl_rl.engine import ScriptedEngine
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSampler
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.replay import verify_trajectory
from repl_rl.runs.store import to_text
from repl_rl.samplers.conformance_checks import run_checks
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.settings.argument_parser import dump_toml
from repl_rl.sft.demonstrations import CLEAN, DemonstrationPlan, DemonstrationSpec, play_demonstration
from repl_rl.trajectory.trajectory import Observed, Prompt, Sampled, Trajectory
from tests.support.scripted_rollouts import TASK, world
from tests.support.vocabularies import VOCABULARIES

FORMS = {
    "smollm2": "sampled",
    "tekken": "sampled",
    "sentencepiece": "sampled",
    "gpt2-like": "sampled",
    "qwen3.5-like": "sampled",
    "gemma-like": "sampled",
    "phi3-like": "sampled",
    "quickstart": "observed",
}
"""The writer of the space, by vocabulary."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in FORMS}
    for name, folder in made.items():
        VOCABULARIES[name](folder)
    return made


@pytest.fixture(scope="module", params=FORMS)
def renderer(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Renderer:
    return Renderer.from_folder(folders[request.param])


class Typing:
    """A policy that types lines as a person types them, the space after the prompt included."""

    def __init__(self, renderer: Renderer, lines: Sequence[str]) -> None:
        self._renderer = renderer
        self._left = [f"{line}\n" for line in lines]

    def __call__(self, ids: Sequence[int]) -> Sequence[int]:
        if not self._left:
            return (self._renderer.end_id,)
        line = self._left.pop(0)
        return self._renderer.encode_as_sampled(line, self._renderer.build_prompt_from_ids(ids[-8:]))


def rolled(renderer: Renderer, lines: Sequence[str], sampler: RolloutSampler | None = None) -> Trajectory:
    """The rollout of a policy that types `lines`."""
    engine = ScriptedEngine.from_policy(Typing(renderer, lines), forbidden_ids=renderer.forbidden_ids)
    limits = RolloutLimits(max_lines=len(lines) + 1, max_line_tokens=400, max_observation_tokens=400)
    rollouts = Rollouts(engine, InProcessSandbox(), renderer, sampler or ReplSampler(), limits)
    (trajectory,) = asyncio.run(rollouts.collect([TASK]))
    return trajectory


def captions(t: Trajectory) -> str:
    """All text, as it is shown."""
    parts = [[s.text] if isinstance(s, Observed) else [line.text for line in s.lines] for s in t.segments]
    return t.prompt.text + "".join(text for part in parts for text in part)


def ids_of(t: Trajectory) -> tuple[int, ...]:
    return (*t.prompt.token_ids, *t.completion_ids)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.heavy) if name in ("smollm2", "tekken") else name for name in FORMS]
)
def test_the_policy_writes_the_space_where_its_vocabulary_joins_it_with_a_word(
    name: str, folders: dict[str, Path]
) -> None:
    renderer = Renderer.from_folder(folders[name])
    assert ("sampled" if renderer.samples_space else "observed") == FORMS[name]
    assert ("the policy" in renderer.findings) == renderer.samples_space
    for form in ("observed", "sampled"):
        chosen = Renderer.from_folder(folders[name], prompt_space=form)
        assert chosen.samples_space == (form == "sampled")


SESSION = ("x = 6 * 7", "x", "for i in range(2):", "    print(i)", "", "print('a b')", "1/0", "submit_final_answer(x)")


def test_tokens_of_a_session_are_those_of_its_whole_text(renderer: Renderer) -> None:
    """A pretrained model has read whole transcripts, tokenised as one text."""
    t = rolled(renderer, SESSION)
    whole = renderer.encode(renderer.decode(ids_of(t)))
    natural = {len(renderer.decode(whole[:n])) for n in range(len(whole) + 1)}
    # The first token of each line that is not blank begins and ends where it does in the whole text.
    at = len(renderer.decode(t.prompt.token_ids))
    for segment in t.segments:
        ids = segment.token_ids
        if isinstance(segment, Sampled) and segment.lines[0].text != "\n":
            first = at + len(renderer.decode(ids[:1]))
            assert {at, first} <= natural, segment.lines[0].text
        at += len(renderer.decode(ids))


KNOWN = (
    "x = 1",
    "x",
    "for i in range(2):",
    "    i",
    "        i",
    "",
    " ",
    "1/0",
    "# a b",
    "print('é', end=' ')",
    "'>>> '",
)
LINES = st.lists(st.sampled_from(KNOWN) | st.text(alphabet="ab (:=)'#\té", max_size=8), min_size=1, max_size=8)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES)
def test_any_lines_run_and_are_shown_as_a_person_would_have_typed_them(renderer: Renderer, lines: list[str]) -> None:
    t = rolled(renderer, lines)
    assert t.failure is None
    typed = [line.text.removesuffix("\n") for line in t.lines if line.execution]
    assert typed[: len(lines)] == lines[: len(typed)]  # the end token may close a block
    assert [ran for line in t.lines if line.execution for ran in line.execution.ran][: len(typed)] == typed
    # Ids say what captions say, but for the space of a prompt that nothing, or a blank line, follows.
    ids = [i for i in ids_of(t) if i not in renderer.eos_ids]
    assert renderer.decode(ids) == (blanks_closed(t) if renderer.samples_space else captions(t))
    sampled = [i for line in t.lines for i in line.token_ids]
    assert [i for i, mine in zip(t.completion_ids, t.loss_mask, strict=True) if mine] == sampled


def blanks_closed(t: Trajectory) -> str:
    """All text as ids have it: a blank line's prompt and one that nothing follows lose their space."""
    parts = [t.prompt, *t.segments]
    texts = []
    for one, other in pairwise([*parts, None]):
        assert one is not None
        text = one.text if isinstance(one, Prompt | Observed) else "".join(line.text for line in one.lines)
        blank = other is None or (isinstance(other, Sampled) and other.lines[0].text[:1] in ("", "\n"))
        if isinstance(one, Prompt | Observed) and text.endswith(" ") and blank:
            text = text[:-1]
        texts.append(text)
    return "".join(texts)


@pytest.mark.parametrize("form", ["observed", "sampled"])
def test_a_run_of_either_form_verifies_and_looks_alike(form: str, folders: dict[str, Path]) -> None:
    renderer = Renderer.from_folder(folders["smollm2"], prompt_space="sampled" if form == "sampled" else "observed")
    t = rolled(renderer, SESSION)
    assert t.answer == "42"
    assert not any(run.status.is_error and "1/0" not in line.text for line in t.lines if (run := line.execution))

    assert asyncio.run(verify_trajectory(t, InProcessSandbox())).difference is None
    assert (
        ">>> x = 6 * 7\n>>> x\n42\n>>> for i in range(2):\n...     print(i)\n... \n0\n1\n>>> print('a b')\n"
        in to_text(t)
    )
    ends = [renderer.decode(s.token_ids)[-1] for s in (t.prompt, *t.segments) if not isinstance(s, Sampled)]
    assert set(ends) == ({" "} if form == "observed" else {">", "."})


def test_a_policy_that_leaves_the_space_out_is_understood_as_well(folders: dict[str, Path]) -> None:
    renderer = Renderer.from_folder(folders["smollm2"])
    lines = ["x = 6\n", "x\n", "submit_final_answer(x)\n"]
    scripted = replace(
        ScriptedEngine.from_text(lines, renderer.encode_as_sampled), forbidden_ids=renderer.forbidden_ids
    )
    (t,) = asyncio.run(replace(world([], renderer=renderer), engine=scripted).collect([TASK]))
    assert renderer.decode(t.lines[0].token_ids) == "x = 6\n"
    assert [line.text for line in t.lines] == ["x = 6\n", "x\n", "submit_final_answer(x)\n"]


def test_exactly_one_space_is_the_prompts(folders: dict[str, Path]) -> None:
    """A line that begins with two is indented, as it would be in a console."""
    renderer = Renderer.from_folder(folders["smollm2"])
    t = rolled(renderer, [" x = 1"])
    run = t.lines[0].execution
    assert run is not None
    assert run.ran == (" x = 1",)
    assert run.status.is_error


def test_demonstrations_begin_lines_with_the_space(folders: dict[str, Path]) -> None:
    renderer = Renderer.from_folder(folders["smollm2"])
    plan = DemonstrationPlan(
        ("total = 0\n", "for n in [40, 2]:\n", "    total += n\n\n", "total\n", "submit_final_answer({echo})\n")
    )
    t = asyncio.run(play_demonstration(TASK, plan, DemonstrationSpec(("sum",), CLEAN, 1), InProcessSandbox(), renderer))
    assert t is not None
    assert t.answer == "42"
    assert renderer.decode(t.lines[0].token_ids) == " total = 0\n"
    assert renderer.decode(t.lines[2].token_ids).startswith("     total")
    assert t.lines[2].text.startswith("    total")


class Asking(RolloutSampler):
    """Splices a text of its own that ends in a space."""

    rehearsals = (("a\nb\n",),)

    async def rollout(self, episode: Episode) -> None:
        async for line in episode.lines():
            if line.text == "b\n":
                episode.finish()
            else:
                episode.observe(self.spliced(episode.renderer))

    def spliced(self, renderer: Renderer) -> str | Observed:
        return "Answer: "


class Splitting(Asking):
    """Encodes it itself, space and all."""

    def spliced(self, renderer: Renderer) -> str | Observed:
        return Observed("Answer: ", renderer.encode("Answer: "))


def test_sampler_check_finds_a_splice_that_ends_in_a_space_of_its_own(folders: dict[str, Path]) -> None:
    renderer = Renderer.from_folder(folders["smollm2"])
    for sampler, kept in ((Asking(), True), (Splitting(), False)):
        (row,) = (row for row in run_checks(sampler, renderer) if "splits a word" in row.name.replace("_", " "))
        assert row.passed == kept, row.detail


def test_what_a_pattern_is_searched_in_is_the_text_without_the_space(folders: dict[str, Path]) -> None:
    renderer = Renderer.from_folder(folders["smollm2"])
    before = renderer.build_prompt("?", "bare")
    seen = renderer.make_watch(re.compile(r"\Adone"), before)
    assert [seen(i) for i in renderer.encode_as_sampled("done\n", before)][-1]


def test_a_run_keeps_what_was_decided_and_an_older_one_is_played_as_it_was(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    small = RolloutConfig(model=str(folders["smollm2"]), engine="transformers")
    (folders["smollm2"] / "config.json").write_text("{}")
    begun = small.resolve_prompt_settings()
    assert begun.prompt_space == "sampled"
    assert 'prompt_space = "sampled"' in dump_toml(begun)
    config = tmp_path / "config.toml"
    config.write_text(dump_toml(begun))
    assert small.resolve_prompt_settings(config).prompt_space == "sampled"
    config.write_text("")  # of a version that did not know the setting
    assert small.resolve_prompt_settings(config).prompt_space == "observed"
    assert replace(small, prompt_space="sampled").resolve_prompt_settings(config).prompt_space == "sampled"


def test_a_policy_within_a_run_is_asked_as_it_was_trained(folders: dict[str, Path], tmp_path: Path) -> None:
    final = tmp_path / "run" / "final"
    final.mkdir(parents=True)
    VOCABULARIES["smollm2"](final)
    (final / "config.json").write_text("{}")
    assert RolloutConfig(model=str(final)).resolve_prompt_settings().prompt_space == "sampled"
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    (tmp_path / "run" / "config.toml").write_text("")
    assert RolloutConfig(model=str(final)).resolve_prompt_settings().prompt_space == "observed"
    assert not RolloutConfig(model=str(final)).load_renderer().samples_space, (
        "also where nothing is resolved: chat, serve, rollout"
    )
    (tmp_path / "run" / "config.toml").write_text('prompt_space = "sampled"\n')
    assert RolloutConfig(model=str(final)).resolve_prompt_settings().prompt_space == "sampled"


@pytest.mark.heavy
def test_the_pages_have_the_forms_of_these_vocabularies_and_first_tokens_cost_what_they_cost_in_whole_texts() -> None:
    figures = json.loads(prompt_space.FIGURES.read_text())
    assert figures["forms"] == prompt_space.forms()
    assert prompt_space.PAGE.text == prompt_space.block(figures)
    assert prompt_space.SUMMARY.text == prompt_space.summary(figures)
    assert len(figures["forms"]) >= 10
    for one in figures["costs"].values():
        assert abs(one["sampled"] - one["whole"]) < 0.05
        assert one["observed"] - one["sampled"] > 1
