"""The GPU memory that a run takes at least: held to the bytes of tensors, and refused where it is not free."""

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from repl_rl.engine import Vllm
from repl_rl.errors import ConfigError
from repl_rl.models.parameter_names import load_skeleton
from repl_rl.rollout_config import RolloutConfig
from repl_rl.sft.create_random_model import make_random_policy
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.config_checks import GpuMemory, count_trainer_bytes, validate_gpu_memory
from repl_rl.trainer.plugins.lora import add_adapters
from repl_rl.trainer.trl_arguments import loaded_dtype
from repl_rl.utils.package_data import find_asset
from tests.support import documents

GIB = 1 << 30
BUNDLED = load_skeleton(find_asset("policies/quickstart")).model
WEIGHTS = 4 * sum(weight.numel() for weight in BUNDLED.parameters())
"""Bytes of the bundled policy in float32."""


def policy() -> PreTrainedModel:
    return make_random_policy(512, 0, 1, hidden=128, layers=2, heads=4)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that an optimizer keeps after a step, without its counters."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = [value for one in optimizer.state.values() for value in one.values()]
    return sum(value.nbytes for value in state if isinstance(value, torch.Tensor) and value.dim())


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_gradients_and_moments_are_those_that_tensors_take(rank: int, dtype: str) -> None:
    config = TrainerConfig(lora_rank=rank, dtype="bfloat16" if dtype == "bfloat16" else "float32")
    model = policy().to(loaded_dtype(config))
    found = count_trainer_bytes(model, config)
    chosen = add_adapters(model, rank, seed=0) if rank else model
    learned = [weight for weight in chosen.parameters() if weight.requires_grad]
    assert found == {
        "weights": sum(weight.nbytes for weight in chosen.parameters()),
        "reference": 0,
        "optimizer": state_bytes(torch.optim.AdamW(learned)),
        "gradients": sum(weight.nbytes for weight in learned),
    }


@pytest.mark.parametrize("name", ["sgd", "sgd(momentum=0.9)", "adamw_torch"])
def test_what_an_optimizer_keeps_is_what_is_counted(name: str) -> None:
    model, momentum = policy(), 0.9 if "momentum" in name else 0.0
    made: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if name.startswith("sgd"):
        made = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
    assert count_trainer_bytes(model, TrainerConfig(optimizer=name))["optimizer"] == state_bytes(made)


def test_a_reference_is_a_copy_of_the_weights_unless_adapters_are_trained() -> None:
    assert count_trainer_bytes(BUNDLED, TrainerConfig(kl="k3"))["reference"] == WEIGHTS
    assert count_trainer_bytes(BUNDLED, TrainerConfig(kl="k3", lora_rank=8))["reference"] == 0


def test_processes_that_train_copies_have_their_gradients_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert count_trainer_bytes(BUNDLED, TrainerConfig())["gradients"] == 2 * WEIGHTS


def on(free: int, total: int | None = None) -> GpuMemory:
    return GpuMemory(free, free if total is None else total)


def fits(world: RolloutConfig, memory: GpuMemory, local: bool = True) -> bool:
    """Return True if a run of the bundled policy begins; it has weights, gradients and two moments."""
    try:
        validate_gpu_memory(world, TrainerConfig(), local, memory)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(("world", "needed"), [
    (RolloutConfig(engine="transformers"), 5 * WEIGHTS),
    (RolloutConfig(engine="transformers", dtype="bfloat16"), 4 * WEIGHTS + WEIGHTS // 2),
    (RolloutConfig(engine=Vllm(kv_cache_gib=1)), 5 * WEIGHTS + GIB),
    (RolloutConfig(engine=Vllm(kv_cache_gib=1, sleep=True)), 4 * WEIGHTS + GIB),
])  # fmt: skip
def test_a_run_begins_where_what_it_takes_is_free_to_the_byte(world: RolloutConfig, needed: int) -> None:
    """A vLLM that sleeps is awake while there are no gradients."""
    assert fits(world, on(needed))
    assert not fits(world, on(needed - 1))


def test_a_vllm_without_a_cache_of_a_size_takes_its_share_of_the_gpu() -> None:
    world = RolloutConfig(engine=Vllm())
    assert fits(world, on(24 * GIB))
    assert not fits(world, on(24 * GIB * 92 // 100 + WEIGHTS, 24 * GIB))
    assert fits(replace(world, engine=Vllm(sleep=True)), on(24 * GIB * 92 // 100 + 4 * WEIGHTS, 24 * GIB))


def test_an_engine_elsewhere_takes_nothing_here() -> None:
    assert fits(RolloutConfig(engine=Vllm(kv_cache_gib=30)), on(4 * WEIGHTS), local=False)


def test_a_run_that_cannot_fit_is_refused_with_what_it_takes_and_the_page_shows_it() -> None:
    with pytest.raises(ConfigError) as refused:
        validate_gpu_memory(RolloutConfig(engine=Vllm(kv_cache_gib=30)), TrainerConfig(), memory=on(24 * GIB))
    assert refused.value.exit_code == 2
    (shown,) = documents.blocks("text", "docs/gpu.md")
    assert " ".join(shown.split()) == f"repl-rl: error: {refused.value}"


@pytest.mark.parametrize(("engine", "config", "options"), [
    (Vllm(), TrainerConfig(lora_rank=4), "--vllm.sleep, a smaller --vllm.kv-cache-gib, a smaller model"),
    (
        Vllm(),
        TrainerConfig(max_staleness_steps=1),
        "a smaller --vllm.kv-cache-gib, --trainer.lora-rank, a smaller model",
    ),
    ("transformers", TrainerConfig(), "--trainer.lora-rank, a smaller model"),
])  # fmt: skip
def test_only_options_that_go_with_the_run_are_named(engine: Vllm | str, config: TrainerConfig, options: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate_gpu_memory(RolloutConfig(engine=engine), config, memory=on(1000))
    assert str(refused.value).endswith(f"; choose {options} or a GPU with more memory")


def test_a_gpu_on_which_vllm_would_not_start_is_refused() -> None:
    world, memory = RolloutConfig(engine=Vllm(kv_cache_gib=1)), on(20 * GIB, 24 * GIB)
    with pytest.raises(ConfigError, match=r"is '20 GiB'; vLLM starts only where 92% of 24 GiB are free"):
        validate_gpu_memory(world, TrainerConfig(), memory=memory)
    assert fits(replace(world, engine="transformers"), memory)


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_nothing_is_checked_where_weights_are_sharded(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "true")
    assert fits(RolloutConfig(engine="transformers"), on(1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_has_nothing_to_check() -> None:
    validate_gpu_memory(RolloutConfig(engine=Vllm(kv_cache_gib=1_000_000)), TrainerConfig())
