"""What a fine-tuning learns from, and how: demonstrations, and the best of the policy's own rollouts that are right."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from repl_rl.errors import ConfigError
from repl_rl.machine.outputs import Output
from repl_rl.record.trajectory import Trajectory
from repl_rl.settings.pretrained import DTYPE, Pretrained

_OWN_TOKEN = b'"submit_final_answer"'


def _tuned(folder: Path) -> bool:
    """True for a policy that version 0.2 wrote and that cannot be any other: one that begins from `--fresh`, or one
    with its own rollouts. Other policies of 0.2 look like any model, and models of a user's are not replaced."""
    if not (folder / "config.json").is_file():
        return False
    tokenizer = folder / "tokenizer.json"
    own = tokenizer.is_file() and _OWN_TOKEN in tokenizer.read_bytes()
    return own or any((folder / "rollouts").glob("[0-9]*.jsonl.gz"))


POLICY = Output(
    "sft",
    "output folder",
    (
        *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "rollouts"),
        *("*token*", "vocab*", "merges*", "chat_template*", "README.md", "training_args.bin", "checkpoint-[0-9]*"),
    ),
    _tuned,
)
"""The folder of a policy that was fine-tuned, or begun with random weights: what is in one."""


@dataclass(frozen=True, slots=True)
class FinetuneConfig:
    """How long and how fast to learn.

    The defaults are the bundled policy's. Those of any other model: the learning rate is TRL's for fine-tuning, number
    format and micro-batches are those of its training. A model of 0.1 B parameters bears ten times that rate for a few
    steps (docs/pretrained.md).
    """

    steps: int = 200
    """Optimizer steps, >= 1."""
    batch_size: int = 32
    """Trajectories a step, >= 1."""
    micro_batch: Annotated[int, Pretrained.part(8)] = 0
    """Trajectories that pass through the model together, >= 0; 0: the whole batch."""
    learning_rate: Annotated[float, Pretrained.of(2e-5)] = 5e-4
    """Peak of a cosine schedule that falls to a tenth of it, > 0."""
    warmup_steps: int = 10
    """Steps over which the learning rate rises, >= 0."""
    dtype: Annotated[Literal["float32", "bfloat16"], DTYPE] = "float32"
    """Number format of the computation. Weights and optimizer are float32: bfloat16 has no room for small steps."""

    def __post_init__(self) -> None:
        for name, floor in (("steps", 1), ("batch_size", 1), ("micro_batch", 0), ("warmup_steps", 0)):
            if getattr(self, name) < floor:
                raise ConfigError(name, getattr(self, name), f"give at least {floor}")
        if not self.learning_rate > 0:
            raise ConfigError("learning_rate", self.learning_rate, "it must be above 0")
        if self.micro_batch and self.batch_size % self.micro_batch:
            raise ConfigError("micro_batch", self.micro_batch, f"it must divide batch_size, {self.batch_size}")


@dataclass(frozen=True, slots=True)
class Selection:
    """What is learned, and how many of what were left out."""

    kept: tuple[Trajectory, ...]
    left_out: Mapping[str, int]
    """Reason to number of trajectories."""


def select(
    trajectories: Iterable[Trajectory], per_task: int = 1, forbidden_ids: frozenset[int] = frozenset()
) -> Selection:
    """Rejection sampling by outcome: of the graded rollouts of a task the best `per_task` (>= 1) that solved it.

    Best is the higher outcome, then fewer lines in error, then fewer sampled tokens, then the earlier one. A
    trajectory without an outcome is a demonstration and is kept. One in which the policy wrote a forbidden id cannot be
    learned, whatever its outcome: its probability is 0. Order is kept.

    Raises:
        ConfigError: `per_task` is below 1.
    """
    if per_task < 1:
        raise ConfigError("per_task", per_task, "keep at least 1 rollout a task")
    left_out: Counter[str] = Counter()
    kept: list[tuple[int, Trajectory]] = []
    solved: dict[str, list[tuple[int, Trajectory]]] = {}
    for number, trajectory in enumerate(trajectories):
        if not trajectory.trainable:
            left_out["failed on our side, or empty"] += 1
        elif any(not forbidden_ids.isdisjoint(line.token_ids) for line in trajectory.lines):
            left_out["writes an id that the policy never samples (--overshoot forbid)"] += 1
        elif trajectory.outcome is None:
            kept.append((number, trajectory))
        elif not trajectory.solved:
            left_out["did not solve its task"] += 1
        else:
            solved.setdefault(trajectory.task_id, []).append((number, trajectory))
    for rollouts in solved.values():
        best = sorted(rollouts, key=lambda numbered: _rank(numbered[1]))[:per_task]
        kept += best
        left_out["a better one of its task is kept"] += len(rollouts) - len(best)
    ordered = tuple(trajectory for _, trajectory in sorted(kept, key=lambda numbered: numbered[0]))
    return Selection(ordered, {reason: count for reason, count in left_out.items() if count})


def _rank(trajectory: Trajectory) -> tuple[float, int, int]:
    assert trajectory.outcome is not None
    errors = sum(execution.status.is_error for execution in trajectory.executions)
    return -trajectory.outcome, errors, trajectory.sampled_tokens
