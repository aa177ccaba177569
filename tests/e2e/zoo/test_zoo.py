"""Each family of the zoo trains on an engine, or is refused at once; docs/models.md says which."""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.models.families import (
    ENGINE_NAMES,
    FIGURES,
    PAGE,
    SUMMARY,
    block,
    check,
    merge_rows,
    play,
    rows_of,
    summary,
    trained,
)
from benchmarks.models.families import main as publish_again
from benchmarks.models.zoo import EOS, VOCABULARY, WINDOW, ZOO, Family
from repl_rl.cli import main
from repl_rl.engine.transformers_engine import Decoder, validate_decodable
from repl_rl.engine.transformers_engine import DecodeRow as Fed
from repl_rl.errors import ConfigError
from repl_rl.models.parameter_names import resolve_causal_class
from repl_rl.models.transform_logits import choose_attention
from repl_rl.trainer.forward_pass import BatchLayout, build_row_passes, compute_logprobs, install_scoring_forward
from tests.support.documents import ROOT

Made = Callable[[str], Path]
ROWS = {(row.family, row.engine): row for row in rows_of(json.loads(FIGURES.read_text()))}
ON_VLLM = ("Qwen3-MoE",)
"""Those that are trained on real vLLM here: each start costs half a minute. `make models` trains all."""


def told(name: str, engine: str) -> tuple[str, str]:
    return ROWS[name, engine].outcome, ROWS[name, engine].reason


FIRST = ("Llama", "Qwen3, tied, head stored", "Qwen3-MoE", "Mistral, windows", "Falcon-H1", "Mamba 2")
"""Families that `make test` trains; `make test-heavy` trains all others."""


@pytest.mark.parametrize(
    "name", [pytest.param(f.name, marks=() if f.name in FIRST else pytest.mark.heavy) for f in ZOO]
)
def test_a_family_trains_on_the_transformers_engine_or_is_refused_as_the_page_says(name: str) -> None:
    family = next(family for family in ZOO if family.name == name)
    row = play(family, "transformers")
    assert (row.outcome, row.reason) == told(name, "transformers")
    assert row.gap < 1e-3


@pytest.mark.heavy
@pytest.mark.parametrize("name", ON_VLLM)
def test_a_family_trains_on_vllm_as_the_page_says(name: str) -> None:
    family = next(family for family in ZOO if family.name == name)
    row = play(family, "vllm")
    assert (row.outcome, row.reason) == told(name, "vllm")
    assert row.gap < 1e-3


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_every_refusal_is_one_line_that_takes_less_than_a_second(engine: str, made: Made) -> None:
    check(ROOT / "repl_rl" / "policies" / "quickstart", engine)  # imports
    for family in ZOO:
        began = time.process_time()
        try:
            check(made(family.name), engine)
            reason = ""
        except ConfigError as error:
            reason = str(error)
        assert time.process_time() - began < 1.0, family.name
        assert "\n" not in reason
        assert bool(reason) == (told(family.name, engine)[0] == "refused"), reason


UNKEPT = Family(
    "MiniMax",
    "minimax",
    {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "num_experts_per_tok": 2},
)
"""It has a cache of its own beside transformers'."""


def test_the_command_refuses_before_an_engine_starts_and_before_a_run_folder_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(UNKEPT.write(tmp_path / "model"))
    code = main(["train", "--model", model, "--engine", "transformers", "--out", str(tmp_path), "--name", "run"])
    told = capsys.readouterr().err.splitlines()
    assert code == 2
    assert [line for line in told if line.startswith("repl-rl: error: ")] == told[-1:]
    assert "MiniMaxForCausalLM" in told[-1]
    assert "--engine vllm" in told[-1]
    assert not (tmp_path / "run").exists()


def test_a_run_from_python_says_in_its_summary_what_its_update_fell_back_to(made: Made, tmp_path: Path) -> None:
    trained(made("Qwen3-MoE"), "transformers", tmp_path / "run", steps=1)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert any("router_aux_loss_coef" in told for told in summary["update_fallbacks"])
    assert summary["sampler_fallback"] is None


DECODABLE = [name for (name, engine), row in ROWS.items() if engine == "transformers" and row.outcome == "trained"]


@pytest.mark.parametrize("name", DECODABLE)
def test_engine_and_update_compute_what_the_model_itself_does(name: str, made: Made) -> None:
    """Windows, capped and scaled logits, capped attention, keys and values of several widths."""
    folder = made(name)
    validate_decodable(folder)
    how = choose_attention(*resolve_causal_class(AutoConfig.from_pretrained(folder)))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=how).eval()
    ids = [int(i) for i in torch.randint(0, EOS, (2 * WINDOW + 3,), generator=torch.Generator().manual_seed(1))]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert logits.size(-1) == VOCABULARY
    drawn = decoded(folder, ids)
    start = len(ids) - len(drawn) - 1
    torch.testing.assert_close(torch.stack(drawn), logits[start:].log_softmax(-1)[: len(drawn)], atol=2e-4, rtol=0)
    install_scoring_forward(model)
    whole = torch.tensor([ids])
    mask = torch.ones_like(whole)
    layout = BatchLayout.from_batch(whole, mask, mask[:, 1:].bool())
    scores = compute_logprobs(model, layout, build_row_passes(layout, torch.tensor([0]), 999))
    torch.testing.assert_close(scores.logprobs[0], expected, atol=2e-4, rtol=0)


def decoded(folder: Path, ids: Sequence[int]) -> list[torch.Tensor]:
    """Log probabilities that the engine's decoder has of the id after each of the last ones, beside a shorter row."""
    decoder = Decoder(folder, "float32", 0)
    slots = [decoder.kv_cache.allocate_slot(), decoder.kv_cache.allocate_slot()]
    computed, found = 0, []
    for end in range(WINDOW, len(ids)):
        rows = [Fed(slots[0], list(ids[:end]), computed, 0.0, None), Fed(slots[1], list(ids[: end - 7]), 0, 0.0, None)]
        feeds = [decoder.get_uncomputed_ids(row) for row in (rows if end % 2 else rows[:1])]
        if decoder.kv_cache.supports_padding:
            found.append(decoder.compute_logprobs(feeds)[0])
        else:
            found += [
                decoder.compute_logprobs([feeds[n] for n in part])[0]
                for part in decoder.split_by_length(feeds)
                if 0 in part
            ]
        computed = end
    return [row.clone() for row in found]


def test_the_page_is_made_of_the_figures() -> None:
    figures = json.loads(FIGURES.read_text())
    assert PAGE.text == block(figures)
    assert SUMMARY.text == summary(figures)
    assert not re.search(r"\d+ families|\d s\b", PAGE.around + SUMMARY.around)


def test_families_that_are_tried_again_take_their_rows_places_and_leave_the_others() -> None:
    before = rows_of(json.loads(FIGURES.read_text()))
    again = [replace(ROWS["LFM2", engine], gap=0.5) for engine in ENGINE_NAMES]
    after = merge_rows(before, again)
    assert [(row.family, row.engine) for row in after] == [(row.family, row.engine) for row in before]
    assert [row for row in after if row.family == "LFM2"] == again
    assert {row for row in after if row.family != "LFM2"} == {row for row in before if row.family != "LFM2"}
    with pytest.raises(SystemExit, match="Lfm9"):
        publish_again(["--only", "Lfm9"])


def test_every_family_of_the_zoo_stands_in_the_table_and_none_failed() -> None:
    assert set(ROWS) == {(family.name, engine) for family in ZOO for engine in ENGINE_NAMES}
    assert len(ZOO) >= 16
    assert {row.outcome for row in ROWS.values()} == {"trained", "refused"}
    assert max(row.check_s for row in ROWS.values()) <= 1.0
    assert json.loads(FIGURES.read_text())["tracebacks"] == 0
