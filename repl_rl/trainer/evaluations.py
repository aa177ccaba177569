"""Evaluations while training: the policy after a step, on tasks that it is not trained on; the best one is kept."""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from accelerate.utils import broadcast_object_list

from repl_rl.engine.names import complete
from repl_rl.trainer.grpo import ReplGRPOTrainer
from repl_rl.trainer.states import memories

BEST = "best"
"""Folder beside the checkpoints: the policy whose evaluation came out best."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is evaluated, and how often."""

    every: int
    """Steps between evaluations, >= 1."""
    play: Callable[[int], Mapping[str, float]]
    """Evaluates the policy that the rollout source holds, after so many steps; called in the main process alone, while
    the others wait. Its figures get `eval/` before their names."""
    score: str = "solve_rate"
    """The figure that says which policy is best: the higher, and of equals the earlier."""


class Evaluator:
    """Evaluates a training as `Evaluation` says, and keeps the best policy in `out/best`."""

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
            trainer: what is evaluated.
            evaluation: how, and how often.
            out: folder of the checkpoints.
            base: folder that training began with, whose untrained parts the best policy gets too; None: there is none,
                the model was given as it is.
            states: folder of the run's states; None: the run cannot be resumed.
        """
        self._trainer = trainer
        self._states = states
        self._evaluation = evaluation
        self._out = out
        self._base = base
        self._best: tuple[float, int] | None = None

    def after(self, step: int) -> dict[str, float]:
        """Evaluate if it is time, and return the figures; all processes call this together.

        The rollout source is given the weights for it, which the next step would give it anyway.
        """
        if step % self._evaluation.every:
            return {}
        begun = time.perf_counter()
        self._trainer.sync()
        main = self._trainer.accelerator.is_main_process
        (found,) = broadcast_object_list([dict(self._evaluation.play(step)) if main else None])
        score = found[self._evaluation.score]
        if self._best is None or score > self._best[0]:
            passed, self._best = self._best, (score, step)
            self._keep(main, passed[1] if passed else None)
        told = {f"eval/{name}": value for name, value in found.items()}
        return {**told, "eval/best_step": float(self._best[1]), "eval_s": time.perf_counter() - begun}

    def memory(self) -> str:
        """Which policy was the best so far, as JSON."""
        return json.dumps(self._best)

    def remember(self, memory: str) -> None:
        """Go on from what `memory` gave, with the policy that was the best then."""
        best = json.loads(memory)
        self._best = (best[0], best[1]) if best else None
        if not self._trainer.accelerator.is_main_process:
            return
        step = self._best[1] if self._best else 0
        # What was better later came of steps that are made again, and may not come out the same.
        if not step or self._passed(step).is_dir():
            shutil.rmtree(self._out / BEST, ignore_errors=True)
        if step and self._passed(step).is_dir():
            self._passed(step).rename(self._out / BEST)
        self._prune(lambda other: other < step)

    def finish(self) -> None:
        """Remove policies that were the best before: no step is made again."""
        if self._trainer.accelerator.is_main_process:
            self._prune(lambda step: False)

    def _passed(self, step: int) -> Path:
        """Folder of a policy that was the best until a later one was."""
        return self._out / f".{BEST}-{step:06d}"

    def _prune(self, needed: Callable[[int], bool]) -> None:
        for folder in self._out.glob(f".{BEST}-*"):
            if not needed(int(folder.name.rpartition("-")[2])):
                shutil.rmtree(folder, ignore_errors=True)

    def _keep(self, main: bool, passed: int | None) -> None:
        """Make the policy `best`. The one before it stays hidden while a state can be resumed that says it is."""
        torn, best = self._out / f".{BEST}", self._out / BEST
        self._trainer.save_model(str(torn))
        if not main:
            return
        if self._base is not None and not (torn / "adapter_config.json").is_file():
            complete(torn, self._base)
        if passed is not None and self._states is not None:
            shutil.rmtree(self._passed(passed), ignore_errors=True)
            best.rename(self._passed(passed))
            told = [json.loads(memory) for memory in memories(self._states, "evaluator")]
            # The state of the last step may be on its way to the disk.
            self._prune({passed, *(one[1] for one in told if one)}.__contains__)
        shutil.rmtree(best, ignore_errors=True)
        torn.rename(best)
