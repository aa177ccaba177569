"""The groups of later steps, played while the policy is updated."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from accelerate import Accelerator

from repl_rl.errors import ConfigError, InvariantError
from repl_rl.record.trajectory import Trajectory
from repl_rl.tasks import Curriculum, assigned
from repl_rl.trainer.choices import Plan, Windowed
from repl_rl.trainer.groups import Groups
from repl_rl.trainer.lead import Lead, Window
from repl_rl.trainer.source import AheadSource, RolloutSource, WindowedSource
from repl_rl.trainer.underway import StepShape, UnderWay


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
        self._groups = 0
        """Of a step; the first one tells."""
        self._under_way: UnderWay | None = None
        self._memory = "{}"

    def play(self, slots: Sequence[str], step: int) -> tuple[Trajectory, ...]:
        """See `Groups.play`; on the way, the rollouts of later steps begin."""
        now = step // self._optimizer_steps
        if self._under_way is None:
            self._groups = len(slots) // self._size
            shape = StepShape(self._groups, self._size, self._optimizer_steps)
            self._under_way = UnderWay.opened(self._early, shape, self._width, self._memory, now)
        for later in self._lead.reached(now):
            self._slots = self._slots or self._upcoming()
            self._named[later] = upcoming = list(next(self._slots))
            self._under_way.begin(later, partial(self._chosen, upcoming))
        if (named := self._named.pop(now)) != list(slots):
            raise InvariantError(f"step {now} has the tasks {list(slots)}, and began with those for {named}")
        return tuple(_learned(t, step) for t in self._under_way.take(now))

    @property
    def oldest(self) -> int:
        """How many steps old a line can be when it is learned from."""
        return Window.oldest(self._width, self._lead.ahead, self._groups)

    @property
    def _width(self) -> int:
        return Window.wide(self._share, self._lead.ahead, self._groups)

    def _chosen(self, slots: Sequence[str]) -> Sequence[str]:
        return assigned(self._curriculum, slots, self._size) if self._curriculum is not None else slots

    def memory(self) -> str:
        """As JSON: what is under way."""
        return self._memory if self._under_way is None else self._under_way.memory()

    def remember(self, memory: str) -> None:
        """Go on from what `memory` gave."""
        self._memory = memory


def _learned(t: Trajectory, step: int) -> Trajectory:
    """With the step that learns from it, in place of the one that it began for."""
    if t.policy_step == step:
        return t
    return replace(t, policy_step=step, children=tuple(_learned(child, step) for child in t.children))
