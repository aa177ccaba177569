"""bfloat16 is what is computed in; what is trained is float32, so that small steps are not lost."""

import copy
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from repl_rl.cli import main
from repl_rl.engine import ENGINES, Dtype, Engine, EngineOptions, Transformers
from repl_rl.rollout_config import RolloutConfig
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.load_policy import load_model
from repl_rl.trainer.local_or_ray_rollouts import adapt_to_trainer
from repl_rl.trainer.train import run_training, train
from tests.support.trainer.grpo_runs import TASKS, make, run
from tests.support.trainer.tiny_policies import ReplayedSource, SampledSource, tiny_model, tiny_tokenizer

LOW = TrainerConfig(steps=1, prompts_per_step=2, group_size=3, warmup_steps=0, dtype="bfloat16")


class Keeping(SampledSource):
    """Keeps the number formats of what it is given."""

    formats = frozenset[torch.dtype]()

    def load_weights(self, folder: Path, policy_step: int) -> None:
        self.formats |= {weight.dtype for weight in load_file(folder / "model.safetensors").values()}
        super().load_weights(folder, policy_step)


def share_moved(dtype: str, folder: Path, out: Path) -> float:
    """Share of the weights that 50 steps of AdamW at 1e-6 change, from the policy in `folder`."""
    config = TrainerConfig(
        steps=50, prompts_per_step=1, group_size=2, warmup_steps=0, learning_rate=1e-6, lr_scheduler="constant",
        estimator="outcome", dtype="bfloat16" if dtype == "bfloat16" else "float32",
    )  # fmt: skip
    before = load_file(folder / "model.safetensors")
    source = Keeping(tiny_model())
    final = run_training(folder, tiny_tokenizer(), TASKS, source, config, out)
    assert source.formats == {torch.float32}, "the engine is given float32"
    after = load_file(final / "model.safetensors")
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    moved = sum(int((after[name] != weight).sum()) for name, weight in before.items())
    return moved / sum(int(weight.numel()) for weight in before.values())


def test_as_many_weights_move_in_bfloat16_as_in_float32(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "policy")
    low, whole = (share_moved(dtype, tmp_path / "policy", tmp_path / dtype) for dtype in ("bfloat16", "float32"))
    print(f"weights that moved: {low:.2%} in bfloat16, {whole:.2%} in float32")
    assert whole > 0.5
    assert low == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize("updates", [1, 2])
def test_the_fast_path_computes_in_bfloat16_and_has_the_gradients_of_trls(updates: int, tmp_path: Path) -> None:
    config = replace(LOW, num_iterations=updates, estimator="outcome", kl="k3", optimizer="sgd", learning_rate=0.05)
    start = tiny_model()
    # A rollout without an advantage is scored before the others, without a graph.
    source = SampledSource(copy.deepcopy(start), faulty=frozenset({0, 1}))
    slow = run(make(copy.deepcopy(start), source, replace(config, fast_logprobs=False), tmp_path / "slow"))
    model = copy.deepcopy(start)
    formats: set[torch.dtype] = set()

    def note(module: torch.nn.Module, args: object, output: Tensor) -> None:
        formats.add(output.dtype)

    model.model.layers[0].mlp.register_forward_hook(note)
    trainer = make(model, ReplayedSource(source.steps, updates), config, tmp_path / "fast")
    fast = run(trainer)
    assert formats == {torch.bfloat16}
    assert fast.logs[0]["kl"] == pytest.approx(0.0, abs=1e-6 if updates == 1 else 1.0), "the reference computes so too"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for a, b in zip(fast.steps, slow.steps, strict=True):
        apart = {name: (a[name] - b[name]).norm().item() for name in b}
        assert sum(v**2 for v in apart.values()) ** 0.5 < 0.1
        assert all(a[name].any() == b[name].any() for name in b)
    assert 1e-4 < trainer.scored_batch.mismatch.max < config.compute_logprob_tolerance()


def test_a_model_that_is_given_in_bfloat16_is_trained_in_float32_too(tmp_path: Path) -> None:
    model = tiny_model().to(torch.bfloat16)
    source = SampledSource(tiny_model())
    run_training(model, tiny_tokenizer(), TASKS, source, LOW, tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_what_adapters_leave_as_it_is_keeps_its_half_of_the_memory(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "policy")
    config = replace(LOW, lora_rank=2, learning_rate=1e-3)
    assert load_model(tmp_path / "policy", config).dtype == torch.bfloat16
    assert load_model(tmp_path / "policy", replace(config, lora_rank=0)).dtype == torch.float32
    trained: set[torch.dtype] = set()
    model = load_model(tmp_path / "policy", config)

    def note(module: torch.nn.Module, args: object, output: BaseModelOutput) -> None:
        trained.update(p.dtype for p in model.parameters() if p.requires_grad)

    model.base_model.register_forward_hook(note)
    run_training(model, tiny_tokenizer(), TASKS, SampledSource(tiny_model()), config, tmp_path / "run")
    assert trained == {torch.float32}


@dataclass(frozen=True)
class Noting(Transformers):
    """Keeps the number formats that it is opened with."""

    kind: ClassVar[str] = "noting"
    opened: ClassVar[list[str]] = []

    @asynccontextmanager
    async def open(self, opening: EngineOptions) -> AsyncIterator[Engine]:
        self.opened.append(opening.dtype)
        async with super().open(opening) as engine:
            yield engine


@pytest.fixture
def noting() -> Iterator[None]:
    ENGINES.register(Noting)
    yield
    ENGINES.entries.pop(Noting.kind)


@pytest.mark.usefixtures("noting")
@pytest.mark.parametrize(("asked", "computed", "opened"), [
    ("auto", "float32", "float32"),
    ("bfloat16", "float32", "bfloat16"),
    ("auto", "bfloat16", "auto"),
])  # fmt: skip
def test_a_sampler_is_opened_in_what_the_trainer_can_hold_it_to_and_allowed_what_it_needs(
    asked: Dtype, computed: Dtype, opened: str, tmp_path: Path
) -> None:
    """`auto` would be bfloat16 on a GPU, which no trainer in float32 can hold to a thousandth of a nat."""
    Noting.opened.clear()
    gaps: list[float] = []
    config = replace(LOW, group_size=4, dtype="bfloat16" if computed == "bfloat16" else "float32")
    world = RolloutConfig(engine=Noting(), sandbox="unsafe", dtype=asked)
    train(
        world,
        config,
        out=tmp_path / "run",
        train_tasks=8,
        on_step=lambda r, _: gaps.append(r.metrics["logprob_gap_max"]),
    )
    assert Noting.opened == [opened]
    exact = (asked, computed) == ("auto", "float32")
    assert (gaps[0] <= 1e-3) is exact, gaps


def test_a_sampler_in_bfloat16_that_was_asked_for_is_trained_with_on_the_command_line(tmp_path: Path) -> None:
    few = "--trainer.steps 1 --trainer.prompts-per-step 2 --trainer.group-size 4 --train-tasks 8 --eval-tasks 4"
    said = f"train --engine transformers --dtype bfloat16 --sandbox unsafe {few} --out {tmp_path} --name low"
    assert main(said.split()) == 0
    row = json.loads((tmp_path / "low" / "metrics.jsonl").read_text().splitlines()[0])
    assert 1e-3 < row["logprob_gap_max"] < 1.0


def test_how_far_apart_both_may_be_follows_from_both_number_formats() -> None:
    exact, low = TrainerConfig(), TrainerConfig(dtype="bfloat16")
    assert [exact.compute_logprob_tolerance(asked) for asked in ("auto", "float32", "bfloat16", "float16")] == [
        1e-3,
        1e-3,
        1.0,
        1.0,
    ]
    assert [low.compute_logprob_tolerance(asked) for asked in ("auto", "float32", "bfloat16")] == [1.0, 1.0, 1.0]
    assert (
        TrainerConfig(importance_sampling="token_truncate(tolerance=0.25)").compute_logprob_tolerance("bfloat16")
        == 0.25
    )
    assert adapt_to_trainer(RolloutConfig(), exact).dtype == "float32"
    assert adapt_to_trainer(RolloutConfig(dtype="float16"), exact).dtype == "float16"
    assert adapt_to_trainer(RolloutConfig(), low).dtype == "auto"
