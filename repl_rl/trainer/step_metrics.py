"""Metrics of each step: a report to the caller and to the trackers."""

import json
import time
from collections.abc import Sequence

from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from repl_rl.credit.credited_trajectory import LineCredit
from repl_rl.credit.stop_policy import StopPolicy
from repl_rl.trainer.grpo import ReplGRPOTrainer, compute_line_credits
from repl_rl.trainer.plugins.periodic_evaluation import PeriodicEvaluator
from repl_rl.trainer.plugins.trackers import PREFIX, Trackers
from repl_rl.trainer.rollout_source import HasMetrics, OnStep, StepRecord
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.trajectory.trajectory_metrics import (
    NamedMetrics,
    compute_error_rates,
    compute_outcome_parts,
    compute_trajectory_metrics,
)


class StepReporter(TrainerCallback):
    """Callback that makes a `StepRecord` of TRL's log per step, and adds its metrics to the log for the trackers."""

    def __init__(
        self, trainer: ReplGRPOTrainer, on_step: OnStep, trackers: Trackers, evaluator: PeriodicEvaluator | None = None
    ) -> None:
        self.trainer = trainer
        self.evaluator = evaluator
        self.on_step = on_step
        self.trackers = trackers
        self._step_start = (0.0, 0.0, 0.0)
        self._busy_s = 0.0
        self._first_line_tokens = 0.0
        self._series = NamedMetrics()

    def state_dict(self) -> str:
        """Return the first mean line length and the names of metric series so far, as JSON."""
        return json.dumps({"first_line_tokens": self._first_line_tokens, "series": self._series.state_dict()})

    def load_state_dict(self, memory: str) -> None:
        """Restore the state that `state_dict` returned."""
        state = json.loads(memory)
        # Older checkpoints hold the line length alone.
        if not isinstance(state, dict):
            state = {"first_line_tokens": state, "series": NamedMetrics().state_dict()}
        self._first_line_tokens = state["first_line_tokens"]
        self._series.load_state_dict(state["series"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._step_start = self._read_clocks()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        # TRL's summary at the end of training has no loss.
        if logs is None or "loss" not in logs:
            return
        clocks = self._read_clocks()
        wall_s, rollout_s, sync_s = (now - before for now, before in zip(clocks, self._step_start, strict=True))
        # Each process has a part of the step; the record covers all of it.
        trajectories: list[Trajectory] = gather_object(list(self.trainer.train_batch.trajectories))
        credit: list[tuple[LineCredit, ...]] = gather_object(
            compute_line_credits(self.trainer.train_batch, self.trainer.scored_batch)
        )
        # The update has the time that rollouts and weight sync leave.
        metrics = {
            "loss": logs["loss"],
            "grad_norm": logs["grad_norm"],
            "learning_rate": logs["learning_rate"],
            "entropy": logs["entropy"],
            "clip_share": logs.get("clip_ratio/region_mean", 0.0),
            "zero_variance_groups": logs["frac_reward_zero_std"],
            "optimizer_steps": float(state.global_step),
            **({"kl": logs["kl"]} if "kl" in logs else {}),
            "rollout_s": rollout_s,
            "sync_s": sync_s,
            "update_s": wall_s - rollout_s - sync_s,
            **self._compute_idle_shares(wall_s, rollout_s + sync_s),
            **self._compute_rollout_metrics(trajectories),
        }
        if self.evaluator is not None:
            metrics |= self.evaluator.evaluate_if_due(self.trainer.steps_done)
        # One process reports for all.
        if state.is_world_process_zero:
            record = StepRecord(self.trainer.steps_done, metrics, tuple(credit))
            self.on_step(record, trajectories)
            self.trackers.log_table(record, trajectories, state.global_step)
        logs.update({f"{PREFIX}{name}": value for name, value in metrics.items()})
        # The clock of the next step starts after the caller's work and the evaluation. The weight sync of an evaluation
        # counts for the next step, which does not repeat it.
        now_s, _, synced_s = self._read_clocks()
        self._step_start = now_s - (synced_s - clocks[2]), *clocks[1:]
        self._busy_s = self._get_busy_s()

    def _read_clocks(self) -> tuple[float, float, float]:
        """Return the current time, and the total times of rollouts and weight syncs so far, seconds."""
        return time.perf_counter(), self.trainer.rollout_s, self.trainer.vllm_generation.elapsed_s

    def _get_busy_s(self) -> float:
        """Return the seconds in which async rollouts ran so far, or 0 without them."""
        return self.trainer.group_sampler.busy_s

    def _compute_idle_shares(self, wall_s: float, waited_s: float) -> dict[str, float]:
        """Return the idle shares of trainer and sampler in the step; empty without async rollouts."""
        if not self.trainer.group_sampler.samples_during_update:
            return {}
        sampling_share = (self._get_busy_s() - self._busy_s) / wall_s
        return {"trainer_idle": waited_s / wall_s, "sampler_idle": min(max(1 - sampling_share, 0.0), 1.0)}

    def _compute_rollout_metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the metrics of a step's rollouts over all processes."""
        metrics = compute_trajectory_metrics(trajectories)
        return {
            **self.trainer.scored_batch.mismatch.metrics(),
            **self.trainer.scored_batch.metrics,
            **self.trainer.train_batch.metrics,
            **(self.trainer.credit.stop_policy or StopPolicy()).compute_rates(trajectories),
            **metrics,
            "line_tokens_drift": self._compute_line_length_drift(metrics["line_tokens_mean"]),
            **self._compute_named_metrics(trajectories),
        }

    def _compute_named_metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return metrics per name of a reward or an error, and the metrics of the rollout source."""
        source = self.trainer.source
        return {
            **self._series.compute("outcome", compute_outcome_parts(trajectories)),
            **self._series.compute("reward", self.trainer.train_batch.line_reward_sums),
            **self._series.compute("error", compute_error_rates(trajectories)),
            **(source.metrics(trajectories) if isinstance(source, HasMetrics) else {}),
        }

    def _compute_line_length_drift(self, line_tokens: float) -> float:
        """Return the relative growth of the mean line length since the first step that had lines."""
        self._first_line_tokens = self._first_line_tokens or line_tokens
        return line_tokens / self._first_line_tokens - 1 if self._first_line_tokens else 0.0
