"""docs/update.md: its settings are accepted and its functions work. Its results are those of the published run."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.update import page as update
from repl_rl.cli.train import TrainConfig
from repl_rl.credit.advantage_estimators import GroupRewards, LineRewards, RolloutRewards, load_estimator
from repl_rl.credit.rewards import RewardTable, compute_line_rewards
from repl_rl.settings.argument_parser import parse
from repl_rl.trainer import config as choices
from repl_rl.trainer.trl_arguments import build_credit_config
from repl_rl.trajectory.trajectory import LineStatus
from tests.unit.test_rewards import ran, rollout

PAGE = (Path(__file__).parents[2] / "docs" / "update.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_functions_and_settings_of_the_page_work_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = blocks("python")
    (tmp_path / "shaping.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    configs = []
    for number, text in enumerate(blocks("toml")):
        file = tmp_path / f"{number}.toml"
        file.write_text(text)
        configs.append(parse(TrainConfig, "train", ["--config", str(file)]).trainer)
    assert [config.optimizer_steps_per_step for config in configs] == [1, 1, 1, 1, 1, 1, 8, 1, 1, 1, 1]
    credit, potential, stops, *_, memory = (build_credit_config(config) for config in configs)
    sys.modules.pop("shaping")
    assert configs[-1].lora_rank == 16
    assert [config.group_sampling for config in configs if config.group_sampling] == [
        "dynamic_sampling(max_rounds=2)",
        "fifo_window(in_flight_share=0.3)",
    ]
    assert [config.max_staleness_steps for config in configs if config.max_staleness_steps] == [1, 1]
    assert memory.stop_policy is None
    assert stops.stop_policy is not None
    assert (stops.stop_policy.mask, stops.stop_policy.penalise) == (("wall_clock",), ("max_lines", "line_too_long"))
    t = rollout(ran(LineStatus.OK), ran(LineStatus.EXCEPTION))
    assert compute_line_rewards(t, RewardTable(), credit.extra_rewards) == pytest.approx((0.05, -0.05))
    assert compute_line_rewards(t, RewardTable(), (), potential.potential) == pytest.approx((0.0, -0.1))


def test_the_estimator_of_the_page_pays_each_token_of_a_rollout_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, source = blocks("python")
    (tmp_path / "paying.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    group = GroupRewards((
        RolloutRewards(1.0, (LineRewards(0.0, tokens=2), LineRewards(0.0, tokens=3))),
        RolloutRewards(0.0, (LineRewards(0.0, tokens=4),)),
        RolloutRewards(None, (LineRewards(0.0, tokens=1),)),
    ))  # fmt: skip
    assert load_estimator("paying:by_length(scale=2.0)")(group) == ((0.2, 0.2), (-0.25,), (0.0,))
    sys.modules.pop("paying")


def test_the_page_names_every_loss_optimizer_and_schedule_that_there_is() -> None:
    named = set(re.findall(r"`(\w+)[`(]", PAGE))
    assert named >= {
        *choices.LOSSES,
        *choices.KLS,
        *choices.GROUP_SAMPLING_TYPES,
        *choices.OPTIMIZERS,
        *choices.SCHEDULES,
    }


def test_a_trained_weight_takes_the_bytes_that_the_page_says() -> None:
    weight = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.AdamW([weight])
    torch.autograd.backward(weight.sum())
    optimizer.step()
    assert weight.grad is not None
    moments = [t for t in optimizer.state[weight].values() if t.numel() == weight.numel()]
    total = sum(t.element_size() for t in (weight, weight.grad, *moments))
    assert f"a trained weight takes {total} bytes in either format" in " ".join(PAGE.split())


def test_the_figures_of_the_page_are_those_of_the_published_run_and_stand_nowhere_else() -> None:
    assert update.PAGE.text == update.block(json.loads(update.FIGURES.read_text()))
    assert not re.search(r"\d+(\.\d+)?(x|%| ?s| ?MiB)\b", update.PAGE.around + PAGE)


def test_the_published_update_keeps_its_promise() -> None:
    """What memory saves is a matter of long rollouts with large vocabularies, the first table."""
    for row in json.loads(update.FIGURES.read_text()):
        assert row["time_ratio"] <= 0.5
        assert row["memory_ratio"] <= (0.35 if "off_update_s" in row else 0.15)
        assert row["max_abs_loss_diff"] <= 1e-5
        assert row["max_abs_gradient_diff"] <= 1e-5


def test_the_published_shared_prefixes_keep_their_promise() -> None:
    """Nothing is published where the run is older than they are."""
    for row in json.loads(update.FIGURES.read_text()):
        if "off_update_s" not in row:
            continue
        assert row["gradient_error"] <= 5 * row["gradient_noise"]
        if (row.get("prompt"), row["rollouts"]) == (1024, 8):
            assert row["off_time_ratio"] >= 4.5
            assert row["off_memory_ratio"] >= 3
