"""Steps of which groups are left to learn from: what they play, which is taken next, and what is kept with the run."""

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
    """What every step of a run is made of."""

    groups: int
    size: int
    """Rollouts of a group."""
    optimizer_steps: int

    def rollouts(self, group: int) -> range:
        """Numbers of a group's rollouts in its step. Groups are counted over all steps of the run."""
        first = group % self.groups * self.size
        return range(first, first + self.size)


class _Saved(NamedTuple):
    """A step, as a run that is gone on with had it under way."""

    tasks: list[str]
    finished: Mapping[int, Trajectory]
    learned: Sequence[int]
    """Groups that have been learned from, by their number in the step."""


class UnderWay:
    """The groups of steps that have begun, until they are taken."""

    def __init__(self, source: AheadSource, shape: StepShape, window: Window, saved: Mapping[int, _Saved]) -> None:
        """`saved` are those steps to come that had begun in a run that is gone on with: see `opened`."""
        self._source, self._shape, self._window, self._saved = source, shape, window, dict(saved)
        self._begun: dict[int, list[str]] = {}
        """The tasks of each step, a rollout each."""

    @classmethod
    def opened(cls, source: AheadSource, shape: StepShape, width: int, memory: str, now: int) -> Self:
        """As a run had them before step `now`: steps before it of which groups are left begin again at once.

        Args:
            source: what plays.
            shape: of each step.
            width: of the window of groups that may be taken; above 1, `source` is a `WindowedSource`.
            memory: as `UnderWay.memory` gave it, or `{}`.
            now: the step that is learned from next.
        """
        saved: dict[int, _Saved] = {}
        for step, told in json.loads(memory).items():
            finished = {int(n): from_record(record).trajectory for n, record in told["finished"].items()}
            learned = told.get("learned", ())  # states of before there were windows have none
            saved[int(step)] = _Saved(told["tasks"], finished, learned)
        first = min([now, *saved])
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
        """A step begins: with what a run that is gone on with had of it, or anew with `tasks`, a rollout each."""
        self._go_on(step, self._saved.pop(step) if step in self._saved else _Saved(list(tasks()), {}, ()))

    def _go_on(self, step: int, saved: _Saved) -> None:
        self._begun[step] = saved.tasks
        if self._left(step):
            self._source.begin(saved.tasks, self._policy_step(step), saved.finished)

    def take(self, now: int) -> list[Trajectory]:
        """The rollouts of as many groups as a step takes, of which none is left then; in the order of their beginning.

        Of step `now` and those before it nothing is kept but what is left: no step after it takes their tasks again.
        """
        taken = sorted(self._taken() for _ in range(self._shape.groups))
        by_step = groupby(taken, lambda group: group // self._shape.groups)
        played = [t for step, groups in by_step for t in self._rollouts(step, list(groups))]
        self._begun = {step: tasks for step, tasks in self._begun.items() if step > now or self._left(step)}
        return played

    def _policy_step(self, step: int) -> int:
        return step * self._shape.optimizer_steps

    def _left(self, step: int) -> Sequence[int]:
        """Groups of it that are not taken."""
        return self._window.left(step * self._shape.groups, self._shape.groups)

    @property
    def _windowed(self) -> WindowedSource:
        """Who can tell which groups have ended; asked where there is a window."""
        assert isinstance(self._source, WindowedSource)
        return self._source

    def _taken(self) -> int:
        """The next group: the oldest, or with a window the first that has ended, which is waited for."""
        open_ = self._window.open((max(self._begun) + 1) * self._shape.groups)
        number = 0
        if self._window.width > 1:
            steps = [self._policy_step(group // self._shape.groups) for group in open_]
            number = self._windowed.first([(s, self._shape.rollouts(g)) for s, g in zip(steps, open_, strict=True)])
        self._window.take(open_[number])
        return open_[number]

    def _rollouts(self, step: int, groups: Sequence[int]) -> list[Trajectory]:
        """Those of groups that `step` began with, which have been taken."""
        tasks, policy_step = self._begun[step], self._policy_step(step)
        numbers = [number for group in groups for number in self._shape.rollouts(group)]
        ended = self._windowed.ended(policy_step) if self._left(step) else {}
        if not all(number in ended for number in numbers):  # none is left, or something failed under all of them
            whole = self._source.collect(tasks, policy_step)
            check_rollouts(whole, tasks, policy_step)
            ended = dict(enumerate(whole))
        played = [ended[number] for number in numbers]
        check_rollouts(played, [tasks[number] for number in numbers], policy_step)
        return played

    def memory(self) -> str:
        """As JSON: the steps that have begun, their rollouts that have ended, and which groups were taken."""
        return json.dumps({step: self._told(step, tasks) for step, tasks in self._begun.items()})

    def _told(self, step: int, tasks: Sequence[str]) -> Mapping[str, object]:
        left = self._left(step)
        finished = self._source.finished(self._policy_step(step)) if left else {}
        # Of a workspace a record has the name alone: a child's is not found by its task.
        kept = {n: t for n, t in finished.items() if all(child.workspace is None for child in t.children)}
        learned = [n for n in range(self._shape.groups) if step * self._shape.groups + n not in left]
        return {"tasks": tasks, "finished": {n: to_record(Credited(t)) for n, t in kept.items()}, "learned": learned}
