"""Tasks and rollouts of each step, in whole groups, on any number of processes.

`TaskSampler` has TRL's order of tasks. `GroupSampler` gets the rollouts from the rollout source.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice

import torch
from accelerate import Accelerator
from torch import Tensor
from trl.trainer.utils import RepeatSampler

from repl_rl.credit.rewards import GroupEntry
from repl_rl.errors import InvariantError, WeightSyncError
from repl_rl.tasks import Curriculum, assign_tasks
from repl_rl.trainer.importance_sampling import LogprobMismatch
from repl_rl.trainer.rollout_source import RolloutSource
from repl_rl.trainer.trl_arguments import GRPOTrainer
from repl_rl.trajectory.trajectory import Trajectory


class TaskSampler(RepeatSampler):
    """TRL's sampler of tasks. It can also preview the tasks of later steps, without a change of its random state."""

    @classmethod
    def from_sampler(cls, sampler: RepeatSampler) -> "TaskSampler":
        """Return a `TaskSampler` with the settings of `sampler`."""
        sizes = (sampler.data_source, sampler.mini_repeat_count, sampler.batch_size, sampler.repeat_count)
        return cls(*sizes, sampler.shuffle, sampler.seed)

    def __iter__(self) -> Iterator[int]:
        # `iterate_upcoming` repeats the epoch from this state of the generator.
        self._epoch = self.generator.get_state()
        epoch: Iterator[int] = super().__iter__()
        return epoch

    def iterate_upcoming(self, done: int) -> Iterator[list[int]]:
        """Return an endless iterator over the dataset rows of each step's rollouts, starting after `done` steps.

        The call must come within the epoch of the first of these steps.
        """
        # A copy draws, so that the generator of this sampler does not advance.
        later = copy(self)
        later.generator = torch.Generator()
        later.generator.set_state(self._epoch)
        return islice(later._iterate_steps(), done % (self.num_samples // self.batch_size), None)

    def _iterate_steps(self) -> Iterator[list[int]]:
        # TRL repeats each batch `repeat_count` times for its updates; one of them is enough here.
        size = self.batch_size * self.mini_repeat_count
        while True:
            epoch = list(self)
            for start in range(0, len(epoch), size * self.repeat_count):
                yield epoch[start : start + size]


@dataclass(frozen=True, slots=True)
class SyncedStep:
    """Data of one step for the check that the rollout source samples with the trainer's weights."""

    rollouts: Sequence[Trajectory]
    """Rollouts of this process, as training uses them."""
    ages: Tensor
    """Staleness of each token, int64, (B, T), in optimizer steps; -1 for tokens that were not sampled."""
    policy_step: int
    """Number of optimizer steps applied to the trainer's policy so far."""
    trainer: GRPOTrainer
    """The trainer, with its policy."""
    mismatch: LogprobMismatch
    """Logprob mismatch over the tokens that the current weights sampled."""


class GroupSampler:
    """Group sampler that waits for the rollouts of a step, and samples each group once.

    The rollouts of all processes form one list, process by process, and a group may span two processes. Subclasses
    replace groups (`plugins/dynamic_sampling.py`) or sample later steps early (`plugins/async_rollouts.py`). Every
    process decides and draws for the whole step from the same data, so all processes agree.
    """

    samples_during_update = False
    """True if the source samples rollouts of later steps while the policy is updated."""

    def __init__(
        self, source: RolloutSource, size: int, accelerator: Accelerator, curriculum: Curriculum | None = None
    ) -> None:
        """Set up groups of `size` rollouts. A `curriculum` chooses their tasks; None keeps those of the trainer."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last step over all processes, by their names in `metrics.jsonl`."""
        self._source = source
        self._size = size
        self._accelerator = accelerator
        self._curriculum = curriculum

    @property
    def max_staleness(self) -> int:
        """Largest staleness of a line that is trained on, in steps; 0 means that all rollouts are fresh."""
        return 0

    @property
    def busy_s(self) -> float:
        """Wall clock seconds in which rollouts of later steps were in flight so far."""
        return 0.0

    def collect(self, slots: Sequence[str], step: int) -> tuple[Trajectory, ...]:
        """Return this process's rollouts of a step, one per task id in `slots`; a curriculum may replace the tasks.

        Raises:
            InvariantError, WeightSyncError: the rollout source breaks its contract.
        """
        return tuple(self._collect_checked(self._choose_tasks(slots), step))

    def record_outcomes(self, entries: Sequence[GroupEntry]) -> Mapping[str, float]:
        """Record the outcomes of all processes' trained rollouts in the curriculum; return metrics of their tasks."""
        if self._curriculum is None:
            return {}
        # All processes record the same outcomes, so their curricula agree.
        level = self._curriculum.compute_mean_level(e.task_id for e in entries)
        self._curriculum.record((e.task_id, float(e.solved)) for e in entries if e.rewards.outcome is not None)
        return {"level_mean": level}

    def check_sync(self, step: SyncedStep) -> tuple[LogprobMismatch, Mapping[str, float]]:
        """Return the logprob mismatch of a step, and metrics of its staleness."""
        return step.mismatch, {}

    def _choose_tasks(self, slots: Sequence[str]) -> Sequence[str]:
        """Return the task ids of this process's rollouts, in the places of `slots`."""
        if self._curriculum is None:
            return slots
        process = self._accelerator.process_index, self._accelerator.num_processes
        return assign_tasks(self._curriculum, slots, self._size, *process)

    def _collect_checked(self, task_ids: Sequence[str], step: int) -> list[Trajectory]:
        """Collect rollouts from the source, and check their tasks and policy steps."""
        # With several processes, `collect` is a joint call, even for a process that needs no rollouts.
        participates = task_ids or self._accelerator.num_processes > 1
        rollouts = list(self._source.collect(task_ids, step)) if participates else []
        validate_rollouts(rollouts, task_ids, step)
        return rollouts


def validate_rollouts(trajectories: Sequence[Trajectory], task_ids: Sequence[str], step: int) -> None:
    """Check the trajectories that a rollout source has returned.

    Raises:
        InvariantError: their tasks are not the requested ones.
        WeightSyncError: a trajectory has another policy step.
    """
    returned_ids = [t.task_id for t in trajectories]
    if returned_ids != list(task_ids):
        raise InvariantError(
            f"the rollout source gave tasks {returned_ids} for {list(task_ids)}; give one rollout per entry"
        )
    for t in trajectories:
        if t.policy_step != step:
            raise WeightSyncError(
                f"rollout {t.id} is for policy step {t.policy_step} while the trainer is at {step}; the "
                "rollout source did not load the last weights"
            )
