"""Report of each step to the caller and to the trackers."""

import json
import time
from collections.abc import Sequence

from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from repl_rl.credit.credited import LineCredit
from repl_rl.record.metrics import describe
from repl_rl.record.series import Series, error_classes, outcome_parts
from repl_rl.record.trajectory import Trajectory
from repl_rl.trainer.evaluations import Evaluator
from repl_rl.trainer.grpo import ReplGRPOTrainer
from repl_rl.trainer.sinks import PREFIX, Sinks
from repl_rl.trainer.source import AheadSource, Counting, OnStep, StepRecord
from repl_rl.trainer.step import line_credits


class Reporter(TrainerCallback):
    """Callback that makes a `StepRecord` of TRL's log per step, and adds its metrics to the log for the trackers."""

    def __init__(
        self, trainer: ReplGRPOTrainer, on_step: OnStep, sinks: Sinks, evaluator: Evaluator | None = None
    ) -> None:
        self.trainer = trainer
        self.evaluator = evaluator
        self.on_step = on_step
        self.sinks = sinks
        self._mark = (0.0, 0.0, 0.0)
        self._busy_s = 0.0
        self._first_line_tokens = 0.0
        self._series = Series()

    def _named(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return metrics per name of a reward or an error, and the metrics of the rollout source."""
        source = self.trainer.source
        return {
            **self._series.figures("outcome", outcome_parts(trajectories)),
            **self._series.figures("reward", self.trainer.step_state.named),
            **self._series.figures("error", error_classes(trajectories)),
            **(source.metrics(trajectories) if isinstance(source, Counting) else {}),
        }

    def memory(self) -> str:
        """Return the first mean line length and the names of metric series so far, as JSON."""
        return json.dumps({"first_line_tokens": self._first_line_tokens, "series": self._series.memory()})

    def remember(self, memory: str) -> None:
        """Restore the state that `memory` returned."""
        told = json.loads(memory)
        # Older checkpoints hold the line length alone.
        if not isinstance(told, dict):
            told = {"first_line_tokens": told, "series": Series().memory()}
        self._first_line_tokens = told["first_line_tokens"]
        self._series.remember(told["series"])

    def _drift(self, line_tokens: float) -> float:
        """Return the relative growth of the mean line length since the first step that had lines."""
        self._first_line_tokens = self._first_line_tokens or line_tokens
        return line_tokens / self._first_line_tokens - 1 if self._first_line_tokens else 0.0

    def _clocks(self) -> tuple[float, float, float]:
        return time.perf_counter(), self.trainer.rollout_s, self.trainer.vllm_generation.elapsed_s

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._mark = self._clocks()

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
        clocks = self._clocks()
        wall_s, rollout_s, sync_s = (now - then for now, then in zip(clocks, self._mark, strict=True))
        # Each process has a part of the step; the record covers all of it.
        trajectories: list[Trajectory] = gather_object(list(self.trainer.step_state.trajectories))
        credit: list[tuple[LineCredit, ...]] = gather_object(line_credits(self.trainer.step_state, self.trainer.scored))
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
            **self._idle(wall_s, rollout_s + sync_s),
            **self._told(trajectories),
        }
        if self.evaluator is not None:
            metrics |= self.evaluator.after(self.trainer.steps_done)
        if state.is_world_process_zero:
            record = StepRecord(self.trainer.steps_done, metrics, tuple(credit))
            self.on_step(record, trajectories)
            self.sinks.send_table(record, trajectories, state.global_step)
        logs.update({f"{PREFIX}{name}": value for name, value in metrics.items()})
        # The clock of the next step starts after the caller's work and the evaluation. The weight sync of an evaluation
        # counts for the next step, which does not repeat it.
        now_s, _, synced_s = self._clocks()
        self._mark = now_s - (synced_s - clocks[2]), *clocks[1:]
        self._busy_s = self._sampled_s()

    def _sampled_s(self) -> float:
        """Return the seconds in which async rollouts ran so far, or 0 without them."""
        source = self.trainer.source
        return source.busy_s if self.trainer.ahead and isinstance(source, AheadSource) else 0.0

    def _idle(self, wall_s: float, waited_s: float) -> dict[str, float]:
        """Return the idle shares of trainer and sampler in the step; empty without async rollouts."""
        if not self.trainer.ahead:
            return {}
        sampled = (self._sampled_s() - self._busy_s) / wall_s
        return {"trainer_idle": waited_s / wall_s, "sampler_idle": min(max(1 - sampled, 0.0), 1.0)}

    def _told(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the metrics of a step's rollouts over all processes."""
        described = describe(trajectories)
        return {
            **self.trainer.scored.gap.metrics(),
            **self.trainer.scored.metrics,
            **self.trainer.step_state.metrics,
            **self.trainer.credit.stops.rates(trajectories),
            **described,
            "line_tokens_drift": self._drift(described["line_tokens_mean"]),
            **self._named(trajectories),
        }
