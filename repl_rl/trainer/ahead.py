"""Async rollouts: groups of later steps are sampled while the policy is updated."""

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
    """Group sampler with async rollouts: later steps run in the background, as far as the lead allows.

    Tasks are drawn when a step begins, in order, and seeds follow from step and task. So the order in which rollouts
    finish does not change the groups. With a FIFO window, it decides only which step trains on a group. Finished
    rollouts of later steps are saved with the run; a resumed run plays the others again.
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
            source: rollout source.
            size: rollouts per group.
            accelerator: accelerator of this process, the only one of the run.
            lead: schedule that decides which steps may begin.
            optimizer_steps: optimizer steps per step.
            upcoming: returns the tasks of the current step, then of each later one; called once, in the first step.
            curriculum: chooses other tasks in their place. None keeps them.
            plan: `Windowed` lets groups of later steps overtake a slow one.

        Raises:
            ConfigError: `source` has no async rollouts, or cannot report which of their groups have finished.
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
        """Task ids that TRL will pass for later steps, by step."""
        self._groups = 0
        """Groups per step, known from the first call of `play` on."""
        self._under_way: UnderWay | None = None
        self._memory = "{}"

    def play(self, slots: Sequence[str], step: int) -> tuple[Trajectory, ...]:
        """Start the rollouts of later steps, and return those of this one; see `Groups.play`."""
        now = step // self._optimizer_steps
        # The first call restores the in-flight steps of a resumed run.
        if self._under_way is None:
            self._groups = len(slots) // self._size
            shape = StepShape(self._groups, self._size, self._optimizer_steps)
            self._under_way = UnderWay.opened(self._early, shape, self._width, self._memory, now)
        # Start each step that the lead allows from now on. In the first call, the current step is one of them.
        for later in self._lead.reached(now):
            self._slots = self._slots or self._upcoming()
            self._named[later] = upcoming = list(next(self._slots))
            self._under_way.begin(later, partial(self._chosen, upcoming))
        # Rollouts began with predicted tasks, so TRL must now ask for the same ones.
        if (named := self._named.pop(now)) != list(slots):
            raise InvariantError(f"step {now} has the tasks {list(slots)}, and began with those for {named}")
        return tuple(_learned(t, step) for t in self._under_way.take(now))

    @property
    def oldest(self) -> int:
        """Largest staleness of a line that is trained on, in steps."""
        return Window.oldest(self._width, self._lead.ahead, self._groups)

    @property
    def _width(self) -> int:
        return Window.wide(self._share, self._lead.ahead, self._groups)

    def _chosen(self, slots: Sequence[str]) -> Sequence[str]:
        return assigned(self._curriculum, slots, self._size) if self._curriculum is not None else slots

    def memory(self) -> str:
        """Return the state of the in-flight steps, as JSON."""
        return self._memory if self._under_way is None else self._under_way.memory()

    def remember(self, memory: str) -> None:
        """Restore the state that `memory` returned, at the next call of `play`."""
        self._memory = memory


def _learned(t: Trajectory, step: int) -> Trajectory:
    """Return the trajectory with the step that trains on it, in place of the one that it began for."""
    if t.policy_step == step:
        return t
    return replace(t, policy_step=step, children=tuple(_learned(child, step) for child in t.children))
