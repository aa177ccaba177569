"""TRL's GRPO trainer with our rollouts, one advantage per token, and a check after each weight sync.

TRL keeps the loop, the loss, the importance sampling correction and the optimizer. An override calls `super()` and then
changes only the part that it names; without `super()`, it replaces that part.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from repl_rl.credit.children import filled, with_children
from repl_rl.credit.figures import earned_metrics, length_metrics
from repl_rl.credit.group import Credit, Earned, earned_by, group_advantages
from repl_rl.credit.stops import ends_of, told_of_ends
from repl_rl.credit.tensors import columns, line_numbers, widen
from repl_rl.engine.forbidden import forbid
from repl_rl.errors import ConfigError
from repl_rl.record.group import Group
from repl_rl.record.series import mean_parts
from repl_rl.record.trajectory import Trajectory
from repl_rl.tasks import Curriculum
from repl_rl.trainer import apart, choices
from repl_rl.trainer.ahead import GroupsAhead
from repl_rl.trainer.correction import Ages, ages_of, corrected
from repl_rl.trainer.fast import Batch, FastPass
from repl_rl.trainer.groups import Groups
from repl_rl.trainer.grpo_config import GRPOConfig, GRPOTrainer, refuse_few, refuse_unfit
from repl_rl.trainer.kept import KeptTrainer
from repl_rl.trainer.lead import Lead
from repl_rl.trainer.probing import probed
from repl_rl.trainer.reference import frozen
from repl_rl.trainer.sharing import Sharing
from repl_rl.trainer.source import RolloutSource
from repl_rl.trainer.step import Scored, StepState, outcome
from repl_rl.trainer.weights import Sync


class ReplGRPOTrainer(KeptTrainer):
    """GRPO on trajectories of a live console.

    The dataset is a list of task ids; TRL groups and shuffles them, and never encodes them.
    """

    step_state: StepState
    """Rollouts of the current step, unset before the first step."""
    scored: Scored
    """Log probabilities of these rollouts under the trainer's policy, and their mismatch."""
    _rows: Tensor | None = None
    """Rows of the step in the current loss. None means that TRL scores new rollouts."""
    _unscored = True
    """True until the policy's log probabilities of this step are computed; TRL's next call is for the reference
    model."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task_ids: Sequence[str],
        source: RolloutSource,
        args: GRPOConfig,
        credit: Credit,
        tolerance: float,
        weights: Path,
        fast: bool = True,
        importance: str = "token_truncate",
        curriculum: Curriculum | None = None,
        plan: choices.Plan | None = None,
        sharing: Sharing | None = None,
        ahead: int = 0,
    ) -> None:
        """
        Args:
            model: policy to train. Ids that `source` never samples get probability 0 in it, too, from now on. With
                `args.beta`, the model as given, without adapters, is the reference model.
            tokenizer: tokenizer of the policy.
            task_ids: tasks to train on.
            source: rollout source.
            args: TRL's configuration.
            credit: estimator and rewards.
            tolerance: largest allowed difference of one log probability between sampler and trainer, nats.
            weights: existing folder through which weights travel to `source`. All processes read the main one's.
            fast: log probabilities come from `scoring`, equal to TRL's up to rounding. False takes those of TRL's own
                pass, bit for bit.
            importance: value of `TrainerConfig.importance`. `args` holds the correction of ratios of tokens.
            curriculum: chooses the tasks of each step in place of TRL. None keeps TRL's order.
            plan: dynamic sampling or a FIFO window; see `Groups`. None samples each group once.
            sharing: prefix sharing: the fast pass scores the common beginning of rollouts once. None disables it.
            ahead: number of later steps whose rollouts run while the policy is updated; see `GroupsAhead`.

        Raises:
            ConfigError: `refuse_unfit` refuses an option of `args`, `task_ids` has too few tasks, `model` cannot forbid
                an id, or `source` has no async rollouts.
        """
        refuse_unfit(args, fast)
        refuse_few(task_ids, args)
        # With a KL penalty, TRL would load a reference model from the folder that the model names.
        beta, args.beta = args.beta, 0.0
        super().__init__(
            model=model,
            reward_funcs=[outcome],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": list(task_ids)}),
            processing_class=tokenizer,
            rollout_func=self._rollout,
        )
        self.beta = args.beta = beta
        if fast and self.aux_loss_enabled:
            raise ConfigError("router_aux_loss_coef", self.router_aux_loss_coef, "set it to 0, or fast = false")
        self.source = source
        self.credit = credit
        self.tolerance = tolerance
        self.importance, _ = apart.importance(importance)
        self.curriculum = curriculum
        self.ahead = ahead
        size, seed, steps = args.num_generations, args.seed, self.optimizer_steps
        self.groups = Groups(source, task_ids, size, self.accelerator, plan, curriculum, credit.stops, seed)
        if ahead:
            lead, coming = Lead(ahead, args.max_steps // steps), self._upcoming
            self.groups = GroupsAhead(source, size, self.accelerator, lead, steps, coming, curriculum, plan)
        # Change the model in place before it is copied: the reference model needs the same ids and attention.
        bare = self.accelerator.unwrap_model(self.model)
        bare = bare.get_base_model() if is_peft_model(bare) else bare
        forbid(bare, source.forbidden_ids)
        self.sharing = sharing if fast else None
        if self.sharing is not None:
            self.sharing.install(bare)
        # With adapters no copy is needed: the reference is the model with its adapters disabled.
        if beta and bare is self.model:
            self.ref_model = frozen(bare, self.accelerator)
        autocast = self.accelerator.autocast
        self._fast = FastPass(bare, self.ref_model, autocast, sharing=self.sharing) if fast else None
        # From here on TRL treats the rollout source as its vLLM: it syncs weights to it before each step's rollouts,
        # and corrects for the logprob mismatch.
        self.use_vllm = True
        self.vllm_generation = Sync(self, source, weights, by_turns=ahead > 0)
        self._last_loaded_step = -1
        self.rollout_s = 0.0
        """Wall clock time of all rollouts so far."""

    def _upcoming(self) -> Iterator[list[str]]:
        """Yield the task ids of this process's rollouts, for the current step and each later one."""
        for rows in self.order.upcoming(self.steps_done):
            yield [self.train_dataset[row]["prompt"] for row in rows]

    def sync(self) -> None:
        """Load the current weights into the rollout source, which does not load them again before they change."""
        self.vllm_generation.sync_weights()
        # TRL skips a sync for the step in this field.
        self._last_loaded_step = self.state.global_step

    def _send_telemetry(self) -> None:
        """Disable TRL's telemetry."""

    def _rollout(self, task_ids: list[str], _: GRPOTrainer) -> dict[str, object]:
        """Collect the rollouts of a step, and return them as TRL's rollout hook expects."""
        start = time.perf_counter()
        step = self.state.global_step
        trajectories = self.groups.play(task_ids, step)
        self.rollout_s += time.perf_counter() - start
        learned = tuple(map(self.credit.stops.learned, trajectories))
        self.step_state = self._credited(trajectories, learned)
        rows = columns(self.step_state.rows, self._tokenizer.pad_token_id)
        return {
            "prompt_ids": rows.prompt_ids,
            "completion_ids": rows.completion_ids,
            "logprobs": rows.logprobs,
            "env_mask": rows.mask,
            "trajectory": list(learned),
        }

    def _credited(self, trajectories: tuple[Trajectory, ...], learned: tuple[Trajectory, ...]) -> StepState:
        """Return this process's rollouts with their credit.

        TRL spreads a group over processes, so the rewards of all rollouts are gathered before any baseline is computed.
        """
        earned: list[Earned] = gather_object([earned_by(t, self.credit) for t in learned])
        size = self.num_generations
        groups = [Group(tuple(earned[start : start + size])) for start in range(0, len(earned), size)]
        advantages = [group_advantages(group, self.credit, self.steps_done) for group in groups]
        metrics = {**earned_metrics(earned, self.credit), **length_metrics(groups, advantages), **self.groups.metrics}
        if self.curriculum is not None:
            metrics["level_mean"] = self.curriculum.levels(e.task_id for e in earned)
            self.curriculum.record((e.task_id, float(e.solved)) for e in earned if e.earnings.outcome is not None)
        # Keep this process's part, and give rollouts that are not trained on an advantage of 0.
        first = self.accelerator.process_index * len(learned)
        here = slice(first, first + len(learned))
        mine = [row for rows in advantages for row in rows][here]
        values = [row if t.trainable else (0.0,) * len(t.lines) for row, t in zip(mine, learned, strict=True)]
        # Add rows for children and alternatives, then idle rows, so that all processes have the same number.
        rows, advantages_B_L = with_children(learned, values)
        rows, advantages_B_L = filled(rows, advantages_B_L, self._row_count(len(rows)))
        width = max(len(t.completion_ids) if t.trainable else 1 for t in rows)
        return StepState(
            trajectories,
            learned,
            tuple(rows),
            widen(advantages_B_L, rows, width).to(self.accelerator.device),
            tuple(zip([e.earnings.rewards_L for e in earned[here]], mine, strict=True)),
            metrics,
            mean_parts([e.named for e in earned if e.earnings.lines]),
        )

    def _row_count(self, mine: int) -> int:
        """Return the number of rows per process: the largest one of any process, rounded up to fill TRL's parts."""
        counts: list[int] = gather_object([mine])
        parts: int = self.args.steps_per_generation
        return -(-max(counts) // parts) * parts

    def _generate(self, prompts: list[str]) -> tuple[object, ...]:
        """Generate as TRL does, and correct its metrics of truncated completions.

        TRL guesses truncation from the last id, while our rollouts record their stop.
        """
        result: tuple[object, ...] = super()._generate(prompts)
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in told_of_ends(gather_object(ends_of(self.step_state.trajectories))).items():
            metrics[f"completions/{name}"][-1] = value
        return result

    def _generate_and_score_completions(self, inputs: list[dict[str, object]]) -> dict[str, Tensor]:
        """Return TRL's batch with our `advantages` of shape (B, T) in place of TRL's of shape (B,).

        Raises:
            WeightSyncError: log probabilities of sampler and trainer differ by more than `tolerance`.
        """
        # `super()` computes log probabilities of the policy first, then those of the reference model.
        self._unscored = True
        batch: dict[str, Tensor] = super()._generate_and_score_completions(inputs)
        self.scored = self._scored(batch)
        self.scored.gap.check(self.tolerance, self.state.global_step)
        batch["advantages"] = self.step_state.advantages
        # TRL shuffles and splits the batch, so each row keeps its number in the step.
        batch["rows"] = torch.arange(len(self.step_state.rows), device=batch["advantages"].device)
        return batch

    def _scored(self, batch: dict[str, Tensor]) -> Scored:
        """Measure logprob mismatch and staleness of a step, and correct the importance sampling ratios in `batch`.

        Raises:
            WeightSyncError: the policy that sampled a line is too old, or later than the trainer's.
        """
        rows, step = self.step_state.rows, self.state.global_step
        width, cap = batch["completion_ids"].size(1), self.vllm_importance_sampling_clip_max
        ages = ages_of(rows, width, step, self.groups.oldest * self.optimizer_steps)
        gap = corrected(batch, rows, ages, self.importance, cap, self.accelerator)
        told = self.sharing.metrics(self.accelerator) if self.sharing is not None else {}
        if self.ahead:
            told |= Ages.of(ages, self.optimizer_steps).metrics()
            # If all tokens of the step are stale, compare log probabilities of a new line instead.
            gap = gap if gap.tokens else probed(self, gap, self.source, self.step_state.learned, step)
        return Scored(gap, batch["old_per_token_logps"].float().cpu(), told)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Compute TRL's loss; while it runs, `_rows` holds its rows of the step."""
        self._rows = inputs["rows"]
        try:
            loss: Tensor = super()._compute_loss(model, inputs)
        finally:
            self._rows = None
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        **options: object,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute log probabilities and entropies: with `fast`, only those of sampled tokens; else as TRL does.

        With `fast`, the values of all other tokens are 0.
        """
        if self._fast is None:
            result: tuple[Tensor, Tensor | None, Tensor | None] = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **options
            )
            return result
        advantages = self.step_state.advantages
        sampled = (line_numbers(self.step_state.rows, advantages.size(1)) >= 0).to(input_ids.device)
        # With a KL penalty the loss depends on every sampled token, even on those without an advantage.
        batch = Batch(input_ids, attention_mask, sampled, (sampled if self.beta else advantages).any(dim=1))
        # TRL calls this for a loss, for the new rollouts, and then for the reference model.
        if self._rows is not None:
            scores = self._fast.again(model, batch, self._rows, with_graph=self._one_pass)
        elif self._unscored:
            self._unscored = False
            scores = self._fast.first(self.model_wrapped, batch, keep_graph=self._one_pass)
        else:
            return self._fast.reference(self.ref_model or self.model_wrapped, batch), None, None
        return scores.logprobs, scores.entropies, None

    @property
    def _one_pass(self) -> bool:
        """True if the first scoring of a step also serves its only loss, and so keeps its graph."""
        only = self.args.steps_per_generation * self.num_iterations == 1
        return only and not self.args.gradient_checkpointing
