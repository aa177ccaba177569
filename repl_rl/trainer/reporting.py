"""What is told of each step: to the caller, and to the sinks."""

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
    """Turns TRL's log of a step into a `StepRecord` and hands it on; its figures join the log, for the sinks."""

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
        """Figures by the names of rewards and errors, and those that the sampler counts."""
        source = self.trainer.source
        return {
            **self._series.figures("outcome", outcome_parts(trajectories)),
            **self._series.figures("reward", self.trainer.step_state.named),
            **self._series.figures("error", error_classes(trajectories)),
            **(source.metrics(trajectories) if isinstance(source, Counting) else {}),
        }

    def memory(self) -> str:
        """What its figures are compared with, and the names that they have, as JSON."""
        return json.dumps({"first_line_tokens": self._first_line_tokens, "series": self._series.memory()})

    def remember(self, memory: str) -> None:
        """Go on from what `memory` gave."""
        told = json.loads(memory)
        if not isinstance(told, dict):  # a state of before names were kept
            told = {"first_line_tokens": told, "series": Series().memory()}
        self._first_line_tokens = told["first_line_tokens"]
        self._series.remember(told["series"])

    def _drift(self, line_tokens: float) -> float:
        """Growth of the mean line since the first step that had lines, as a share of it."""
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
        if logs is None or "loss" not in logs:
            return
        clocks = self._clocks()
        wall_s, rollout_s, sync_s = (now - then for now, then in zip(clocks, self._mark, strict=True))
        # Each process has its part of the step; the record tells of the whole.
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
        # What the caller does with the record is not the next step's time, nor is an evaluation; the weights that the
        # latter was given are, since the next step does not give them again.
        now_s, _, synced_s = self._clocks()
        self._mark = now_s - (synced_s - clocks[2]), *clocks[1:]
        self._busy_s = self._sampled_s()

    def _sampled_s(self) -> float:
        """How long rollouts that run ahead were under way."""
        source = self.trainer.source
        return source.busy_s if self.trainer.ahead and isinstance(source, AheadSource) else 0.0

    def _idle(self, wall_s: float, waited_s: float) -> dict[str, float]:
        """Shares of the step in which the trainer waited, and in which nothing was sampled, where both can be."""
        if not self.trainer.ahead:
            return {}
        sampled = (self._sampled_s() - self._busy_s) / wall_s
        return {"trainer_idle": waited_s / wall_s, "sampler_idle": min(max(1 - sampled, 0.0), 1.0)}

    def _told(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """What is told of a step's rollouts, those of all processes."""
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
