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

    def __init__(self, trainer: ReplGRPOTrainer, evaluation: Evaluation, out: Path, base: Path | None) -> None:
        """`base` is the folder that training began with, whose untrained parts the best one gets too; None: there is
        none, the model was given as it is."""
        self._trainer = trainer
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
            self._best = score, step
            self._keep(main)
        told = {f"eval/{name}": value for name, value in found.items()}
        return {**told, "eval/best_step": float(self._best[1]), "eval_s": time.perf_counter() - begun}

    def memory(self) -> str:
        """Which policy was the best so far, as JSON."""
        return json.dumps(self._best)

    def remember(self, memory: str) -> None:
        """Go on from what `memory` gave."""
        best = json.loads(memory)
        self._best = (best[0], best[1]) if best else None

    def _keep(self, main: bool) -> None:
        torn, best = self._out / f".{BEST}", self._out / BEST
        self._trainer.save_model(str(torn))
        if main:
            if self._base is not None and not (torn / "adapter_config.json").is_file():
                complete(torn, self._base)
            shutil.rmtree(best, ignore_errors=True)
            torn.rename(best)
