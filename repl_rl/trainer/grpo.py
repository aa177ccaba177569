"""TRL's GRPO trainer with our rollouts, one advantage a token, and a check after each weight sync.

What is TRL's stays TRL's: the loop, the loss, the importance-sampling correction, the optimizer. Each override calls
`super()` and then changes only what it names.
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
from repl_rl.trainer.config import GRPOConfig, GRPOTrainer, refuse_few, refuse_unfit
from repl_rl.trainer.correction import Ages, ages_of, corrected
from repl_rl.trainer.fast import Batch, FastPass
from repl_rl.trainer.groups import Groups
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

    The dataset is a list of task ids; TRL groups and shuffles them, and never encodes them. `weights` is an existing
    folder through which weights travel to `source`, on every process from the main one's. With `fast`, log
    probabilities come from `scoring` (equal to TRL's up to rounding); without, from TRL's own pass (equal bit for bit).
    The ids that `source` never samples have probability 0 here too: `model` gives them that from now on.
    `importance` is a value of `TrainerConfig.importance`; those of tokens are left to `args`. A `curriculum` of these
    tasks chooses those of each step in TRL's place. With `args.beta`, the reference is `model` as it is given, without
    its adapters if it has some. `plan` says which groups are played: see `Groups`. With `sharing`, the fast pass scores
    what rollouts begin with alike once. The rollouts of `ahead` later steps go on while the policy is updated: see
    `GroupsAhead`.

    Raises:
        ConfigError: `args` holds an option of TRL that does not work with one advantage a token, there are fewer
            tasks than a step takes, `model` cannot forbid an id, or `source` cannot play ahead.
    """

    step_state: StepState
    """The rollouts of the step at hand. There are none before the first one's."""
    scored: Scored
    """What the trainer makes of them."""
    _rows: Tensor | None = None
    """Rows of the step that the loss at hand is about; None: TRL scores the rollouts that have just come in."""
    _unscored = True
    """True until the policy has scored them: whom TRL asks after it is the reference."""

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
        refuse_unfit(args, fast)
        refuse_few(task_ids, args)
        beta, args.beta = args.beta, 0.0  # TRL would read a reference from the folder that the model names
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
        bare = self.accelerator.unwrap_model(self.model)
        bare = bare.get_base_model() if is_peft_model(bare) else bare
        forbid(bare, source.forbidden_ids)
        self.sharing = sharing if fast else None
        if self.sharing is not None:
            self.sharing.install(bare)  # so that its copy has it too
        if beta and bare is self.model:
            self.ref_model = frozen(bare, self.accelerator)
        autocast = self.accelerator.autocast
        self._fast = FastPass(bare, self.ref_model, autocast, sharing=self.sharing) if fast else None
        # From here on TRL takes our engine for its vLLM: it syncs where it syncs, and corrects for the sampler.
        self.use_vllm = True
        self.vllm_generation = Sync(self, source, weights, by_turns=ahead > 0)
        self._last_loaded_step = -1
        self.rollout_s = 0.0
        """Wall clock of all rollouts so far."""

    def _upcoming(self) -> Iterator[list[str]]:
        """Task ids of this process's rollouts, of the step at hand and of each that follows."""
        for rows in self.order.upcoming(self.steps_done):
            yield [self.train_dataset[row]["prompt"] for row in rows]

    def sync(self) -> None:
        """Give the rollout source the weights of now; it does not get them again before they change."""
        self.vllm_generation.sync_weights()
        self._last_loaded_step = self.state.global_step

    def _send_telemetry(self) -> None:
        """Nothing is reported to anybody."""

    def _rollout(self, task_ids: list[str], _: GRPOTrainer) -> dict[str, object]:
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
        """This process's rollouts with their credit.

        TRL spreads a group over processes, so what each rollout earned is gathered before any baseline is formed.
        """
        earned: list[Earned] = gather_object([earned_by(t, self.credit) for t in learned])
        size = self.num_generations
        groups = [Group(tuple(earned[start : start + size])) for start in range(0, len(earned), size)]
        advantages = [group_advantages(group, self.credit, self.steps_done) for group in groups]
        metrics = {**earned_metrics(earned, self.credit), **length_metrics(groups, advantages), **self.groups.metrics}
        if self.curriculum is not None:
            metrics["level_mean"] = self.curriculum.levels(e.task_id for e in earned)
            self.curriculum.record((e.task_id, float(e.solved)) for e in earned if e.earnings.outcome is not None)
        first = self.accelerator.process_index * len(learned)
        here = slice(first, first + len(learned))
        mine = [row for rows in advantages for row in rows][here]
        values = [row if t.trainable else (0.0,) * len(t.lines) for row, t in zip(mine, learned, strict=True)]
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
        """Rows that every process has: those of the one with the most, in as many parts as TRL cuts them into."""
        counts: list[int] = gather_object([mine])
        parts: int = self.args.steps_per_generation
        return -(-max(counts) // parts) * parts

    def _generate(self, prompts: list[str]) -> tuple[object, ...]:
        """As TRL's; its metrics of cut completions then tell the recorded stops, where TRL guesses from the last id."""
        result: tuple[object, ...] = super()._generate(prompts)
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in told_of_ends(gather_object(ends_of(self.step_state.trajectories))).items():
            metrics[f"completions/{name}"][-1] = value
        return result

    def _generate_and_score_completions(self, inputs: list[dict[str, object]]) -> dict[str, Tensor]:
        """As TRL's, with the `advantages` of shape (B,) replaced by ours of shape (B, T).

        Raises:
            WeightSyncError: the sampler's log probabilities are not the trainer's.
        """
        self._unscored = True
        batch: dict[str, Tensor] = super()._generate_and_score_completions(inputs)
        self.scored = self._scored(batch)
        self.scored.gap.check(self.tolerance, self.state.global_step)
        batch["advantages"] = self.step_state.advantages
        batch["rows"] = torch.arange(len(self.step_state.rows), device=batch["advantages"].device)
        return batch

    def _scored(self, batch: dict[str, Tensor]) -> Scored:
        """What the trainer makes of the rollouts of a step, whose ratios are those that are asked for from now on.

        Raises:
            WeightSyncError: a line was written by another policy than those that may have.
        """
        rows, step = self.step_state.rows, self.state.global_step
        width, cap = batch["completion_ids"].size(1), self.vllm_importance_sampling_clip_max
        ages = ages_of(rows, width, step, self.groups.oldest * self.optimizer_steps)
        gap = corrected(batch, rows, ages, self.importance, cap, self.accelerator)
        told = self.sharing.metrics(self.accelerator) if self.sharing is not None else {}
        if self.ahead:
            told |= Ages.of(ages, self.optimizer_steps).metrics()
            gap = gap if gap.tokens else probed(self, gap, self.source, self.step_state.learned, step)
        return Scored(gap, batch["old_per_token_logps"].float().cpu(), told)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """As TRL's; while it runs, `_rows` says which rows of the step it is about."""
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
        """As TRL's without `fast`; with it, only sampled tokens are scored and the others are 0."""
        if self._fast is None:
            result: tuple[Tensor, Tensor | None, Tensor | None] = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **options
            )
            return result
        advantages = self.step_state.advantages
        sampled = (line_numbers(self.step_state.rows, advantages.size(1)) >= 0).to(input_ids.device)
        # Every sampled token is held to the reference, also where there is no advantage.
        batch = Batch(input_ids, attention_mask, sampled, (sampled if self.beta else advantages).any(dim=1))
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
        """True when the first scoring of a step serves its only loss: then it keeps its graph for it."""
        only = self.args.steps_per_generation * self.num_iterations == 1
        return only and not self.args.gradient_checkpointing
