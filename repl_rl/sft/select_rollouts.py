"""Data selection and settings of a fine-tuning: demonstrations, and the best correct rollouts of the policy."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ConfigError
from repl_rl.settings.help_pages import COMMON
from repl_rl.settings.model_defaults import DTYPE, PretrainedDefault
from repl_rl.settings.value_bounds import Above, AtLeast, check_fields
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.atomic_files import OutputFolder

_OWN_TOKEN = b'"submit_final_answer"'
"""Token that only the tokenizer of `--fresh` has."""


def _is_legacy_policy(folder: Path) -> bool:
    """Return True for a folder that only version 0.2's fine-tuning can have written.

    Such a policy has the tokenizer of `--fresh`, or its own rollouts. Other policies of 0.2 look like any model, and a
    user's models are never replaced.
    """
    if not (folder / "config.json").is_file():
        return False
    tokenizer = folder / "tokenizer.json"
    has_own_tokenizer = tokenizer.is_file() and _OWN_TOKEN in tokenizer.read_bytes()
    return has_own_tokenizer or any((folder / "rollouts").glob("[0-9]*.jsonl.gz"))


POLICY = OutputFolder(
    "sft",
    "output folder",
    (
        *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "rollouts"),
        *("*token*", "vocab*", "merges*", "chat_template*", "README.md", "training_args.bin", "checkpoint-[0-9]*"),
    ),
    _is_legacy_policy,
)
"""Output type of a policy folder of a fine-tuning or cold start: its file names, and the test for version 0.2."""


@keeps_old_names
@dataclass(frozen=True, slots=True)
class FinetuneConfig:
    """Length, batch size and learning rate of a fine-tuning.

    The defaults are those of the bundled policy. For any other model the learning rate is TRL's for fine-tuning, and
    number format and micro-batches are those of its training. A model of 0.1 B parameters takes ten times that rate for
    a few steps (docs/pretrained.md).
    """

    steps: Annotated[int, AtLeast(1), COMMON] = 200
    """Optimizer steps, >= 1."""
    batch_size: Annotated[int, AtLeast(1), COMMON] = 32
    """Trajectories per step, >= 1."""
    per_device_batch_size: Annotated[int, AtLeast(0), PretrainedDefault.largest_divisor(8, 2), COMMON] = 0
    """Trajectories per forward pass, >= 0; 0 means the whole batch."""
    learning_rate: Annotated[float, Above(0), PretrainedDefault.constant(2e-5), COMMON] = 5e-4
    """Peak learning rate, > 0; a cosine schedule decays it to a tenth."""
    warmup_steps: Annotated[int, AtLeast(0)] = 10
    """Warm-up steps, over which the learning rate rises, >= 0."""
    dtype: Annotated[Literal["float32", "bfloat16"], DTYPE, COMMON] = "float32"
    """Number format of the computation. Weights and optimizer are float32, because bfloat16 loses small updates."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.per_device_batch_size and self.batch_size % self.per_device_batch_size:
            raise ConfigError(
                "per_device_batch_size", self.per_device_batch_size, f"it must divide batch_size, {self.batch_size}"
            )


@keeps_old_names
@dataclass(frozen=True, slots=True)
class Selection:
    """Selected trajectories, and the number of rejected ones."""

    selected: tuple[Trajectory, ...]
    rejected_counts: Mapping[str, int]
    """Number of trajectories per reason."""


def select_best_rollouts(
    trajectories: Iterable[Trajectory], per_task: int = 1, forbidden_ids: frozenset[int] = frozenset()
) -> Selection:
    """Select rollouts by rejection sampling: of each task the best `per_task` (>= 1) graded rollouts that solved it.

    Rollouts are ranked by higher outcome, then fewer lines in error, then fewer sampled tokens, then the earlier one. A
    trajectory without an outcome is a demonstration and is kept. A trajectory in which the policy wrote a forbidden id
    is rejected, because that id has probability 0. The order is kept.

    Raises:
        ConfigError: `per_task` is below 1.
    """
    if per_task < 1:
        raise ConfigError("per_task", per_task, "keep at least 1 rollout per task")
    rejected: Counter[str] = Counter()
    selected: list[tuple[int, Trajectory]] = []
    solved: dict[str, list[tuple[int, Trajectory]]] = {}
    for number, trajectory in enumerate(trajectories):
        # The first reason that applies is counted.
        if not trajectory.trainable:
            rejected["failed on our side, or empty"] += 1
        elif any(not forbidden_ids.isdisjoint(line.token_ids) for line in trajectory.lines):
            rejected["writes an id that the policy never samples (--newline-tokens forbid)"] += 1
        elif trajectory.outcome is None:
            selected.append((number, trajectory))
        elif not trajectory.solved:
            rejected["did not solve its task"] += 1
        else:
            solved.setdefault(trajectory.task_id, []).append((number, trajectory))
    # Keep the best rollouts per task; sorting is stable, so the earlier of equal ones wins.
    for rollouts in solved.values():
        best = sorted(rollouts, key=lambda numbered: _rank_rollout(numbered[1]))[:per_task]
        selected += best
        rejected["a better one of its task is kept"] += len(rollouts) - len(best)
    # Restore the order of the input.
    ordered = tuple(trajectory for _, trajectory in sorted(selected, key=lambda numbered: numbered[0]))
    return Selection(ordered, {reason: count for reason, count in rejected.items() if count})


def _rank_rollout(trajectory: Trajectory) -> tuple[float, int, int]:
    """Return the sort key of a graded rollout; the best one comes first."""
    assert trajectory.outcome is not None
    errors = sum(execution.status.is_error for execution in trajectory.executions)
    return -trajectory.outcome, errors, trajectory.sampled_tokens
