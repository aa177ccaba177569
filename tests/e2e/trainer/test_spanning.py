"""Rollouts that span several policies: each line has the log probabilities of the policy step that it names."""

import shutil
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from repl_rl.models.transform_logits import forbid_ids
from repl_rl.rollout import SyncRollouts
from repl_rl.rollout_config import RolloutConfig
from repl_rl.tasks import Split
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.load_policy import load_model
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trainer.weight_sync import WEIGHTS
from repl_rl.trajectory.trajectory import Observed, Sampled, Trajectory

TOLERANCE = 1e-3
"""Of a log probability, nats: that of the trainer's own check."""


ENDLESS = 1 << 30
"""More spanning rollouts than a training has."""


class Keeping(SyncRollouts):
    """Keeps the weights of every policy step."""

    kept: Path

    def load_weights(self, folder: Path, policy_step: int) -> None:
        """See `SyncRollouts.load_weights`."""
        shutil.copy(folder / WEIGHTS, self.kept / f"{policy_step}")
        super().load_weights(folder, policy_step)


class Enough(Exception):
    """Ends a training that has shown what was asked of it."""


def config_of(steps: int) -> TrainerConfig:
    return TrainerConfig(
        steps=steps, prompts_per_step=4, group_size=4, warmup_steps=0, learning_rate=5e-4, max_staleness_steps=3
    )


def spanning(rollouts: Sequence[Trajectory]) -> list[Trajectory]:
    """Those that several policies wrote."""
    return [t for t in rollouts if len({line.policy_step for line in t.lines}) > 1]


def trained(world: RolloutConfig, steps: int, least: int, out: Path) -> list[Trajectory]:
    """Rollouts of the bundled policy, trained until so many span several policies, or for so many steps.

    How many a step brings is the machine's business: the busier it is, the fewer. The weights of every step are in
    `out/kept`.
    """
    played: list[Trajectory] = []

    def note(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        assert record.metrics["staleness_max"] <= 3
        assert record.metrics["logprob_gap_max"] <= TOLERANCE
        assert len(trajectories) == 16
        played.extend(trajectories)
        if len(spanning(played)) >= least:
            raise Enough

    tasks = {task.id: task for task in world.draw_tasks(Split.TRAIN, 256)}
    source = Keeping(world.open_rollouts, tasks)
    source.kept = out / "kept"
    source.kept.mkdir()
    with source, suppress(Enough):
        tokenizer = world.load_renderer().tokenizer
        run_training(
            world.model_folder,
            tokenizer,
            list(tasks),
            source,
            config_of(steps),
            out / "checkpoints",
            TrainingOptions(note),
        )
    return played


@torch.no_grad()
def gaps(world: RolloutConfig, rollouts: Sequence[Trajectory], kept: Path) -> list[float]:
    """Of each line of `rollouts`, the largest gap to the log probabilities of the policy step that it names, nats."""
    model = load_model(world.model_folder, TrainerConfig()).eval()
    forbid_ids(model, world.load_renderer().forbidden_ids)
    by_step: dict[int, list[Trajectory]] = defaultdict(list)
    for t in rollouts:
        for step in {line.policy_step for line in t.lines}:
            by_step[step].append(t)
    found = []
    for step, theirs in sorted(by_step.items()):
        model.load_state_dict(load_file(kept / f"{step}"), strict=False)
        for t in theirs:
            ids = torch.tensor([[*t.prompt.token_ids, *t.completion_ids]])
            logits = model(ids).logits[0, len(t.prompt.token_ids) - 1 : -1].float()
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(t.completion_ids)[:, None])[:, 0]
            at = 0
            for segment in t.segments:
                for line in segment.lines if isinstance(segment, Sampled) else ():
                    mine = logprobs[at : at + len(line.token_ids)]
                    if line.policy_step == step:
                        found.append((mine - torch.tensor(line.logprobs)).abs().max().item())
                    at += len(line.token_ids)
                at += len(segment.token_ids) if isinstance(segment, Observed) else 0
    return found


def check(world: RolloutConfig, steps: int, least: int, out: Path) -> None:
    played = trained(world, steps, least, out)
    ours = spanning(played)
    assert len(ours) >= least, f"{len(ours)} of {len(played)} rollouts span several policies"
    found = gaps(world, ours, out / "kept")
    assert len(found) == sum(len(t.lines) for t in ours)
    print(f"{len(ours)} of {len(played)} rollouts span several policies; largest gap {max(found):.2g} nats")
    assert max(found) <= TOLERANCE


@pytest.mark.heavy
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_each_line_has_the_log_probabilities_of_the_policy_that_it_names(engine: str, tmp_path: Path) -> None:
    check(RolloutConfig(engine=engine, sandbox="unsafe", concurrency=32), 100, 8, tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_lines_on_kept_keys_name_the_oldest_policy_and_are_never_taken_for_new_ones(
    engine: str, tmp_path: Path
) -> None:
    """`trained` looks at what is taken for new, and at how old lines get."""
    world = RolloutConfig(engine=engine, sandbox="unsafe", concurrency=32, kv_on_sync="keep")
    played = trained(world, 24, ENDLESS, tmp_path)
    assert played
    assert not spanning(played)
    assert max(gaps(world, played, tmp_path / "kept")) > TOLERANCE, "some were under way when weights changed"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_so_have_the_lines_of_a_thousand_rollouts(engine: str, tmp_path: Path) -> None:
    check(RolloutConfig(engine=engine, sandbox="unsafe", concurrency=32), 1000, 1000, tmp_path)
