"""The entry: what it reports, what it leaves behind, and what it refuses before it writes anything."""

import ast
import copy
import fcntl
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trainer.weight_sync import open_weights_folder, save_weights
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.trainer.tiny_policies import SampledSource, tiny_model, tiny_tokenizer

TASKS = [f"task {i}" for i in range(6)]
SMALL = TrainerConfig(steps=2, prompts_per_step=2, group_size=3, warmup_steps=0, estimator="outcome")
SHARED = Path("/dev/shm")


def test_every_step_reports_its_record_and_its_own_trajectories(tmp_path: Path) -> None:
    model = tiny_model()
    source = SampledSource(copy.deepcopy(model), faulty=frozenset({1}))
    seen: list[tuple[StepRecord, list[Trajectory]]] = []
    folder = run_training(
        model, tiny_tokenizer(), TASKS, source, SMALL, tmp_path, TrainingOptions(lambda r, t: seen.append((r, list(t))))
    )
    assert [record.step for record, _ in seen] == [1, 2]
    assert [list(map(id, batch)) for _, batch in seen] == [list(map(id, batch)) for batch in source.steps]
    for record, batch in seen:
        m = record.metrics
        good = [t for t in batch if t.trainable]
        assert m["sampled_tokens"] == sum(t.sampled_tokens for t in good)
        assert m["observed_tokens"] == sum(t.observed_tokens for t in good)
        assert m["sandbox_fault_rate"] == pytest.approx(1 / 6)
        assert m["reward_mean"] == pytest.approx(sum(t.outcome or 0.0 for t in good) / 5)
        assert 0 < m["logprob_gap_max"] < 1e-3
        assert m["importance_kept"] == 1.0
        assert all(m[name] > 0 for name in ("rollout_s", "sync_s", "update_s", "grad_norm", "lines_per_rollout"))
        json.dumps(m, allow_nan=False)
    assert folder == tmp_path / "final"
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), model.parameters(), strict=True))


def test_checkpoints_are_loadable_and_come_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    model = tiny_model()
    source = SampledSource(copy.deepcopy(model))
    run_training(model, tiny_tokenizer(), TASKS, source, replace(SMALL, steps=3, save_steps=2), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["checkpoint-2", "checkpoint-3", "final"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")


def test_an_error_of_the_caller_ends_training_and_leaves_no_weights_behind(tmp_path: Path) -> None:
    model = tiny_model()
    ours = f"repl_rl-weights-{os.getpid()}-*"  # another process may train meanwhile
    before = set(SHARED.glob(ours))

    def fail(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        assert set(SHARED.glob(ours)) - before
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(
            model, tiny_tokenizer(), TASKS, SampledSource(copy.deepcopy(model)), SMALL, tmp_path, TrainingOptions(fail)
        )
    assert set(SHARED.glob(ours)) <= before


def test_weights_that_a_killed_process_left_are_swept_and_those_of_a_living_one_are_not() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    dead, alive = SHARED / f"repl_rl-weights-{child}-xxxxxxxx", SHARED / f"repl_rl-weights-{os.getpid()}-yyyyyyyy"
    elsewhere = SHARED / f"repl_rl-weights-{child}-zzzzzzzz"  # of another container, where that number lives
    for each in (dead, alive, elsewhere):
        each.mkdir()
    lock = os.open(elsewhere, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with open_weights_folder(1 << 20) as folder:
            assert folder.is_dir()
            assert folder.stat().st_mode & 0o077 == 0, "nobody else may read the weights"
            assert not dead.exists()
            assert alive.exists()
            assert elsewhere.exists()
        assert not folder.exists()
    finally:
        os.close(lock)
        alive.rmdir()
        elsewhere.rmdir()


def test_tied_weights_are_written_once_under_the_name_that_checkpoints_have(tmp_path: Path) -> None:
    config = tiny_model().config
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config)
    gathered = {name: weight.clone() for name, weight in model.state_dict().items()}  # as shards are gathered
    save_weights(model, gathered, tmp_path)
    assert "lm_head.weight" in gathered
    model.save_pretrained(tmp_path / "whole")
    assert (
        load_file(tmp_path / "model.safetensors").keys() == load_file(tmp_path / "whole" / "model.safetensors").keys()
    )


@pytest.mark.parametrize(("change", "message"), [
    (lambda: replace(SMALL, group_size=1), "trainer.group_size is 1; a group needs at least 2"),
    (lambda: replace(SMALL, loss="luspo"), "trainer.loss is 'luspo'; choose one of grpo, dr_grpo, dapo, cispo"),
    (lambda: replace(SMALL, loss="vespo"), "loss is 'vespo'"),
    (lambda: replace(SMALL, per_device_batch_size=4), "per_device_batch_size is 4; it must divide"),
    (lambda: replace(SMALL, num_mini_batches=4), "num_mini_batches is 4; it must divide"),
    (lambda: replace(SMALL, num_mini_batches=2, per_device_batch_size=2), "it must divide each of 2 parts"),
    (lambda: replace(SMALL, steps=0), "steps is 0; give at least 1"),
    (lambda: replace(SMALL, learning_rate=0.0), "learning_rate is 0.0; give a number above 0"),
    (lambda: replace(SMALL, importance_sampling="token_mask(tolerance=0.0)"), "tolerance of .* token_mask is 0.0"),
    (lambda: replace(SMALL, importance_sampling="token_mask(cap=0.5)"), "cap of .* token_mask is 0.5"),
    (lambda: replace(SMALL, line_rewards={"a:b": 1.0}), "line_rewards with estimator 'outcome' is {'a:b': 1.0}"),
    (lambda: replace(SMALL, potentials={"a:b": 1.0}), "potentials with estimator 'outcome' is {'a:b': 1.0}"),
    (lambda: replace(SMALL, importance_sampling="word_mask"), "importance_sampling is 'word_mask'; choose one of"),
    (lambda: replace(SMALL, importance_sampling="line_mask"), "'line_mask'; this version no longer .* token_truncate"),
    (lambda: replace(SMALL, optimizer="rmsprop(alpha=0.9)"), "optimizer is 'rmsprop'; this version no longer has it"),
    (lambda: replace(SMALL, lr_scheduler="polynomial"), "lr_scheduler is 'polynomial'; this version no longer has it"),
])  # fmt: skip
def test_a_setting_out_of_range_is_refused_with_its_name_and_value(
    change: Callable[[], TrainerConfig], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        change()


@pytest.mark.parametrize(("config", "message"), [
    (replace(SMALL, estimator="nonsense"), "estimator is 'nonsense'"),
    (replace(SMALL, estimator="merged_prefixes(by='states')"), "estimator is 'merged_prefixes'; this version no"),
    (replace(SMALL, estimator="outcome(line_weight=0.5)"), "option line_weight of estimator outcome is 0.5"),
    (replace(SMALL, estimator="return_to_go(discount=1.5)"), "discount of estimator return_to_go is 1.5"),
    (replace(SMALL, estimator="two_stream", line_rewards={"nowhere:f": 1.0}), "line reward is 'nowhere:f'"),
    (replace(SMALL, estimator="two_stream", potentials={"json:nothing": 1.0}), "line reward is 'json:nothing'"),
    (replace(SMALL, prompts_per_step=7), "tasks is 6; a step takes 7"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_is_written(
    config: TrainerConfig, message: str, tmp_path: Path
) -> None:
    source = SampledSource(tiny_model())
    with pytest.raises(ConfigError, match=message):
        run_training(tiny_model(), tiny_tokenizer(), TASKS, source, config, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert source.steps == []


def test_a_missing_or_empty_model_folder_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match=f"model folder is '{folder}'"):
            run_training(folder, tiny_tokenizer(), TASKS, SampledSource(tiny_model()), SMALL, tmp_path / "out")


def shaping(t: Trajectory) -> list[float]:
    return [0.1 * (line.token_ids[0] % 2) for line in t.lines]


def test_shaping_is_reported_next_to_the_outcome(tmp_path: Path) -> None:
    model = tiny_model()
    seen: list[dict[str, float]] = []
    config = replace(SMALL, estimator="two_stream", line_rewards={f"{__name__}:shaping": 1.0})
    source = SampledSource(copy.deepcopy(model))
    run_training(
        model, tiny_tokenizer(), TASKS, source, config, tmp_path, TrainingOptions(lambda r, t: seen.append(r.metrics))
    )
    assert seen[0]["shaping_mean"] != 0.0
    assert 0 < seen[0]["shaping_share"] < 1
    assert -1 <= seen[0]["shaping_correlation"] <= 1


def test_every_figure_of_a_step_is_in_the_specification_and_lengths_drift_from_the_first(tmp_path: Path) -> None:
    model = tiny_model()
    seen: list[dict[str, float]] = []
    run_training(
        model, tiny_tokenizer(), TASKS, SampledSource(copy.deepcopy(model)), SMALL, tmp_path,
        TrainingOptions(lambda r, t: seen.append(r.metrics)),
    )  # fmt: skip
    page = (Path(__file__).parents[3] / "docs" / "specification.md").read_text()
    named = set(re.findall(r"`(\w+|\w+/NAME|\w+/CLASS)`", page))
    assert {
        re.sub(r"^(error)/.*", r"\1/CLASS", re.sub(r"^(reward|outcome)/.*", r"\1/NAME", n)) for n in seen[0]
    } <= named
    first, second = (m["line_tokens_mean"] for m in seen)
    assert [m["line_tokens_drift"] for m in seen] == [0.0, pytest.approx(second / first - 1)]
    assert first != second


class Counting(SampledSource):
    """A source with figures of its own, and tasks."""

    @property
    def tasks(self) -> dict[str, float]:
        return dict.fromkeys(TASKS, 0.25)

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        return {"tool/search/calls": float(len(trajectories))}


def by_task(t: Trajectory, task: float) -> list[float]:
    return [task] * len(t.lines)


def test_rewards_by_name_and_a_sampler_s_own_figures_are_metrics_of_a_step_and_functions_see_the_task(
    tmp_path: Path,
) -> None:
    model = tiny_model()
    seen: list[dict[str, float]] = []
    config = replace(SMALL, estimator="two_stream", line_rewards={f"{__name__}:by_task": 2.0})
    source = Counting(copy.deepcopy(model))
    run_training(
        model, tiny_tokenizer(), TASKS, source, config, tmp_path, TrainingOptions(lambda r, t: seen.append(r.metrics))
    )
    rollouts = config.prompts_per_step * config.group_size
    for row in seen:
        assert row[f"reward/{__name__}:by_task"] == pytest.approx(0.5 * row["lines_per_rollout"])
        assert row["tool/search/calls"] == rollouts
        classes = [value for name, value in row.items() if name.startswith("error/")]
        assert sum(classes) == pytest.approx(row["line_error_rate"])


def lying(group: object) -> list[list[float]]:
    return [[1.0]]


def test_no_step_is_taken_with_the_wrong_number_of_advantages(tmp_path: Path) -> None:
    model = tiny_model()
    before = copy.deepcopy(model)
    config = replace(SMALL, estimator=f"{__name__}:lying")
    with pytest.raises(UserCodeError, match=r"lying' gave .* advantages for .* lines"):
        run_training(model, tiny_tokenizer(), TASKS, SampledSource(copy.deepcopy(model)), config, tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


def test_every_setting_of_the_trainer_is_documented() -> None:
    tree = ast.parse(Path(run_training.__code__.co_filename).with_name("config.py").read_text())
    (config,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainerConfig")
    documented = {
        one.target.id
        for one, after in pairwise(config.body)
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }  # fmt: skip
    assert documented >= {field.name for field in fields(TrainerConfig)}
