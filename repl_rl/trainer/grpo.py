"""GRPO trainer on console trajectories: TRL's trainer with our rollouts and one advantage per token.

`TrainBatch` and `ScoredBatch` hold the data of the current step: rollouts, their credit, and their log probabilities.

TRL keeps the loop, the loss, the importance sampling correction and the optimizer. An override calls `super()` and then
changes only the part that it names; without `super()`, it replaces that part. After each weight sync, the trainer
compares its log probabilities with those of the sampler.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

import torch
from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_callback import ExportableState

from repl_rl.credit.credit_metrics import (
    compute_credit_metrics,
    compute_length_metrics,
    compute_length_metrics_for_trl,
    list_ends,
)
from repl_rl.credit.credited_trajectory import LineCredit, add_child_rows, pad_with_idle_rows
from repl_rl.credit.rewards import (
    CreditConfig,
    GroupEntry,
    build_group_entry,
    build_line_credit,
    compute_group_advantages,
)
from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ConfigError
from repl_rl.models.transform_logits import forbid_ids
from repl_rl.trainer.collect_groups import GroupSampler, SyncedStep, TaskSampler
from repl_rl.trainer.config import parse_importance
from repl_rl.trainer.importance_sampling import (
    LogprobMismatch,
    apply_importance_correction,
    compute_token_staleness,
)
from repl_rl.trainer.logprobs import (
    LogprobScorer,
    ScoringBatch,
    broadcast_to_tokens,
    build_line_numbers,
    build_token_columns,
)
from repl_rl.trainer.plugins.checkpoint import CheckpointCallback, CheckpointManager
from repl_rl.trainer.plugins.fsdp import check_model_sharded, enable_fsdp
from repl_rl.trainer.reference_model import copy_frozen
from repl_rl.trainer.rollout_source import RolloutSource
from repl_rl.trainer.trl_arguments import GRPOConfig, GRPOTrainer, validate_task_count, validate_trl_options
from repl_rl.trainer.weight_sync import WeightSync
from repl_rl.trajectory.trajectory import Group, Trajectory, compute_mean_parts
from repl_rl.utils.describe_os_errors import catch_os_errors


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Rollouts of a step on this process, with their advantages and credit."""

    trajectories: tuple[Trajectory, ...]
    """Trajectories as they were played."""
    trained_trajectories: tuple[Trajectory, ...]
    """The same trajectories after the stop policy, as training uses them."""
    rows: tuple[Trajectory, ...]
    """Rows of the update, B of them, in order: `trained_trajectories`, trained children and alternatives, idle rows."""
    advantages: Tensor
    """Advantage of each token, float32, (B, T)."""
    credit: tuple[tuple[Sequence[float], Sequence[float]], ...]
    """Rewards and advantages of the lines, one pair per rollout."""
    metrics: dict[str, float]
    """Metrics of reward shaping, lengths, groups and curriculum, over all processes."""
    line_reward_sums: dict[str, float]
    """Per reward name: sum over the lines of a rollout, averaged over the rollouts of all processes."""


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """Log probabilities of a step's rollouts under the trainer's policy, and their mismatch with the sampler's."""

    mismatch: LogprobMismatch
    logprobs: Tensor
    """Log probability of each token, nats, float32 on the CPU, (B, T)."""
    metrics: dict[str, float]
    """Metrics of prefix sharing and staleness, by name; empty without either."""


def compute_line_credits(state: TrainBatch, scored: ScoredBatch) -> list[tuple[LineCredit, ...]]:
    """Return the credit of each line of this process's rollouts in the step."""
    # The first rows of the update are the rollouts themselves.
    rows = zip(
        state.trained_trajectories,
        state.credit,
        scored.logprobs[: len(state.trained_trajectories)].tolist(),
        strict=True,
    )
    return [build_line_credit(t, *credit, logprobs[: len(t.completion_ids)]) for t, credit, logprobs in rows]


def compute_outcome_rewards(trajectory: Sequence[Trajectory], **_: object) -> list[float | None]:
    """Return the outcome of each rollout, as TRL's reward function; None leaves a rollout out of every baseline."""
    return [t.outcome if t.trainable else None for t in trajectory]


class Scoring(Enum):
    """Purpose of a call for log probabilities. TRL makes all of them through one method."""

    ROLLOUTS = auto()
    """New rollouts under the trained policy."""
    REFERENCE = auto()
    """The same rollouts under the reference model."""
    LOSS = auto()
    """Rows of the current loss under the trained policy."""


MakeScorerFn = Callable[
    [PreTrainedModel, PreTrainedModel | None, Callable[[], AbstractContextManager[None]]], LogprobScorer
]
"""Function from policy, reference model and autocast to a scorer."""


@dataclass(frozen=True, slots=True)
class TrainerComponents:
    """Components of the trainer, apart from policy, rollouts and credit."""

    weights_folder: Path
    """Existing folder through which weights travel to the rollout source. All processes read the main one's."""
    logprob_tolerance: float
    """Largest allowed difference of one log probability between sampler and trainer, nats."""
    importance_sampling: str = "token_truncate"
    """Value of `TrainerConfig.importance_sampling`. TRL's configuration holds the correction itself."""
    make_scorer: MakeScorerFn | None = LogprobScorer
    """Function that creates the scorer of log probabilities from policy, reference model (None without a KL penalty)
    and autocast. Its scores equal TRL's up to rounding. None means TRL's own pass, bit for bit."""
    make_group_sampler: "Callable[[ReplGRPOTrainer], GroupSampler] | None" = None
    """Function that creates the group sampler. None means `make_plain_group_sampler`."""


def make_plain_group_sampler(trainer: "ReplGRPOTrainer") -> GroupSampler:
    """Return a group sampler that waits for the rollouts of each step."""
    return GroupSampler(trainer.source, trainer.num_generations, trainer.accelerator)


@keeps_old_names
class ReplGRPOTrainer(GRPOTrainer):
    """GRPO on trajectories of a live console.

    The dataset is a list of task ids; TRL groups and shuffles them, and never encodes them.
    """

    checkpoint_manager: CheckpointManager | None = None
    """Checkpoint manager. None means that the run is not saved."""
    task_sampler: TaskSampler
    """Order of the tasks. Its random generator continues from epoch to epoch."""
    train_batch: TrainBatch
    """Rollouts of the current step, unset before the first step."""
    scored_batch: ScoredBatch
    """Log probabilities of the current step's rollouts, and their mismatch between trainer and sampler."""
    _scoring = Scoring.ROLLOUTS
    """Purpose of TRL's next call for log probabilities."""
    _loss_rows: Tensor
    """Indices of the rows of `TrainBatch.rows` that the current loss uses."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task_ids: Sequence[str],
        source: RolloutSource,
        args: GRPOConfig,
        credit: CreditConfig,
        components: TrainerComponents,
    ) -> None:
        """
        Args:
            model: policy to train. From now on, it gives probability 0 to ids that `source` never samples. If
                `args.beta` is not 0, its initial weights, without adapters, are the reference model.
            tokenizer: tokenizer of the policy.
            task_ids: tasks to train on.
            source: rollout source.
            args: TRL's configuration.
            credit: estimator and rewards.
            components: weight sync, scoring and group sampling.

        Raises:
            ConfigError: `validate_trl_options` refuses an option of `args`, `task_ids` has too few tasks, `model`
                cannot forbid an id, or `source` cannot do what the group sampler needs.
        """
        fast = components.make_scorer is not None
        validate_trl_options(args, fast)
        validate_task_count(task_ids, args)
        # With a KL penalty, TRL would load a reference model from the folder that the model names.
        beta, args.beta = args.beta, 0.0
        super().__init__(
            model=model,
            reward_funcs=[compute_outcome_rewards],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": list(task_ids)}),
            processing_class=tokenizer,
            rollout_func=self._collect_rollouts,
        )
        self.beta = args.beta = beta
        if fast and self.aux_loss_enabled:
            raise ConfigError(
                "router_aux_loss_coef", self.router_aux_loss_coef, "set it to 0, or fast_logprobs = false"
            )
        self.source = source
        self.credit = credit
        self.components = components
        self._importance_sampling, _ = parse_importance(components.importance_sampling)
        make_group_sampler = components.make_group_sampler or make_plain_group_sampler
        self.group_sampler = make_group_sampler(self)
        # Change the model in place before it is copied: the reference model needs the same ids.
        base_model = self.accelerator.unwrap_model(self.model)
        base_model = base_model.get_base_model() if is_peft_model(base_model) else base_model
        forbid_ids(base_model, source.forbidden_ids)
        # With adapters no copy is needed: the reference is the model with its adapters disabled.
        if beta and base_model is self.model:
            self.ref_model = copy_frozen(base_model, self.accelerator)
        self._scorer: LogprobScorer | None = None
        if components.make_scorer is not None:
            self._scorer = components.make_scorer(base_model, self.ref_model, self.accelerator.autocast)
        # From here on TRL treats the rollout source as its vLLM: it syncs weights to it before each step's rollouts,
        # and corrects for the logprob mismatch.
        self.use_vllm = True
        alternate = self.group_sampler.samples_during_update
        self.vllm_generation = WeightSync(self, source, components.weights_folder, alternate=alternate)
        self._last_loaded_step = -1
        self.rollout_s = 0.0
        """Wall clock time of all rollouts so far."""

    @property
    def steps_done(self) -> int:
        """Number of finished steps; each takes `optimizer_steps_per_step` optimizer steps."""
        done: int = self.state.global_step // self.optimizer_steps_per_step
        return done

    @property
    def optimizer_steps_per_step(self) -> int:
        """Optimizer steps per batch of rollouts."""
        passes: int = self.args.steps_per_generation * self.num_iterations // self.args.gradient_accumulation_steps
        return max(1, passes)

    @property
    def stateful_callbacks(self) -> list[object]:
        """Callbacks whose states transformers writes into its checkpoints."""
        return [
            callback
            for callback in (*self.callback_handler.callbacks, self.control)
            if isinstance(callback, ExportableState)
        ]

    def iterate_upcoming_task_ids(self) -> Iterator[list[str]]:
        """Yield the task ids of this process's rollouts, for the current step and each later one."""
        for rows in self.task_sampler.iterate_upcoming(self.steps_done):
            yield [self.train_dataset[row]["prompt"] for row in rows]

    def sync_weights(self) -> None:
        """Load the current weights into the rollout source, which does not load them again before they change."""
        self.vllm_generation.sync_weights()
        # TRL skips a sync for the step in this field.
        self._last_loaded_step = self.state.global_step

    def _send_telemetry(self) -> None:
        """Disable TRL's telemetry."""

    def _collect_rollouts(self, task_ids: list[str], _: GRPOTrainer) -> dict[str, object]:
        """Collect the rollouts of a step, and return them as TRL's rollout hook expects."""
        start = time.perf_counter()
        step = self.state.global_step
        trajectories = self.group_sampler.collect(task_ids, step)
        self.rollout_s += time.perf_counter() - start
        policy = self.credit.stop_policy
        trained = trajectories if policy is None else tuple(map(policy.apply, trajectories))
        self.train_batch = self._build_train_batch(trajectories, trained)
        rows = build_token_columns(self.train_batch.rows, self._tokenizer.pad_token_id)
        return {
            "prompt_ids": rows.prompt_ids,
            "completion_ids": rows.completion_ids,
            "logprobs": rows.logprobs,
            "env_mask": rows.mask,
            "trajectory": list(trained),
        }

    def _build_train_batch(self, trajectories: tuple[Trajectory, ...], trained: tuple[Trajectory, ...]) -> TrainBatch:
        """Return this process's rollouts with their credit.

        TRL spreads a group over processes, so the rewards of all rollouts are gathered before any baseline is computed.
        """
        entries: list[GroupEntry] = gather_object([build_group_entry(t, self.credit) for t in trained])
        size = self.num_generations
        # TRL repeats each task, so consecutive rollouts form a group.
        groups = [Group(tuple(entries[start : start + size])) for start in range(0, len(entries), size)]
        advantages = [compute_group_advantages(group, self.credit) for group in groups]
        metrics = {
            **compute_credit_metrics(entries, self.credit),
            **compute_length_metrics(groups, advantages),
            **self.group_sampler.metrics,
            **self.group_sampler.record_outcomes(entries),
        }
        # Keep this process's part, and give rollouts that are not trained on an advantage of 0.
        first_index = self.accelerator.process_index * len(trained)
        local = slice(first_index, first_index + len(trained))
        local_advantages = [row for rows in advantages for row in rows][local]
        trained_advantages = [
            row if t.trainable else (0.0,) * len(t.lines) for row, t in zip(local_advantages, trained, strict=True)
        ]
        # Add rows for children and alternatives, then idle rows, so that all processes have the same number.
        rows: Sequence[Trajectory] = trained
        advantages_B_L: Sequence[Sequence[float]] = trained_advantages
        if any(t.children or any(line.alternatives for line in t.lines) for t in trained):
            rows, advantages_B_L = add_child_rows(rows, advantages_B_L)
        if (count := self._count_padded_rows(len(rows))) > len(rows):
            rows, advantages_B_L = pad_with_idle_rows(rows, advantages_B_L, count)
        width = max(len(t.completion_ids) if t.trainable else 1 for t in rows)
        return TrainBatch(
            trajectories,
            trained,
            tuple(rows),
            broadcast_to_tokens(advantages_B_L, rows, width).to(self.accelerator.device),
            tuple(zip([e.rewards.rewards_L for e in entries[local]], local_advantages, strict=True)),
            metrics,
            compute_mean_parts([e.reward_sums for e in entries if e.rewards.lines]),
        )

    def _count_padded_rows(self, row_count: int) -> int:
        """Return the rows per process: the largest count of any process, rounded up to a multiple of TRL's batches."""
        counts: list[int] = gather_object([row_count])
        parts: int = self.args.steps_per_generation
        return -(-max(counts) // parts) * parts

    def _generate(self, prompts: list[str]) -> tuple[object, ...]:
        """Generate as TRL does, and correct its metrics of truncated completions.

        TRL guesses truncation from the last id, while our rollouts record their stop.
        """
        result: tuple[object, ...] = super()._generate(prompts)
        metrics = self._metrics["train" if self.model.training else "eval"]
        ends = gather_object(list_ends(self.train_batch.trajectories))
        for name, value in compute_length_metrics_for_trl(ends).items():
            metrics[f"completions/{name}"][-1] = value
        return result

    def _generate_and_score_completions(self, inputs: list[dict[str, object]]) -> dict[str, Tensor]:
        """Return TRL's batch with our `advantages` of shape (B, T) in place of TRL's of shape (B,).

        Raises:
            WeightSyncError: log probabilities of sampler and trainer differ by more than `logprob_tolerance`.
        """
        # `super()` computes log probabilities of the policy first, then those of the reference model.
        self._scoring = Scoring.ROLLOUTS
        batch: dict[str, Tensor] = super()._generate_and_score_completions(inputs)
        self.scored_batch = self._build_scored_batch(batch)
        self.scored_batch.mismatch.check_tolerance(self.components.logprob_tolerance, self.state.global_step)
        batch["advantages"] = self.train_batch.advantages
        # TRL shuffles and splits the batch, so each row keeps its number in the step.
        batch["rows"] = torch.arange(len(self.train_batch.rows), device=batch["advantages"].device)
        return batch

    def _build_scored_batch(self, batch: dict[str, Tensor]) -> ScoredBatch:
        """Measure logprob mismatch and staleness of a step, and correct the importance sampling ratios in `batch`.

        Raises:
            WeightSyncError: the policy that sampled a line is too old, or later than the trainer's.
        """
        rows, step = self.train_batch.rows, self.state.global_step
        width = batch["completion_ids"].size(1)
        ages = compute_token_staleness(
            rows, width, step, self.group_sampler.max_staleness * self.optimizer_steps_per_step
        )
        mismatch = apply_importance_correction(batch, rows, ages, self._importance_sampling, self.accelerator)
        metrics = self._scorer.metrics(self.accelerator) if self._scorer is not None else {}
        synced = SyncedStep(self.train_batch.trained_trajectories, ages, step, self, mismatch)
        mismatch, staleness = self.group_sampler.check_sync(synced)
        return ScoredBatch(mismatch, batch["old_per_token_logps"].float().cpu(), {**metrics, **staleness})

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Compute TRL's loss on its rows of the step."""
        self._scoring, self._loss_rows = Scoring.LOSS, inputs["rows"]
        loss: Tensor = super()._compute_loss(model, inputs)
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        **options: object,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute log probabilities and entropies, with `fast_logprobs` only those of sampled tokens.

        With `fast_logprobs`, the values of all other tokens are 0.
        """
        if self._scorer is None:
            result: tuple[Tensor, Tensor | None, Tensor | None] = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **options
            )
            return result
        advantages = self.train_batch.advantages
        sampled = (build_line_numbers(self.train_batch.rows, advantages.size(1)) >= 0).to(input_ids.device)
        # With a KL penalty the loss depends on every sampled token, even on those without an advantage.
        batch = ScoringBatch(input_ids, attention_mask, sampled, (sampled if self.beta else advantages).any(dim=1))
        if self._scoring is Scoring.REFERENCE:
            return self._scorer.score_reference(self.ref_model or self.model_wrapped, batch), None, None
        if self._scoring is Scoring.LOSS:
            scores = self._scorer.rescore(model, batch, self._loss_rows, with_graph=self._needs_single_pass)
        else:
            self._scoring = Scoring.REFERENCE
            scores = self._scorer.score_step(self.model_wrapped, batch, keep_graph=self._needs_single_pass)
        return scores.logprobs, scores.entropies, None

    @property
    def _needs_single_pass(self) -> bool:
        """True if the only loss of a step reuses the first scoring, which must therefore keep its autograd graph."""
        is_single_batch = self.args.steps_per_generation * self.num_iterations == 1
        return is_single_batch and not self.args.gradient_checkpointing

    def attach_checkpoints(
        self, manager: CheckpointManager, parts: Mapping[str, object], warn: Callable[[str], None]
    ) -> None:
        """Attach a checkpoint manager: it saves the trainer with all stateful `parts`, and restores a resumed run.

        Under FSDP, the main process saves whole weights. Under DeepSpeed, nothing is saved and a warning is reported,
        because each process has only a part of the weights.

        Raises:
            ConfigError: as `CheckpointManager.attach_trainer`.
        """
        if self.is_deepspeed_enabled:
            warn("no states are saved, so the run cannot be resumed: each process has only a part of the weights")
            return
        manager.attach_trainer(self, parts)
        self.checkpoint_manager = manager
        self.add_callback(CheckpointCallback(manager, self))

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator as transformers does, with FSDP if it is requested."""
        super().create_accelerator_and_postprocess()
        enable_fsdp(self.accelerator)
        self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    def _prepare_for_training(self, *args: object, **kwargs: object) -> object:
        """Prepare the model as transformers does, and check that FSDP has sharded it.

        Raises:
            ConfigError: FSDP is requested, and the model is not sharded.
        """
        prepared: object = super()._prepare_for_training(*args, **kwargs)
        # FSDP needs at least two processes.
        if self.accelerator.num_processes > 1:
            check_model_sharded(self.model)
        return prepared

    def _get_train_sampler(self, dataset: object = None) -> TaskSampler:
        self.task_sampler = TaskSampler.from_sampler(super()._get_train_sampler(dataset))
        return self.task_sampler

    def _maybe_log_save_evaluate(self, *args: object, **kwargs: object) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.checkpoint_manager is not None:
            self.checkpoint_manager.on_step_end(self)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as TRL does, with a one-line error if the system refuses the write.

        Raises:
            ConfigError: the model cannot be written.
        """
        with catch_os_errors("folder", Path(output_dir or self.args.output_dir), "the model", ", then --resume"):
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, *args: object, **kwargs: object) -> None:
        with catch_os_errors("folder", Path(self.args.output_dir), "a checkpoint", ", then --resume"):
            super()._save_checkpoint(*args, **kwargs)

    def _load_from_checkpoint(self, folder: str, model: object = None) -> None:
        assert self.checkpoint_manager is not None
        self.checkpoint_manager.load_model_state(self)

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        if folder is not None and self.checkpoint_manager is not None:
            self.checkpoint_manager.load_optimizer_state(self)

    def _load_rng_state(self, folder: str | None) -> None:
        if folder is not None and self.checkpoint_manager is not None:
            self.checkpoint_manager.load_rng_state(self)

    def train_or_resume(self) -> None:
        """Train to the end, from the beginning or from the state of the checkpoint manager.

        Raises:
            ConfigError: a state could not be written.
        """
        manager = self.checkpoint_manager
        if manager is None:
            self.train()
            return
        state = manager.state
        try:
            # The saved run has finished training, so only its weights are loaded.
            if state is not None and state.policy_step >= self.args.max_steps:
                manager.load_model_state(self)
                return
            self.train(resume_from_checkpoint=None if state is None else str(state.folder))
            manager.wait()
        except BaseException:
            manager.save_on_exit(self)
            raise
