"""The groups of later steps, played while the policy is updated."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from accelerate import Accelerator

from repl_rl.credit.credited import Credited
from repl_rl.errors import ConfigError, InvariantError
from repl_rl.record.trajectory import Trajectory
from repl_rl.runs.store import from_record, to_record
from repl_rl.tasks import Curriculum, assigned
from repl_rl.trainer.choices import Plan, Windowed
from repl_rl.trainer.groups import Groups
from repl_rl.trainer.lead import Lead, Window
from repl_rl.trainer.source import AheadSource, RolloutSource, WindowedSource, check_rollouts


class _Saved(NamedTuple):
    """A step, as a run that is gone on with had it under way."""

    tasks: list[str]
    finished: Mapping[int, Trajectory]
    learned: Sequence[int]
    """Groups that have been learned from, by their number in the step."""


class GroupsAhead(Groups):
    """Plays the rollouts of a step while those of the steps after it go on, as far as the lead allows.

    Tasks are drawn when a step begins, in order, and seeds follow from step and task, so that a step's groups do not
    depend on what is done first; but for which step learns from them, with a window. What has ended of later steps is
    remembered with the run; the rest begins again.
    """

    def __init__(
        self,
        source: RolloutSource,
        size: int,
        accelerator: Accelerator,
        lead: Lead,
        optimizer_steps: int,
        upcoming: Callable[[], Iterator[Sequence[str]]],
        curriculum: Curriculum | None = None,
        plan: Plan | None = None,
    ) -> None:
        """
        Args:
            source: what plays.
            size: of a group.
            accelerator: of this process, the only one.
            lead: which steps begin when.
            optimizer_steps: that a step takes.
            upcoming: the tasks of the step at hand, then of each that follows; asked for once, in the first step.
            curriculum: chooses tasks in the place of these.
            plan: whether groups of later steps may pass one that takes long.

        Raises:
            ConfigError: `source` cannot begin the rollouts of a step to come, or tell which of their groups have ended.
        """
        super().__init__(source, (), size, accelerator, curriculum=curriculum)
        if not isinstance(source, AheadSource):
            raise ConfigError("trainer.ahead", "above 0", "this source of rollouts has no `begin`; leave it at 0")
        self._share = plan.share if isinstance(plan, Windowed) else 0.0
        if self._share and not isinstance(source, WindowedSource):
            raise ConfigError("trainer.groups", "window", "this source of rollouts has no `first`; leave it out")
        self._lead, self._optimizer_steps = lead, optimizer_steps
        self._early, self._upcoming = source, upcoming
        self._slots: Iterator[Sequence[str]] | None = None
        self._named: dict[int, list[str]] = {}
        """The tasks that TRL will name, of steps to come."""
        self._begun: dict[int, list[str]] = {}
        """Those that are played, a rollout each, of steps to come and of those of which groups are left."""
        self._count = 0
        self._window: Window | None = None
        self._memory = "{}"

    def play(self, slots: Sequence[str], step: int) -> tuple[Trajectory, ...]:
        """See `Groups.play`; on the way, the rollouts of later steps begin."""
        now = step // self._optimizer_steps
        self._count = len(slots) // self._size
        saved = self._opened(now) if self._window is None else {}
        for later in self._lead.reached(now):
            self._begin(later, saved.get(later))
        if (named := self._named.pop(now)) != list(slots):
            raise InvariantError(f"step {now} has the tasks {list(slots)}, and began with those for {named}")
        taken = sorted(self._taken() for _ in range(self._count))
        by_step = groupby(taken, lambda group: group // self._count)
        played = [t for begun, groups in by_step for t in self._rollouts(begun, list(groups))]
        self._begun = {begun: tasks for begun, tasks in self._begun.items() if begun > now or self._left(begun)}
        return tuple(_learned(t, step) for t in played)

    @property
    def oldest(self) -> int:
        """How many steps old a line can be when it is learned from."""
        return Window.oldest(self._width, self._lead.ahead, self._count)

    @property
    def _width(self) -> int:
        return Window.wide(self._share, self._lead.ahead, self._count)

    def _begin(self, step: int, saved: _Saved | None) -> None:
        self._slots = self._slots or self._upcoming()
        self._named[step] = slots = list(next(self._slots))
        if saved is None:
            chosen = assigned(self._curriculum, slots, self._size) if self._curriculum is not None else slots
            saved = _Saved(list(chosen), {}, ())
        self._go_on(step, saved)

    def _go_on(self, step: int, saved: _Saved) -> None:
        self._begun[step] = saved.tasks
        if self._left(step):
            self._early.begin(saved.tasks, step * self._optimizer_steps, saved.finished)

    def _left(self, step: int) -> Sequence[int]:
        """Groups of it that are not learned from."""
        assert self._window is not None
        return self._window.left(step * self._count, self._count)

    def _taken(self) -> int:
        """A group that is learned from now; with a window the first that has ended is waited for."""
        assert self._window is not None
        groups = self._window.open((max(self._begun) + 1) * self._count)
        number = 0
        if self._share:
            assert isinstance(self._early, WindowedSource)
            number = self._early.first([self._place(group) for group in groups])
        self._window.take(groups[number])
        return groups[number]

    def _place(self, group: int) -> tuple[int, range]:
        """See `WindowedSource.first`."""
        return group // self._count * self._optimizer_steps, self._places(group)

    def _places(self, group: int) -> range:
        """Numbers of its rollouts in its step."""
        first = group % self._count * self._size
        return range(first, first + self._size)

    def _rollouts(self, step: int, groups: Sequence[int]) -> list[Trajectory]:
        """Those of groups that `step` began with, which have been taken."""
        tasks, policy_step = self._begun[step], step * self._optimizer_steps
        numbers = [number for group in groups for number in self._places(group)]
        ended: Mapping[int, Trajectory] = {}
        if self._left(step):
            assert isinstance(self._early, WindowedSource)
            ended = self._early.ended(policy_step)
        if not all(number in ended for number in numbers):  # none is left, or something failed under all of them
            whole = self._early.collect(tasks, policy_step)
            check_rollouts(whole, tasks, policy_step)
            ended = dict(enumerate(whole))
        played = [ended[number] for number in numbers]
        check_rollouts(played, [tasks[number] for number in numbers], policy_step)
        return played

    def memory(self) -> str:
        """As JSON: the steps under way, their rollouts that have ended, and which groups were learned from."""
        if self._window is None:
            return self._memory
        return json.dumps({step: self._saved_of(step, tasks) for step, tasks in self._begun.items()})

    def _saved_of(self, step: int, tasks: Sequence[str]) -> Mapping[str, object]:
        left = self._left(step)
        finished = self._early.finished(step * self._optimizer_steps) if left else {}
        # Of a workspace a record has the name alone: a child's is not found by its task.
        kept = {n: t for n, t in finished.items() if all(child.workspace is None for child in t.children)}
        learned = [n for n in range(self._count) if step * self._count + n not in left]
        return {"tasks": tasks, "finished": {n: to_record(Credited(t)) for n, t in kept.items()}, "learned": learned}

    def remember(self, memory: str) -> None:
        """Go on from what `memory` gave."""
        self._memory = memory

    def _opened(self, now: int) -> Mapping[int, _Saved]:
        """Begin again what was left of steps before this one. Returns those of later ones."""
        saved: dict[int, _Saved] = {}
        for step, told in json.loads(self._memory).items():
            finished = {int(n): from_record(record).trajectory for n, record in told["finished"].items()}
            learned = told.get("learned", ())  # states of before there were windows have none
            saved[int(step)] = _Saved(told["tasks"], finished, learned)
        first = min([now, *saved])
        taken = [
            step * self._count + group
            for step in range(first, max([now, *saved]) + 1)
            for group in (saved[step].learned if step in saved else range(self._count if step < now else 0))
        ]
        self._window = Window(self._width, first * self._count, taken)
        for step in sorted(saved):
            if step < now:
                self._go_on(step, saved[step])
        return saved


def _learned(t: Trajectory, step: int) -> Trajectory:
    """With the step that learns from it, in place of the one that it began for."""
    if t.policy_step == step:
        return t
    return replace(t, policy_step=step, children=tuple(_learned(child, step) for child in t.children))
