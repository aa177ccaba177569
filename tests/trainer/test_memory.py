"""The memory plan: its figures against counted bytes, what makes it larger or smaller, and what it refuses."""

import re
from dataclasses import replace
from io import StringIO

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import PreTrainedModel

from repl_rl.cli.outcome import show_plan
from repl_rl.coldstart.fresh import random_policy
from repl_rl.engine import Vllm
from repl_rl.engine.names import outline
from repl_rl.errors import ConfigError
from repl_rl.machine.assets import asset
from repl_rl.rollout.limits import RolloutLimits
from repl_rl.trainer import TrainerConfig, plan_run
from repl_rl.trainer.lora import adapted
from repl_rl.trainer.memory import (
    GIB,
    PHASES,
    Case,
    Gpu,
    Plan,
    Sampling,
    Shape,
    Update,
    copies,
    layer_bytes,
    moments,
    planned,
    trained,
)
from repl_rl.trainer.planning import Planned, advice, shape_of, update_of
from repl_rl.world import World
from tests import documents

TOKENS, ROWS = 150, 2


def policy(layers: int = 2) -> PreTrainedModel:
    return random_policy(512, 0, 1, hidden=128, layers=layers, heads=4)


def kept_bytes(model: PreTrainedModel, low: bool) -> int:
    """Bytes that PyTorch keeps for the gradient of a forward pass, each storage once, weights not counted."""
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other takes its place
        return tensor

    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    ids = torch.randint(3, 500, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=low),
    ):
        bare.base_model(input_ids=ids, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in own)


def layer_kept(low: bool, rank: int) -> float:
    """Bytes that a layer keeps for the gradient, as what two layers more keep: so nothing else is in it."""
    found = []
    for layers in (2, 4):
        model = policy(layers)
        model = model.bfloat16() if low and rank else model
        found.append(kept_bytes(adapted(model, rank, seed=0) if rank else model, low))
    return (found[1] - found[0]) / 2


def test_weights_adapters_and_moments_are_those_that_tensors_take() -> None:
    model = policy()
    shape = shape_of(model)
    assert shape.weights == sum(w.numel() for w in model.parameters())
    assert shape_of(outline(asset("policies/quickstart")).model).weights > 0, "weights need not be there"
    for rank in (0, 4):
        chosen = adapted(model, rank, seed=0) if rank else model
        learned = [w for w in chosen.parameters() if w.requires_grad]
        update = Update(rows=1, longest=8, lora_rank=rank)
        assert trained(shape, update) == sum(w.numel() for w in learned)
        assert {w.dtype for w in learned} == {torch.float32}
        optimizer = torch.optim.AdamW(learned)
        for weight in learned:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        state = [value for one in optimizer.state.values() for value in one.values() if value.dim()]
        assert moments(shape, update) == sum(value.nbytes for value in state)


def test_adafactor_keeps_the_edges_of_its_matrices() -> None:
    from transformers.optimization import Adafactor

    model = policy()
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer = Adafactor(model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False)
    optimizer.step()
    state = [v for one in optimizer.state.values() for v in one.values() if isinstance(v, torch.Tensor) and v.dim()]
    update = update_of(TrainerConfig(optimizer="adafactor"), longest=8)
    assert moments(shape_of(model), update) == sum(value.nbytes for value in state)


@pytest.mark.parametrize("optimizer", ["sgd", "sgd(momentum=0.9)", "rmsprop", "rmsprop(momentum=0.5)", "adamw_torch"])
def test_what_an_optimizer_keeps_is_what_it_is_planned_to_keep(optimizer: str) -> None:
    model = policy()
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    momentum = 0.9 if "momentum" in optimizer else 0.0
    made: torch.optim.Optimizer
    if optimizer.startswith("sgd"):
        made = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
    elif optimizer.startswith("rmsprop"):
        made = torch.optim.RMSprop(model.parameters(), 0.1, momentum=momentum)
    else:
        made = torch.optim.AdamW(model.parameters())
    made.step()
    state = [v for one in made.state.values() for v in one.values() if isinstance(v, torch.Tensor) and v.dim()]
    update = update_of(TrainerConfig(optimizer=optimizer), longest=8)
    assert moments(shape_of(model), update) == sum(value.nbytes for value in state)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("low", [False, True])
def test_a_layer_keeps_the_bytes_that_are_planned_to_the_byte(low: bool, rank: int) -> None:
    update = Update(ROWS, TOKENS, itemsize=2 if low else 4, lora_rank=rank)
    shapes = [shape_of(policy(layers)) for layers in (2, 4)]
    cast = (copies(shapes[1], update) - copies(shapes[0], update)) / 2
    assert layer_kept(low, rank) == layer_bytes(shapes[0], update) * ROWS * TOKENS + cast


SHAPE = Shape(
    weights=500_000_000, matrices=400_000_000, adapted=1_500_000, edges=700_000, layers=24, hidden=1024, inner=3072,
    heads=16, queries=2048, keys=1024, vocab=151_936,
)  # fmt: skip
CASE = Case(SHAPE, Update(rows=8, longest=1024), Sampling("vllm", 64, 1024, cache=8 * GIB), Gpu(80 * GIB, 79 * GIB))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers, heads = draw(st.integers(1, 80)), draw(st.integers(1, 64))
    width, hidden = draw(st.sampled_from((32, 64, 128))), draw(st.integers(64, 8192))
    matrices = draw(st.integers(10**6, 10**10))
    shape = Shape(
        weights=matrices + draw(st.integers(0, 10**9)),
        matrices=matrices,
        adapted=draw(st.integers(1, matrices // 200)),
        edges=draw(st.integers(1, matrices // 50)),
        layers=layers,
        hidden=hidden,
        inner=draw(st.integers(64, 32768)),
        heads=heads,
        queries=heads * width,
        keys=draw(st.integers(1, heads)) * width,
        vocab=draw(st.integers(100, 300_000)),
        heads_normed=draw(st.booleans()),
    )
    update = Update(
        rows=draw(st.integers(1, 256)),
        longest=draw(st.integers(2, 32768)),
        itemsize=draw(st.sampled_from((2, 4))),
        moments=draw(st.sampled_from((0.0, 2.03, 4.0, 8.0))),
        reference=draw(st.booleans()),
        checkpointing=draw(st.booleans()),
        copies=draw(st.booleans()),
    )
    cache = draw(st.none() | st.integers(1, 200).map(lambda gib: gib * GIB))
    sampling = Sampling("vllm", draw(st.integers(1, 512)), draw(st.integers(64, 32768)), cache=cache)
    total = draw(st.integers(4, 200)) * GIB
    return Case(shape, update, sampling, Gpu(total, total - draw(st.integers(0, GIB))))


def updated(case: Case, **changes: int | bool) -> Plan:
    return planned(replace(case, update=replace(case.update, **changes)))  # type: ignore[arg-type]


@given(cases(), st.integers(1, 64), st.integers(1, 4096))
def test_more_and_longer_rollouts_never_take_less(case: Case, rows: int, tokens: int) -> None:
    here, update = planned(case).needed[1], case.update
    assert updated(case, rows=update.rows + rows).needed[1] > here
    one = replace(case, update=replace(update, rows=1))
    assert updated(one, longest=update.longest + tokens).needed[1] > planned(one).needed[1]


@given(cases(), st.integers(1, 64))
def test_adapters_are_held_in_less_than_all_weights(case: Case, rank: int) -> None:
    def held(plan: Plan) -> int:
        names = ("weights", "reference", "optimizer", "gradients")
        return sum(part.updated for part in plan.parts if part.owner == "trainer" and part.what in names)

    assert held(updated(case, lora_rank=rank)) < held(planned(case))


@given(cases())
def test_a_vllm_that_sleeps_takes_less_while_weights_are_updated_and_never_more(case: Case) -> None:
    assert case.sampling is not None
    awake, asleep = planned(case), planned(replace(case, sampling=replace(case.sampling, sleep=True)))
    assert asleep.needed[1] < awake.needed[1]
    assert (asleep.needed[0], asleep.needed[2]) == (awake.needed[0], awake.needed[2])
    assert asleep.peak <= awake.peak


@given(cases())
def test_checkpointing_keeps_less_of_many_layers(case: Case) -> None:
    deep = replace(case, shape=replace(case.shape, layers=max(8, case.shape.layers)))
    deep = replace(deep, update=replace(deep.update, rows=max(2, case.update.rows)))
    assert updated(deep, checkpointing=True).needed[1] < updated(deep, checkpointing=False).needed[1]


@given(cases())
def test_nothing_takes_less_than_nothing_and_every_part_has_a_name_of_its_own(case: Case) -> None:
    parts = planned(case).parts
    assert all(size >= 0 for part in parts for size in (part.sampled, part.updated, part.handed))
    assert len({(part.owner, part.what) for part in parts}) == len(parts)


@given(cases())
@settings(max_examples=40)
def test_what_is_advised_fits_and_nothing_is_advised_where_nothing_helps(case: Case) -> None:
    told = advice(case)
    changed = case
    for option in told.partition("it fits with ")[2].split("--")[1:]:
        changed = with_option(changed, *option.split())
    assert planned(changed).fits is ("it fits with" in told or planned(case).fits)


def with_option(case: Case, name: str, value: str = "") -> Case:
    assert case.sampling is not None
    update, sampling = case.update, case.sampling
    known = {
        "vllm.sleep": lambda: replace(case, sampling=replace(sampling, sleep=True)),
        "vllm.kv-cache-gib": lambda: replace(case, sampling=replace(sampling, cache=int(value) * GIB)),
        "trainer.micro-batch": lambda: replace(case, update=replace(update, rows=int(value))),
        "trainer.checkpointing": lambda: replace(case, update=replace(update, checkpointing=True)),
        "trainer.dtype": lambda: replace(case, update=replace(update, itemsize=2)),
        "trainer.lora-rank": lambda: replace(case, update=replace(update, lora_rank=int(value))),
    }
    return known[name]()


def test_a_cache_holds_two_vectors_a_token_and_layer_and_no_more_than_a_layer_looks_back() -> None:
    shape = replace(SHAPE, layers=2)
    assert shape.cache(100, 2) == 2 * 2 * 100 * SHAPE.keys * 2
    assert replace(shape, windows=(None, 10)).cache(100, 2) == 2 * (100 + 10) * SHAPE.keys * 2
    assert replace(shape, windows=(None, 0)).cache(100, 2) == 2 * 100 * SHAPE.keys * 2


def small(kv: int | None = None) -> World:
    limits = RolloutLimits(max_lines=4, max_line_tokens=12)
    return World(engine=Vllm(kv_cache_gib=kv), concurrency=16, rollout=limits)


def on(total: int, free: int | None = None) -> Gpu:
    return Gpu(total * GIB, (total if free is None else free) * GIB)


def printed(found: Planned | None) -> str:
    file = StringIO()
    show_plan(Console(file=file, width=160), found)
    return " ".join(file.getvalue().split())


def test_a_machine_without_a_gpu_has_no_plan_and_prints_none() -> None:
    assert plan_run(small(), TrainerConfig(), (), gpu=lambda: None) is None
    assert printed(None) == ""


def test_the_plan_of_the_bundled_run_is_printed_part_by_part() -> None:
    world = small(kv=2)
    found = plan_run(world, TrainerConfig(), world.drawn(count=20), gpu=lambda: on(24))
    assert found is not None
    assert found.case.shape == shape_of(outline(world.model_folder).model)
    assert found.tokens == found.case.update.longest
    text = printed(found)
    assert all(phase in text for phase in PHASES)
    assert all(part.what in text for part in found.plan.parts)
    assert "of 24.00 that are free" in text
    assert "rollouts fit" not in text


def test_where_the_longest_rollouts_do_not_fit_it_is_told_how_long_they_may_be() -> None:
    world = small()  # vLLM takes 92 %
    found = plan_run(world, TrainerConfig(), world.drawn(count=20), gpu=lambda: on(24))
    assert found is not None
    longest = found.case.update.longest
    assert 0 < found.tokens < longest
    assert planned(with_longest(found.case, found.tokens)).fits
    assert not planned(with_longest(found.case, found.tokens + 1)).fits
    told = (
        f"rollouts fit up to {found.tokens} tokens, of {longest} tokens that their limits allow; it fits with --vllm."
    )
    assert told in printed(found)


def with_longest(case: Case, longest: int) -> Case:
    return replace(case, update=replace(case.update, longest=longest))


def test_a_run_that_cannot_fit_is_refused_with_the_fewest_settings_that_would_help() -> None:
    world = small(kv=30)
    with pytest.raises(ConfigError) as refused:
        plan_run(world, TrainerConfig(), world.drawn(count=20), gpu=lambda: on(24))
    assert refused.value.exit_code == 2
    assert str(refused.value).startswith("free memory of the GPU is '24.0 GiB'; the run takes 32.")
    (told,) = documents.blocks("text", "docs/gpu.md")
    assert " ".join(told.split()) == f"repl-rl: error: {refused.value}", "the page tells what is said"
    assert re.search(r"; it fits with --vllm\.kv-cache-gib \d+$", str(refused.value))


def test_a_gpu_on_which_vllm_would_not_start_is_refused() -> None:
    world = small(kv=1)
    with pytest.raises(ConfigError, match=r"is '20\.0 GiB'; vLLM starts only where 92% of 24\.0 GiB are free"):
        plan_run(world, TrainerConfig(), (), gpu=lambda: on(24, free=20))
    other = replace(world, engine="transformers")
    assert plan_run(other, TrainerConfig(), (), gpu=lambda: on(24, free=20)) is not None


def test_no_setting_is_advised_for_a_model_that_is_too_large() -> None:
    assert advice(replace(CASE, shape=replace(SHAPE, weights=10**12, matrices=10**12))) == ""


def test_an_engine_elsewhere_takes_nothing_here() -> None:
    world = small(kv=1)
    here, away = (plan_run(world, TrainerConfig(), (), local, lambda: on(24)) for local in (True, False))
    assert here is not None
    assert away is not None
    assert {part.owner for part in here.plan.parts} == {"trainer", "vllm"}
    assert {part.owner for part in away.plan.parts} == {"trainer"}


def test_a_reference_is_a_copy_of_the_weights_unless_adapters_are_trained() -> None:
    with_reference = updated(CASE, reference=True)
    assert with_reference.peak - planned(CASE).peak == SHAPE.weights * 4
    assert updated(CASE, reference=True, lora_rank=8) == updated(CASE, lora_rank=8)
