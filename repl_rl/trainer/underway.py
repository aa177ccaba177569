"""In-flight steps of async rollouts: their groups, the group to take next, and their state in a checkpoint."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Self

from repl_rl.credit.credited import Credited
from repl_rl.record.trajectory import Trajectory
from repl_rl.runs.store import from_record, to_record
from repl_rl.trainer.lead import Window
from repl_rl.trainer.source import AheadSource, WindowedSource, check_rollouts


class StepShape(NamedTuple):
    """Sizes that all steps of a run have in common."""

    groups: int
    size: int
    """Number of rollouts per group."""
    optimizer_steps: int

    def rollouts(self, group: int) -> range:
        """Return the numbers of a group's rollouts in its step; groups are numbered over all steps of the run."""
        first = group % self.groups * self.size
        return range(first, first + self.size)


class _Saved(NamedTuple):
    """In-flight step from the checkpoint of a resumed run."""

    tasks: list[str]
    finished: Mapping[int, Trajectory]
    learned: Sequence[int]
    """Groups that were trained on, by their number in the step."""


class UnderWay:
    """Groups of all steps that have started, until they are taken."""

    def __init__(self, source: AheadSource, shape: StepShape, window: Window, saved: Mapping[int, _Saved]) -> None:
        """`saved` holds the later steps that were in flight when a resumed run was saved; see `opened`."""
        self._source, self._shape, self._window, self._saved = source, shape, window, dict(saved)
        self._begun: dict[int, list[str]] = {}
        """Task ids per step, one per rollout."""

    @classmethod
    def opened(cls, source: AheadSource, shape: StepShape, width: int, memory: str, now: int) -> Self:
        """Restore the in-flight steps of a run at step `now`; earlier steps with groups left start again at once.

        Args:
            source: source that plays the rollouts.
            shape: sizes of each step.
            width: width of the window of groups that may be taken; above 1, `source` is a `WindowedSource`.
            memory: value that `UnderWay.memory` returned, or `{}`.
            now: the step that is trained on next.
        """
        saved: dict[int, _Saved] = {}
        for step, told in json.loads(memory).items():
            finished = {int(n): from_record(record).trajectory for n, record in told["finished"].items()}
            # Checkpoints from before windows existed lack this field.
            learned = told.get("learned", ())
            saved[int(step)] = _Saved(told["tasks"], finished, learned)
        first = min([now, *saved])
        # A step before `now` that was not saved has no group left.
        taken = [
            step * shape.groups + group
            for step in range(first, max([now, *saved]) + 1)
            for group in (saved[step].learned if step in saved else range(shape.groups if step < now else 0))
        ]
        later = {step: of for step, of in saved.items() if step >= now}
        under_way = cls(source, shape, Window(width, first * shape.groups, taken), later)
        for step in sorted(saved.keys() - later.keys()):
            under_way._go_on(step, saved[step])
        return under_way

    def begin(self, step: int, tasks: Callable[[], Sequence[str]]) -> None:
        """Start a step with its state from the resumed run, or else with `tasks`, one per rollout."""
        self._go_on(step, self._saved.pop(step) if step in self._saved else _Saved(list(tasks()), {}, ()))

    def _go_on(self, step: int, saved: _Saved) -> None:
        self._begun[step] = saved.tasks
        if self._left(step):
            self._source.begin(saved.tasks, self._policy_step(step), saved.finished)

    def take(self, now: int) -> list[Trajectory]:
        """Take as many groups as a step has, and return their rollouts in the order in which the groups started.

        Steps up to `now` are then dropped, unless they have groups left: no later step takes their tasks again.
        """
        taken = sorted(self._taken() for _ in range(self._shape.groups))
        by_step = groupby(taken, lambda group: group // self._shape.groups)
        played = [t for step, groups in by_step for t in self._rollouts(step, list(groups))]
        self._begun = {step: tasks for step, tasks in self._begun.items() if step > now or self._left(step)}
        return played

    def _policy_step(self, step: int) -> int:
        return step * self._shape.optimizer_steps

    def _left(self, step: int) -> Sequence[int]:
        """Return the groups of a step that are not taken."""
        return self._window.left(step * self._shape.groups, self._shape.groups)

    @property
    def _windowed(self) -> WindowedSource:
        """Source that reports which groups have ended; used only with a window of more than one group."""
        assert isinstance(self._source, WindowedSource)
        return self._source

    def _taken(self) -> int:
        """Take the next group: the oldest one, or with a window the first one that ends."""
        open_ = self._window.open((max(self._begun) + 1) * self._shape.groups)
        number = 0
        if self._window.width > 1:
            steps = [self._policy_step(group // self._shape.groups) for group in open_]
            number = self._windowed.first([(s, self._shape.rollouts(g)) for s, g in zip(steps, open_, strict=True)])
        self._window.take(open_[number])
        return open_[number]

    def _rollouts(self, step: int, groups: Sequence[int]) -> list[Trajectory]:
        """Return the rollouts of groups of `step` that have been taken."""
        tasks, policy_step = self._begun[step], self._policy_step(step)
        numbers = [number for group in groups for number in self._shape.rollouts(group)]
        ended = self._windowed.ended(policy_step) if self._left(step) else {}
        # No group of the step is left, or an error ended all its rollouts: `collect` returns them, or raises the error.
        if not all(number in ended for number in numbers):
            whole = self._source.collect(tasks, policy_step)
            check_rollouts(whole, tasks, policy_step)
            ended = dict(enumerate(whole))
        played = [ended[number] for number in numbers]
        check_rollouts(played, [tasks[number] for number in numbers], policy_step)
        return played

    def memory(self) -> str:
        """Return the in-flight steps, their finished rollouts and their taken groups, as JSON."""
        return json.dumps({step: self._told(step, tasks) for step, tasks in self._begun.items()})

    def _told(self, step: int, tasks: Sequence[str]) -> Mapping[str, object]:
        left = self._left(step)
        finished = self._source.finished(self._policy_step(step)) if left else {}
        # A record holds only the name of a workspace, and a child's workspace cannot be found by its task. So rollouts
        # with such children run again.
        kept = {n: t for n, t in finished.items() if all(child.workspace is None for child in t.children)}
        learned = [n for n in range(self._shape.groups) if step * self._shape.groups + n not in left]
        return {"tasks": tasks, "finished": {n: to_record(Credited(t)) for n, t in kept.items()}, "learned": learned}
