"""Short trainings of a tiny policy with recorded gradients, by this trainer and by TRL's own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from repl_rl.credit.rewards import CreditConfig
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.grpo import ReplGRPOTrainer, Scoring, TrainerComponents
from repl_rl.trainer.logprobs import LogprobScorer, build_token_columns
from repl_rl.trainer.rollout_source import RolloutSource, StepRecord
from repl_rl.trainer.trl_arguments import build_credit_config, grpo_args
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.import_trl import importing_trl
from tests.support.trainer.tiny_policies import (
    PAD,
    VOCAB,
    ReplayedSource,
    tiny_model,
    tiny_tokenizer,
)

with importing_trl():
    from trl import GRPOTrainer

TASKS = [f"task {i}" for i in range(8)]
SMALL = TrainerConfig(
    steps=3, prompts_per_step=3, group_size=4, warmup_steps=0, estimator="outcome", fast_logprobs=False
)


class Gradients(TrainerCallback):
    """Keeps the gradients that the optimizer is about to use, and TRL's log."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.steps: list[dict[str, Tensor]] = []
        self.logs: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, *args: object, **kwargs: object) -> None:
        self.steps.append({n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None})

    def on_log(self, *args: object, logs: dict[str, float], **kwargs: object) -> None:
        self.logs.append(dict(logs))


def make(
    model: PreTrainedModel,
    source: RolloutSource,
    config: TrainerConfig,
    out: Path,
    tasks: Sequence[str] = TASKS,
    credit: CreditConfig | None = None,
) -> ReplGRPOTrainer:
    weights = out / "weights"
    weights.mkdir(parents=True, exist_ok=True)
    return ReplGRPOTrainer(
        model=model,
        tokenizer=tiny_tokenizer(),
        task_ids=tasks,
        source=source,
        args=grpo_args(config, out),
        credit=credit or build_credit_config(config),
        components=TrainerComponents(
            weights_folder=weights,
            logprob_tolerance=config.compute_logprob_tolerance(),
            importance_sampling=config.importance_sampling,
            make_scorer=LogprobScorer if config.fast_logprobs else None,
        ),
    )


def run(trainer: GRPOTrainer) -> Gradients:
    seen = Gradients(trainer.model)
    trainer.add_callback(seen)
    trainer.train()
    return seen


class NoSync:
    def sync_weights(self) -> None:
        pass


def trl_alone(
    model: PreTrainedModel, steps: Sequence[Sequence[Trajectory]], config: TrainerConfig, out: Path, corrected: bool
) -> GRPOTrainer:
    """TRL's GRPOTrainer with its own rollout and reward hooks, on recorded trajectories."""

    def rollouts(prompts: list[str], trainer: GRPOTrainer) -> dict[str, object]:
        batch = steps[trainer.state.global_step // config.optimizer_steps_per_step]
        rows = build_token_columns(batch, PAD)
        rewards = [t.outcome if t.trainable else None for t in batch]
        ids = {"prompt_ids": rows.prompt_ids, "completion_ids": rows.completion_ids, "logprobs": rows.logprobs}
        return {**ids, "env_mask": rows.mask, "reward": rewards}

    def reward_function(reward: list[float | None], **_: object) -> list[float | None]:
        return reward

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[reward_function],
        args=grpo_args(config, out),
        train_dataset=Dataset.from_dict({"prompt": TASKS}),
        processing_class=tiny_tokenizer(),
        rollout_func=rollouts,
    )
    if corrected:
        trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, NoSync(), -1
    return trainer


def token_gradients(group: Sequence[Trajectory], config: TrainerConfig, out: Path) -> tuple[Tensor, Tensor]:
    """d loss / d log probability of each token of a group's rollouts, and their advantages, both (B, T).

    The model is left out: every token has log probability -1, whatever its context.
    """
    config = replace(config, steps=1, prompts_per_step=1, group_size=len(group), fast_logprobs=False)
    trainer = make(tiny_model(), ReplayedSource([group]), config, out, [group[0].task_id])
    free = torch.full((len(group), max(len(t.completion_ids) for t in group)), -1.0, requires_grad=True)

    def same_logits(*_: object, **__: object) -> tuple[Tensor, Tensor, None]:
        rows = trainer._loss_rows if trainer._scoring is Scoring.LOSS else torch.arange(len(group))
        return free[rows], torch.zeros_like(free), None

    trainer.__dict__["_get_per_token_logps_and_entropies"] = same_logits
    batch = trainer._prepare_inputs([{"prompt": group[0].task_id}] * len(group))
    trainer.current_gradient_accumulation_steps = 1
    torch.autograd.backward(trainer._compute_loss(trainer.model, batch))
    assert free.grad is not None
    return free.grad, trainer.train_batch.advantages


def ignore(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
    pass


def batch(lengths: list[tuple[int, int]], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids, attention and sampled flags of rows with these lengths of prompt and completion, padded as TRL pads."""
    generator = torch.Generator().manual_seed(seed)
    before, after = (max(column) for column in zip(*lengths, strict=True))
    ids = torch.full((len(lengths), before + after), PAD)
    sampled = torch.zeros(len(lengths), after, dtype=torch.bool)
    attention = torch.zeros_like(ids)
    for b, (prompt, completion) in enumerate(lengths):
        row = torch.randint(3, VOCAB, (prompt + completion,), generator=generator)
        ids[b, before - prompt : before + completion] = row
        attention[b, before - prompt : before + completion] = 1
        sampled[b, :completion] = torch.rand(completion, generator=generator) < 0.5
    return ids, attention, sampled
