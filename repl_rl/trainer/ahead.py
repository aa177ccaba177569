"""The groups of later steps, played while the policy is updated."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from accelerate import Accelerator

from repl_rl.credit.credited import Credited
from repl_rl.errors import ConfigError, InvariantError
from repl_rl.record.trajectory import Trajectory
from repl_rl.runs.store import from_record, to_record
from repl_rl.tasks import Curriculum, assigned
from repl_rl.trainer.groups import Groups
from repl_rl.trainer.lead import Lead
from repl_rl.trainer.source import AheadSource, RolloutSource, check_rollouts


class _Begun(NamedTuple):
    """A step whose rollouts are under way."""

    slots: list[str]
    """The tasks that TRL will name."""
    tasks: list[str]
    """Those that are played: a curriculum may have replaced them."""


class _Saved(NamedTuple):
    """Such a step of a run that is gone on with."""

    tasks: list[str]
    finished: Mapping[int, Trajectory]


class GroupsAhead(Groups):
    """Plays the rollouts of a step while those of the steps after it go on, as far as the lead allows.

    Tasks are drawn when a step begins, in order, and seeds follow from step and task, so that a step's groups do not
    depend on what is done first. What has ended of later steps is remembered with the run; the rest begins again.
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

        Raises:
            ConfigError: `source` cannot begin the rollouts of a step to come.
        """
        super().__init__(source, (), size, accelerator, curriculum=curriculum)
        if not isinstance(source, AheadSource):
            raise ConfigError("trainer.ahead", "above 0", "this source of rollouts has no `begin`; leave it at 0")
        self._lead, self._optimizer_steps = lead, optimizer_steps
        self._early, self._upcoming = source, upcoming
        self._slots: Iterator[Sequence[str]] | None = None
        self._begun: dict[int, _Begun] = {}
        self._saved: dict[int, _Saved] = {}

    def play(self, slots: Sequence[str], step: int) -> tuple[Trajectory, ...]:
        """See `Groups.play`; on the way, the rollouts of later steps begin."""
        now = step // self._optimizer_steps
        for later in self._lead.reached(now):
            self._begin(later)
        begun = self._begun.pop(now)
        if begun.slots != list(slots):
            raise InvariantError(f"step {now} has the tasks {list(slots)}, and began with those for {begun.slots}")
        played = self._early.collect(begun.tasks, step)
        check_rollouts(played, begun.tasks, step)
        return tuple(played)

    def _begin(self, step: int) -> None:
        self._slots = self._slots or self._upcoming()
        slots = list(next(self._slots))
        saved = self._saved.pop(step, None)
        if saved is None:
            chosen = assigned(self._curriculum, slots, self._size) if self._curriculum is not None else slots
            saved = _Saved(list(chosen), {})
        self._begun[step] = _Begun(slots, saved.tasks)
        self._early.begin(saved.tasks, step * self._optimizer_steps, saved.finished)

    def memory(self) -> str:
        """The tasks of the steps that are under way, and their rollouts that have ended, as JSON."""
        return json.dumps({step: self._saved_of(step, begun) for step, begun in self._begun.items()})

    def _saved_of(self, step: int, begun: _Begun) -> Mapping[str, object]:
        finished = self._early.finished(step * self._optimizer_steps)
        # Of a workspace a record has the name alone: a child's is not found by its task.
        kept = {n: t for n, t in finished.items() if all(child.workspace is None for child in t.children)}
        return {"tasks": begun.tasks, "finished": {n: to_record(Credited(t)) for n, t in kept.items()}}

    def remember(self, memory: str) -> None:
        """Go on from what `memory` gave."""
        for step, told in json.loads(memory).items():
            finished = {int(n): from_record(record).trajectory for n, record in told["finished"].items()}
            self._saved[int(step)] = _Saved(told["tasks"], finished)
