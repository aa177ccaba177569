"""The extension point: a `RolloutSampler` decides how one rollout goes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated

from repl_rl.errors import ConfigError
from repl_rl.record.trajectory import Prompt, Stop, Trajectory
from repl_rl.rollout.doomed import Streak
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.limits import RolloutLimits
from repl_rl.rollout.renderer import Renderer
from repl_rl.settings.bounds import AtLeast
from repl_rl.tasks import Task

API_VERSION = 1
"""Of `RolloutSampler` and `Episode`: it grows when a sampler written for the one before may break."""


class RolloutSampler(ABC):
    """Decides what is sampled, executed, observed and rewarded in one rollout.

    One instance serves all rollouts, concurrently: keep the state of a rollout in local variables.
    """

    api_version: int = API_VERSION
    """Write down the version that you wrote a sampler for, and another one refuses to load it."""
    rehearsals: Sequence[Sequence[str]] = ()
    """What a policy might write, for `repl-rl sampler check`: rollouts, each a sequence of turns. An end token is put
    after each turn; the sampler stops within a turn wherever it likes."""

    optimistic: bool = False
    """Sample on while a line that likely prints nothing runs; it is taken back if it prints."""

    @abstractmethod
    async def rollout(self, episode: Episode) -> None:
        """Drive `episode` until it has ended, or return to end it (`Stop.FINISHED`).

        Whatever it raises is reported as an error of this class. That rollout is dropped and the others go on; the
        run stops when most rollouts fail so. Let cancellation pass, and never block the thread: others wait.
        """

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        """What a rollout of `task` starts from, the same for all rollouts of a task.

        Here it is the prompt of a console.

        Args:
            task: the task; its reference answer stays out of the prompt.
            renderer: encodes text.
            template: the run's prompt template, see `Renderer.prompt`.
            version: of the Python in the sandbox.
        """
        return renderer.prompt(task.question, template, version)

    def check(self, limits: RolloutLimits) -> None:  # noqa: B027 (a hook: most samplers have nothing to refuse)
        """Refuse budgets under which an option of this sampler has no effect; called before anything is opened.

        Raises:
            ConfigError: there is such an option.
        """

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Figures of its own about a batch, name to value; here none."""
        return {}


class ReplSampler(RolloutSampler):
    """The line console: each line is executed as soon as it is written, and its output is spliced in."""

    give_up_after: int = 0
    rehearsals = (("x = 6 * 7\nx\n1/0\nsubmit_final_answer(x)\n",), ("for i in range(2):\n    i\n\nexit()\n",))

    def __init__(self, *, give_up_after: Annotated[int, AtLeast(0)] = 0, optimistic: bool = False) -> None:
        """Make one.

        Args:
            give_up_after: lines in a row with the same error, void, or timed out, after which a rollout is given up
                (>= 2); 0: never.
            optimistic: sample on while a line that likely prints nothing runs; taken back if it prints. Pays where
                lines are slow.

        Raises:
            ConfigError: `give_up_after` is 1 or negative.
        """
        if give_up_after == 1 or give_up_after < 0:
            raise ConfigError("give_up_after", give_up_after, "give 0, or 2 to max_lines")
        self.give_up_after = give_up_after
        self.optimistic = optimistic

    def check(self, limits: RolloutLimits) -> None:
        """See `RolloutSampler.check`."""
        if self.give_up_after > limits.max_lines:
            raise ConfigError("give_up_after", self.give_up_after, f"give 0, or 2 to max_lines ({limits.max_lines})")

    async def rollout(self, episode: Episode) -> None:
        streak = Streak(self.give_up_after)
        async for line in episode.lines():
            if streak.dooms(line.text, await episode.push(line)):
                episode.finish(Stop.DOOMED)
