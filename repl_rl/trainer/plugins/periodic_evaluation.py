"""Evaluation during training: the policy plays held-out tasks after a step, and the best policy is kept."""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from accelerate.utils import broadcast_object_list

from repl_rl.models.parameter_names import complete_checkpoint
from repl_rl.runs.run_folder import BEST
from repl_rl.trainer.grpo import ReplGRPOTrainer
from repl_rl.trainer.plugins.checkpoint import read_part_states


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Function and interval of the evaluations."""

    every: int
    """Steps between evaluations, >= 1."""
    evaluate: Callable[[int], Mapping[str, float]]
    """Function that takes the number of finished steps, evaluates the policy of the rollout source, and returns
    metrics. Only the main process calls it, while the others wait. The metrics get the prefix `eval/`."""
    score: str = "solve_rate"
    """Metric that decides which policy is best: the highest value, and the earliest of equal ones."""


class PeriodicEvaluator:
    """Evaluator of a training run, which keeps the best policy in `out/best`."""

    def __init__(
        self,
        trainer: ReplGRPOTrainer,
        evaluation: Evaluation,
        out: Path,
        base: Path | None,
        states: Path | None = None,
    ) -> None:
        """
        Args:
            trainer: trainer with the policy to evaluate.
            evaluation: function and interval of the evaluations.
            out: folder of the checkpoints.
            base: model folder that training began with; the best policy gets its untrained parts, too. None means that
                the model was given as an object.
            states: folder of the run's saved states. None means that the run cannot be resumed.
        """
        self._trainer = trainer
        self._states = states
        self._evaluation = evaluation
        self._out = out
        self._base = base
        self._best: tuple[float, int] | None = None

    def evaluate_if_due(self, step: int) -> dict[str, float]:
        """Evaluate the policy if `step` is due, and return the metrics; all processes call this together.

        The rollout source loads the current weights, which it needs for the next step anyway.
        """
        if step % self._evaluation.every:
            return {}
        start = time.perf_counter()
        self._trainer.sync_weights()
        # All processes need the score, because saving the best policy is a joint call.
        main = self._trainer.accelerator.is_main_process
        (results,) = broadcast_object_list([dict(self._evaluation.evaluate(step)) if main else None])
        score = results[self._evaluation.score]
        if self._best is None or score > self._best[0]:
            former, self._best = self._best, (score, step)
            self._promote_to_best(main, former[1] if former else None)
        metrics = {f"eval/{name}": value for name, value in results.items()}
        return {**metrics, "eval/best_step": float(self._best[1]), "eval_s": time.perf_counter() - start}

    def state_dict(self) -> str:
        """Return score and step of the best policy so far, as JSON."""
        return json.dumps(self._best)

    def load_state_dict(self, memory: str) -> None:
        """Restore the state that `state_dict` returned, and the folder of the policy that was the best then."""
        best = json.loads(memory)
        self._best = (best[0], best[1]) if best else None
        if not self._trainer.accelerator.is_main_process:
            return
        step = self._best[1] if self._best else 0
        # A later best policy belongs to steps that now run again, and that may give other results.
        if not step or self._get_superseded_folder(step).is_dir():
            shutil.rmtree(self._out / BEST, ignore_errors=True)
        if step and self._get_superseded_folder(step).is_dir():
            self._get_superseded_folder(step).rename(self._out / BEST)
        self._prune_superseded(lambda other: other < step)

    def remove_superseded(self) -> None:
        """Remove former best policies, which only a resumed run needs."""
        if self._trainer.accelerator.is_main_process:
            self._prune_superseded(lambda step: False)

    def _get_superseded_folder(self, step: int) -> Path:
        """Return the folder of the policy of `step`, which was the best until a later one."""
        return self._out / f".{BEST}-{step:06d}"

    def _prune_superseded(self, is_needed: Callable[[int], bool]) -> None:
        """Remove the folders of former best policies, except those of steps that are needed."""
        for folder in self._out.glob(f".{BEST}-*"):
            if not is_needed(int(folder.name.rpartition("-")[2])):
                shutil.rmtree(folder, ignore_errors=True)

    def _promote_to_best(self, main: bool, former: int | None) -> None:
        """Save the policy as `best`. The former one stays in a hidden folder while a saved state refers to it."""
        # Save under a hidden name first, so that a process that is killed leaves no incomplete `best`.
        unfinished, best = self._out / f".{BEST}", self._out / BEST
        self._trainer.save_model(str(unfinished))
        if not main:
            return
        # Adapters are saved alone; a whole model gets the parts that were not trained.
        if self._base is not None and not (unfinished / "adapter_config.json").is_file():
            complete_checkpoint(unfinished, self._base)
        if former is not None and self._states is not None:
            shutil.rmtree(self._get_superseded_folder(former), ignore_errors=True)
            best.rename(self._get_superseded_folder(former))
            saved = [json.loads(memory) for memory in read_part_states(self._states, "evaluator")]
            # A thread may still be writing the state of the last step, which refers to `former`.
            self._prune_superseded({former, *(entry[1] for entry in saved if entry)}.__contains__)
        shutil.rmtree(best, ignore_errors=True)
        unfinished.rename(best)
