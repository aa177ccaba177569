"""Async rollouts: groups of later steps are sampled while the policy is updated.

- `StalenessSchedule` and `FifoWindow` decide which steps start and which groups a step trains on. They are pure logic,
  without clock or thread. Steps start in order. With a window of one group, steps also train in order. No line is then
  staler than `StalenessSchedule.max_staleness_steps` steps, and every run has the same groups in each step. A wider
  window lets younger groups pass a slow one, so that a step waits less.
- `InFlightSteps` holds the groups of all started steps and their state in a checkpoint. `AsyncGroups` is the sampler.
- `add_probe_mismatch` checks the weight sync with probe lines, for a step without a line from the current weights.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import NamedTuple, Self

import torch
from accelerate import Accelerator

from repl_rl.credit.credited_trajectory import CreditedTrajectory
from repl_rl.errors import ConfigError, InvariantError, WeightSyncError
from repl_rl.runs.store import from_record, to_record
from repl_rl.tasks import Curriculum
from repl_rl.trainer.collect_groups import GroupSampler, SyncedStep, validate_rollouts
from repl_rl.trainer.config import FifoWindowOptions
from repl_rl.trainer.importance_sampling import LogprobMismatch, Staleness
from repl_rl.trainer.rollout_source import AsyncRolloutSource, RolloutSource, WindowedRolloutSource
from repl_rl.trainer.trl_arguments import GRPOTrainer
from repl_rl.trajectory.trajectory import Trajectory


class StalenessSchedule:
    """Start times of the steps of a run, with up to `ahead` steps in flight in addition to the current one.

    Weights n are those of the policy after n steps. With weights n, the rollouts of steps n to n + `ahead` may run.
    Step s starts with weights s - `ahead` at the earliest, and the policy trains on it at weights s.
    """

    def __init__(self, ahead: int, steps: int) -> None:
        """
        Args:
            ahead: number of steps (>= 0); with 0, a step starts after the updates of all earlier steps.
            steps: number of steps of the run; no later step starts.
        """
        self.max_staleness_steps = ahead
        """Largest number of steps in flight in addition to the current one."""
        self._steps = steps
        self._weights = self._next = -1

    def start_steps(self, weights: int) -> range:
        """Record that the sampler has weights number `weights` (>= 0), and return the steps that start now, in order.

        The first call may have any number, as in a resumed run. Each later call must have the next number.

        Raises:
            InvariantError: `weights` does not follow the number of the previous call.
        """
        if self._weights >= 0 and weights != self._weights + 1:
            raise InvariantError(f"weights {weights} follow weights {self._weights}; report each step once, in order")
        # The last steps of a run start no further step: their range is empty.
        first = weights if self._weights < 0 else self._next
        self._weights, self._next = weights, max(first, min(weights + self.max_staleness_steps + 1, self._steps))
        return range(first, self._next)


class FifoWindow:
    """FIFO window over the groups of a run: the groups that may be trained on next (MiniMax, arXiv 2605.26494).

    Groups are numbered from 0 over all steps, in the order in which they start. The window begins at the oldest group
    that was not trained on yet. A group in the window may be trained on as soon as it ends, even before an older group.
    A group beyond the window has to wait.
    """

    def __init__(self, width: int, first: int = 0, taken: Iterable[int] = ()) -> None:
        """
        Args:
            width: number of groups in the window (>= 1), including those that are taken for training already. With 1,
                groups are taken in order.
            first: all groups with smaller numbers than `first` are taken already.
            taken: numbers of further groups that are taken already.
        """
        self.width = width
        """Number of groups in the window."""
        self._head, self._taken = first, set(taken)
        self._advance_head()

    @staticmethod
    def compute_width(share: float, ahead: int, groups: int) -> int:
        """Return the width for a `share` of all groups in flight: those of `ahead` steps and of the current step."""
        # The small summand keeps rounding of the product from losing a group.
        return max(math.floor(share * (ahead + 1) * groups + 1e-9), 1)

    @staticmethod
    def compute_max_staleness(width: int, ahead: int, groups: int) -> int:
        """Return the largest staleness of a line in steps, for steps of `groups` groups.

        At most `width` - 1 younger groups pass a group before it is taken.
        """
        return ahead + -(-(width - 1) // groups)

    def get_available(self, started_count: int) -> Sequence[int]:
        """Return the groups that may be taken now, oldest first, out of the first `started_count` groups."""
        return [
            group
            for group in range(self._head, min(self._head + self.width, started_count))
            if group not in self._taken
        ]

    def mark_taken(self, group: int) -> None:
        """Mark a group as taken for training.

        Raises:
            InvariantError: the group is outside the window, or was taken before.
        """
        if group in self._taken or not self._head <= group < self._head + self.width:
            raise InvariantError(
                f"group {group} was taken already, or is outside the window that begins at {self._head}"
            )
        self._taken.add(group)
        self._advance_head()

    def get_remaining(self, first: int, count: int) -> Sequence[int]:
        """Return the groups that are not taken, out of `count` groups from `first` on."""
        return [group for group in range(first, first + count) if group >= self._head and group not in self._taken]

    def _advance_head(self) -> None:
        # Taken groups leave the set once the head has passed them, so that it stays small.
        while self._head in self._taken:
            self._taken.remove(self._head)
            self._head += 1


class StepLayout(NamedTuple):
    """Sizes that all steps of a run have in common."""

    groups: int
    size: int
    """Number of rollouts per group."""
    optimizer_steps: int

    def get_rollout_numbers(self, group: int) -> range:
        """Return the numbers of a group's rollouts in its step; groups are numbered over all steps of the run."""
        first = group % self.groups * self.size
        return range(first, first + self.size)


class _SavedStep(NamedTuple):
    """In-flight step from the checkpoint of a resumed run."""

    tasks: list[str]
    finished: Mapping[int, Trajectory]
    learned_groups: Sequence[int]
    """Groups that were trained on, by their number in the step."""


class InFlightSteps:
    """Groups of all steps that have started, until they are taken."""

    def __init__(
        self, source: AsyncRolloutSource, shape: StepLayout, window: FifoWindow, saved: Mapping[int, _SavedStep]
    ) -> None:
        """`saved` holds the later steps that were in flight when a resumed run was saved; see `from_state`."""
        self._source, self._shape, self._window, self._saved = source, shape, window, dict(saved)
        self._started: dict[int, list[str]] = {}
        """Task ids per step, one per rollout."""

    @classmethod
    def from_state(cls, source: AsyncRolloutSource, shape: StepLayout, width: int, memory: str, now: int) -> Self:
        """Restore the in-flight steps of a run at step `now`; earlier steps with groups left start again at once.

        Args:
            source: source that plays the rollouts.
            shape: sizes of each step.
            width: width of the window of groups that may be taken; above 1, `source` is a `WindowedRolloutSource`.
            memory: value that `InFlightSteps.state_dict` returned, or `{}`.
            now: the step that is trained on next.
        """
        saved: dict[int, _SavedStep] = {}
        for step, record in json.loads(memory).items():
            finished = {int(n): from_record(rollout).trajectory for n, rollout in record["finished"].items()}
            # Checkpoints from before windows existed lack this field.
            learned = record.get("learned", ())
            saved[int(step)] = _SavedStep(record["tasks"], finished, learned)
        first = min([now, *saved])
        # A step before `now` that was not saved has no group left.
        taken = [
            step * shape.groups + group
            for step in range(first, max([now, *saved]) + 1)
            for group in (saved[step].learned_groups if step in saved else range(shape.groups if step < now else 0))
        ]
        later = {step: saved_step for step, saved_step in saved.items() if step >= now}
        in_flight = cls(source, shape, FifoWindow(width, first * shape.groups, taken), later)
        for step in sorted(saved.keys() - later.keys()):
            in_flight._resume_step(step, saved[step])
        return in_flight

    def start_step(self, step: int, tasks: Callable[[], Sequence[str]]) -> None:
        """Start a step with its state from the resumed run, or else with `tasks`, one per rollout."""
        self._resume_step(step, self._saved.pop(step) if step in self._saved else _SavedStep(list(tasks()), {}, ()))

    def _resume_step(self, step: int, saved: _SavedStep) -> None:
        self._started[step] = saved.tasks
        if self._get_remaining_groups(step):
            self._source.start_rollouts(saved.tasks, self._compute_policy_step(step), saved.finished)

    def take_step_rollouts(self, now: int) -> list[Trajectory]:
        """Take as many groups as a step has, and return their rollouts in the order in which the groups started.

        The records of steps up to `now` are then removed, except those of steps with groups that are not taken yet.
        """
        taken = sorted(self._take_next_group() for _ in range(self._shape.groups))
        by_step = groupby(taken, lambda group: group // self._shape.groups)
        rollouts = [t for step, groups in by_step for t in self._collect_rollouts(step, list(groups))]
        self._started = {
            step: tasks for step, tasks in self._started.items() if step > now or self._get_remaining_groups(step)
        }
        return rollouts

    def _compute_policy_step(self, step: int) -> int:
        return step * self._shape.optimizer_steps

    def _get_remaining_groups(self, step: int) -> Sequence[int]:
        """Return the groups of a step that are not taken."""
        return self._window.get_remaining(step * self._shape.groups, self._shape.groups)

    @property
    def _windowed_source(self) -> WindowedRolloutSource:
        """Source that reports which groups have ended; used only with a window of more than one group."""
        assert isinstance(self._source, WindowedRolloutSource)
        return self._source

    def _take_next_group(self) -> int:
        """Take the next group: the oldest one, or with a window the first one that ends."""
        available = self._window.get_available((max(self._started) + 1) * self._shape.groups)
        number = 0
        if self._window.width > 1:
            steps = [self._compute_policy_step(group // self._shape.groups) for group in available]
            number = self._windowed_source.wait_for_first_group(
                [(s, self._shape.get_rollout_numbers(g)) for s, g in zip(steps, available, strict=True)]
            )
        self._window.mark_taken(available[number])
        return available[number]

    def _collect_rollouts(self, step: int, groups: Sequence[int]) -> list[Trajectory]:
        """Return the rollouts of groups of `step` that have been taken."""
        tasks, policy_step = self._started[step], self._compute_policy_step(step)
        numbers = [number for group in groups for number in self._shape.get_rollout_numbers(group)]
        ended = self._windowed_source.get_ended_groups(policy_step) if self._get_remaining_groups(step) else {}
        # No group of the step is left, or an error ended all its rollouts: `collect` returns them, or raises the error.
        if not all(number in ended for number in numbers):
            step_rollouts = self._source.collect(tasks, policy_step)
            validate_rollouts(step_rollouts, tasks, policy_step)
            ended = dict(enumerate(step_rollouts))
        rollouts = [ended[number] for number in numbers]
        validate_rollouts(rollouts, [tasks[number] for number in numbers], policy_step)
        return rollouts

    def state_dict(self) -> str:
        """Return the in-flight steps, their finished rollouts and their taken groups, as JSON."""
        return json.dumps({step: self._describe_step(step, tasks) for step, tasks in self._started.items()})

    def _describe_step(self, step: int, tasks: Sequence[str]) -> Mapping[str, object]:
        remaining = self._get_remaining_groups(step)
        finished = self._source.get_finished_rollouts(self._compute_policy_step(step)) if remaining else {}
        # A record holds only the name of a workspace, and a child's workspace cannot be found by its task. So rollouts
        # with such children run again.
        storable = {n: t for n, t in finished.items() if all(child.workspace is None for child in t.children)}
        learned = [n for n in range(self._shape.groups) if step * self._shape.groups + n not in remaining]
        return {
            "tasks": tasks,
            "finished": {n: to_record(CreditedTrajectory(t)) for n, t in storable.items()},
            "learned": learned,
        }


class UpcomingTasks(NamedTuple):
    """Order of tasks in which the trainer will ask for rollouts."""

    optimizer_steps: int
    """Optimizer steps per training step, that is, per batch of rollouts."""
    iterate: Callable[[], Iterator[Sequence[str]]]
    """Returns the task ids of the current step, then of each later one; called once, in the first step."""


class AsyncGroups(GroupSampler):
    """Group sampler with async rollouts: later steps run in the background, as far as the schedule allows.

    Tasks are drawn when a step begins, in order, and seeds follow from step and task. So the order in which rollouts
    finish does not change the groups. With a FIFO window, that order decides only which step trains on a group. A
    checkpoint holds the finished rollouts of later steps; a resumed run samples the remaining ones again.
    """

    samples_during_update = True

    def __init__(
        self,
        source: RolloutSource,
        size: int,
        accelerator: Accelerator,
        schedule: StalenessSchedule,
        tasks: UpcomingTasks,
        curriculum: Curriculum | None = None,
        window: FifoWindowOptions | None = None,
    ) -> None:
        """
        Args:
            source: rollout source.
            size: rollouts per group.
            accelerator: accelerator of this process, the only one of the run.
            schedule: schedule that decides which steps may begin.
            tasks: tasks of the current step, then of each later one.
            curriculum: chooses other tasks in their place. None keeps them.
            window: lets groups of later steps overtake a slow one. None takes groups in order.

        Raises:
            ConfigError: `source` has no async rollouts, or cannot report which of their groups have finished.
        """
        super().__init__(source, size, accelerator, curriculum)
        if not isinstance(source, AsyncRolloutSource):
            raise ConfigError(
                "trainer.max_staleness_steps",
                "above 0",
                "this source of rollouts has no `start_rollouts`; leave it at 0",
            )
        self._share = window.in_flight_share if window is not None else 0.0
        if self._share and not isinstance(source, WindowedRolloutSource):
            raise ConfigError(
                "trainer.group_sampling",
                "fifo_window",
                "this source of rollouts has no `wait_for_first_group`; leave it out",
            )
        # TRL asks for the tasks of a step when it begins, so later steps need a preview of its order.
        self._schedule, self._optimizer_steps = schedule, tasks.optimizer_steps
        self._async_source, self._upcoming = source, tasks.iterate
        self._slots: Iterator[Sequence[str]] | None = None
        self._expected_tasks: dict[int, list[str]] = {}
        """Task ids that TRL will pass for later steps, by step."""
        self._groups = 0
        """Groups per step, known from the first call of `collect` on."""
        self._in_flight: InFlightSteps | None = None
        self._saved_state = "{}"

    def collect(self, slots: Sequence[str], step: int) -> tuple[Trajectory, ...]:
        """Start the rollouts of later steps, and return those of this one; see `GroupSampler.collect`."""
        now = step // self._optimizer_steps
        # The first call restores the in-flight steps of a resumed run.
        if self._in_flight is None:
            self._groups = len(slots) // self._size
            shape = StepLayout(self._groups, self._size, self._optimizer_steps)
            self._in_flight = InFlightSteps.from_state(
                self._async_source, shape, self._window_width, self._saved_state, now
            )
        # Start each step that the schedule allows from now on. In the first call, the current step is one of them.
        for later in self._schedule.start_steps(now):
            self._slots = self._slots or self._upcoming()
            self._expected_tasks[later] = upcoming = list(next(self._slots))
            self._in_flight.start_step(later, partial(self._choose_tasks, upcoming))
        # Rollouts began with predicted tasks, so TRL must now ask for the same ones.
        if (expected := self._expected_tasks.pop(now)) != list(slots):
            raise InvariantError(f"step {now} has the tasks {list(slots)}, and started with {expected}")
        return tuple(_set_policy_step(t, step) for t in self._in_flight.take_step_rollouts(now))

    @property
    def max_staleness(self) -> int:
        """Largest staleness of a line that is trained on, in steps."""
        return FifoWindow.compute_max_staleness(self._window_width, self._schedule.max_staleness_steps, self._groups)

    @property
    def _window_width(self) -> int:
        return FifoWindow.compute_width(self._share, self._schedule.max_staleness_steps, self._groups)

    @property
    def busy_s(self) -> float:
        """Wall clock seconds in which rollouts of later steps were in flight so far."""
        return self._async_source.rollout_busy_s

    def check_sync(self, step: SyncedStep) -> tuple[LogprobMismatch, Mapping[str, float]]:
        """Return the logprob mismatch of a step, and metrics of its staleness.

        Raises:
            WeightSyncError: a probe line comes from other weights than the trainer's.
        """
        metrics = Staleness.from_ages(step.ages, self._optimizer_steps).metrics()
        # If all tokens of the step are stale, compare log probabilities of a new line instead.
        mismatch = step.mismatch if step.mismatch.tokens else add_probe_mismatch(step, self._async_source)
        return mismatch, metrics

    def state_dict(self) -> str:
        """Return the state of the in-flight steps, as JSON."""
        return self._saved_state if self._in_flight is None else self._in_flight.state_dict()

    def load_state_dict(self, memory: str) -> None:
        """Restore the state that `state_dict` returned, at the next call of `collect`."""
        self._saved_state = memory


def _set_policy_step(t: Trajectory, step: int) -> Trajectory:
    """Return a copy whose `policy_step` is the step that trains on it, not the step for which it was started."""
    if t.policy_step == step:
        return t
    return replace(t, policy_step=step, children=tuple(_set_policy_step(child, step) for child in t.children))


def add_probe_mismatch(step: SyncedStep, source: AsyncRolloutSource) -> LogprobMismatch:
    """Return the mismatch of `step`, with its differences replaced by those of new probe lines.

    `source` samples the probe lines now, on a task of the step. If the step trains on no rollout, its mismatch is
    returned unchanged.

    Raises:
        WeightSyncError: a probe line comes from other weights than those of `step`.
    """
    task_id = next((t.task_id for t in step.rollouts if t.trainable), None)
    if task_id is None:
        return step.mismatch
    probes = source.sample_probe_lines(task_id)
    for probe in probes:
        if (sampled_at := probe.lines[0].policy_step) != step.policy_step:
            state = f"weights of policy step {sampled_at} while the trainer is at {step.policy_step}"
            raise WeightSyncError(f"the engine has {state}")
    gaps = [_compute_logprob_distance(step.trainer, probe) for probe in probes]
    # The first token follows the prompt, so it counts as a token after an observation.
    first_tokens, later_tokens, all_tokens = (
        torch.cat([gap[:1] for gap in gaps]),
        torch.cat([gap[1:] for gap in gaps]),
        torch.cat(gaps),
    )
    elsewhere = later_tokens.mean().item() if len(later_tokens) else 0.0
    mean, largest, after_observation = all_tokens.mean().item(), all_tokens.max().item(), first_tokens.mean().item()
    return replace(
        step.mismatch,
        mean=mean,
        max=largest,
        after_observation=after_observation,
        elsewhere=elsewhere,
        tokens=float(len(all_tokens)),
    )


@torch.no_grad()
def _compute_logprob_distance(trainer: GRPOTrainer, probe: Trajectory) -> torch.Tensor:
    """Return the absolute difference between the log probabilities of a probe line and the trainer's, nats, (T,)."""
    ids = torch.tensor([[*probe.prompt.token_ids, *probe.completion_ids]], device=trainer.accelerator.device)
    sampled = torch.tensor([probe.logprobs_T()], device=ids.device)
    # TRL's method, because our override knows only the rows of a step.
    scores = GRPOTrainer._get_per_token_logps_and_entropies
    with trainer.accelerator.autocast():
        logprobs, _, _ = scores(trainer, trainer.model_wrapped, ids, torch.ones_like(ids), sampled.size(1))
    distance: torch.Tensor = (logprobs.float() - sampled)[0].abs()
    return distance
