"""What is chosen by name: it reaches the optimizer and the loss, and what cannot be is refused where it is written."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from repl_rl.errors import ConfigError
from repl_rl.settings.argument_parser import read_table
from repl_rl.settings.migrate_run_settings import modern
from repl_rl.trainer import config as choices
from repl_rl.trainer.config import KLS, LOSSES, OPTIMIZERS, SCHEDULES, TrainerConfig
from repl_rl.trainer.trl_arguments import grpo_args
from tests.support.trainer.grpo_runs import SMALL, make, run
from tests.support.trainer.tiny_policies import SampledSource, tiny_model

PLAIN = TrainerConfig(steps=10, warmup_steps=2)


class Groups(TrainerCallback):
    """Keeps the options of the optimizer before each of its steps."""

    def __init__(self) -> None:
        self.seen: list[dict[str, object]] = []

    def on_pre_optimizer_step(self, *args: object, optimizer: torch.optim.Optimizer, **kwargs: object) -> None:
        self.seen.append({key: value for key, value in optimizer.param_groups[0].items() if key != "params"})


@pytest.mark.parametrize(("field", "text", "message"), [
    ("loss", "dapo(clip=0.2)", r"option clip of trainer\.loss dapo is 0\.2; its options are clip_low, clip_high"),
    ("loss", "cispo(clip_low=0.2)", r"option clip_low of trainer\.loss cispo is 0\.2; its options are clip_high"),
    ("loss", "dapo(clip_low=-1)", r"clip_low of trainer\.loss dapo is -1; give at least 0"),
    ("loss", "dapo(0.2)", r"trainer\.loss is 'dapo\(0\.2\)'; write options as"),
    ("kl", "k2", r"trainer\.kl is 'k2'; choose one of k3, unbiased"),
    ("kl", "k3(beta=0)", r"beta of trainer\.kl k3 is 0; give a number above 0"),
    ("optimizer", "adam", r"trainer\.optimizer is 'adam'; choose one of adamw_torch_fused, adamw_torch,"),
    ("optimizer", "sgd(beta1=0.9)", r"option beta1 of trainer\.optimizer sgd is 0\.9; its options are momentum"),
    ("optimizer", "adamw_torch(beta1=1.0)", r"beta1 of trainer\.optimizer adamw_torch is 1\.0"),
    ("optimizer", "sgd(nesterov='no')", r"nesterov of trainer\.optimizer sgd is 'no'; choose one of True, False"),
    ("optimizer", "sgd(nesterov=True)", r"nesterov of trainer\.optimizer sgd is True; it needs a momentum"),
    ("lr_scheduler", "cosin", r"trainer\.lr_scheduler is 'cosin'; choose one of linear, cosine,"),
    ("lr_scheduler", "greedy", r"trainer\.lr_scheduler is 'greedy'; choose one of"),
    ("lr_scheduler", "linear(power=2)", r"option power of trainer\.lr_scheduler linear is 2; it has no options"),
    ("lr_scheduler", "cosine(power=2)", r"its options are num_cycles"),
    ("lr_scheduler", "cosine_with_min_lr", r"is 'cosine_with_min_lr'; .*min_lr_rate should be set"),
    ("lr_scheduler", "warmup_stable_decay", r"trainer\.lr_scheduler is 'warmup_stable_decay'; .*num_decay_steps"),
    ("lr_scheduler", "cosine(num_cycles='two')", r"is .*transformers cannot make a learning rate"),
    ("lr_scheduler", "cosine_with_min_lr(min_lr_rate=3.0)", r"is .*learning rates would be 0, 0\.0005, "),
    ("lr_scheduler", "constant", r"is 'constant'; it has no warm-up: choose constant_with_warmup"),
])  # fmt: skip
def test_a_name_or_option_that_there_is_not_is_refused_where_it_is_written(field: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_table(TrainerConfig, {"steps": 10, "warmup_steps": 2, field: text}, "a file")


def test_an_optimizer_of_a_package_that_is_not_there_is_refused_with_what_to_install() -> None:
    for name in ("adamw_8bit", "paged_adamw_8bit(weight_decay=0.1)"):
        with pytest.raises(ConfigError, match=r"trainer\.optimizer is .*pip install bitsandbytes"):
            choices.parse_optimizer(name, found=lambda package: None)
        assert choices.parse_optimizer(name, found=lambda package: package)["optim"] == name.partition("(")[0]


def test_the_defaults_are_what_the_help_spells_out() -> None:
    spelled: dict[str, tuple[Callable[[str], choices.TrlArguments], str, str]] = {
        "optimizer": (
            choices.parse_optimizer, PLAIN.optimizer,
            "adamw_torch_fused(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)",
        ),
        "loss": (choices.parse_loss, PLAIN.loss, "dapo(clip_low=0.2, clip_high=0.28)"),
        "kl": (choices.parse_kl, "k3", "k3(beta=0.04)"),
    }  # fmt: skip
    for made, default, whole in spelled.values():
        assert made(default) == made(whole)


@pytest.mark.parametrize("text", ["adamw_torch", "adafactor(weight_decay=0.1)", "sgd(momentum=0.5)"])
def test_an_optimizer_without_a_package_of_its_own_takes_a_step(text: str, tmp_path: Path) -> None:
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    run(make(model, SampledSource(copy.deepcopy(model)), replace(SMALL, steps=1, optimizer=text), tmp_path))
    assert any(not torch.equal(model.state_dict()[name], weight) for name, weight in before.items())


def test_options_reach_the_optimizer(tmp_path: Path) -> None:
    found = {}
    for text in ("adamw_torch(beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.25)", "sgd(momentum=0.5, nesterov=True)"):
        model = tiny_model()
        config = replace(SMALL, steps=1, optimizer=text)
        trainer = make(model, SampledSource(copy.deepcopy(model)), config, tmp_path / text[:4])
        groups = Groups()
        trainer.add_callback(groups)
        trainer.train()
        (found[text[:4]],) = groups.seen
    adam, sgd = found["adam"], found["sgd("]
    assert (adam["betas"], adam["eps"], adam["weight_decay"]) == ((0.8, 0.9), 1e-6, 0.25)
    assert (sgd["momentum"], sgd["nesterov"], sgd["weight_decay"]) == (0.5, True, 0.0)


@pytest.mark.parametrize(("schedule", "expected"), [
    ("linear", [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]),
    ("constant_with_warmup", [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
    ("warmup_stable_decay(num_decay_steps=2, decay_type='linear')", [0.0, 0.5, 1.0, 1.0, 1.0, 0.5]),
])  # fmt: skip
def test_the_learning_rate_follows_the_schedule_over_all_optimizer_steps(
    schedule: str, expected: list[float], tmp_path: Path
) -> None:
    model = tiny_model()
    # Three steps of two optimizer steps; the warm-up is one of the three.
    config = replace(SMALL, steps=3, num_mini_batches=2, warmup_steps=1, lr_scheduler=schedule, learning_rate=1e-3)
    trainer = make(model, SampledSource(copy.deepcopy(model)), config, tmp_path)
    groups = Groups()
    trainer.add_callback(groups)
    trainer.train()
    assert [one["lr"] for one in groups.seen] == pytest.approx([1e-3 * share for share in expected])


def test_every_name_in_the_tables_is_known_to_trl_and_transformers(tmp_path: Path) -> None:
    for loss in LOSSES:
        assert grpo_args(replace(PLAIN, loss=loss), tmp_path).loss_type == loss
    for kl in KLS:
        assert grpo_args(replace(PLAIN, kl=kl), tmp_path).beta == 0.04
    for name in OPTIMIZERS:
        args = grpo_args(PLAIN, tmp_path)
        args.optim = choices.parse_optimizer(name, found=lambda package: package)["optim"]
        assert OptimizerNames(args.optim).value == name
    needed = {"cosine_with_min_lr": "(min_lr_rate=0.1)", "warmup_stable_decay": "(num_decay_steps=3)"}
    assert {*SCHEDULES} <= {kind.value for kind in SchedulerType}
    for name in SCHEDULES:
        config = replace(PLAIN, warmup_steps=0, lr_scheduler=name + needed.get(name, ""))
        assert grpo_args(config, tmp_path).lr_scheduler_type == name


def test_a_cap_and_a_tolerance_that_older_runs_recorded_are_options_now() -> None:
    said = {"importance": "line_mask", "importance_cap": 3.0, "logprob_tolerance": 0.5, "steps": 2}
    assert modern({"trainer": said})["trainer"] == {
        "importance_sampling": "line_mask(cap=3.0, tolerance=0.5)",
        "steps": 2,
    }
    assert modern({"trainer": {"steps": 2}})["trainer"] == {"steps": 2}
    table = modern({"trainer": {"importance_cap": 4.0}})["trainer"]
    assert isinstance(table, dict)
    config = TrainerConfig(importance_sampling=table["importance_sampling"])
    assert (config.importance_cap, config.compute_logprob_tolerance()) == (4.0, 1e-3)


def test_a_reward_that_nobody_can_choose_any_more_is_left_out_of_what_older_runs_recorded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = {"trainer": {"steps": 2, "rewards": {"ok": 0.1, "incomplete": 0.2, "exited": 0.0}}}
    assert modern(said) == {"trainer": {"steps": 2, "rewards": {"ok": 0.1}}}
    assert said["trainer"] == {"steps": 2, "rewards": {"ok": 0.1, "incomplete": 0.2, "exited": 0.0}}
    assert "trainer.rewards.incomplete = 0.2 was recorded" in caplog.text
