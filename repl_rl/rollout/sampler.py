"""The extension point: a `RolloutSampler` decides how one rollout goes."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Annotated

from repl_rl.errors import ConfigError, ReplRLError
from repl_rl.record.console import PS1
from repl_rl.record.trajectory import Prompt, Stop, Trajectory
from repl_rl.rollout.choosing import agreed
from repl_rl.rollout.doomed import Streak
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.limits import RolloutLimits
from repl_rl.rollout.prompts import OWN
from repl_rl.rollout.renderer import Renderer
from repl_rl.settings.bounds import AtLeast
from repl_rl.tasks import Task

API_VERSION = 1
"""Of `RolloutSampler` and `Episode`: it grows when a sampler written for the one before may break."""
THINKING_TOKENS = 1024
"""Budget of a span of thinking, unless another is chosen."""


class RolloutSampler(ABC):
    """Decides what is sampled, executed, observed and rewarded in one rollout.

    One instance serves all rollouts, concurrently: keep the state of a rollout in local variables, or under its
    `episode.id` from `on_start` to `on_end`.
    """

    api_version: int = API_VERSION
    """Write down the version that you wrote a sampler for, and another one refuses to load it."""
    rehearsals: Sequence[Sequence[str]] = ()
    """What a policy might write, for `repl-rl sampler check`: rollouts, each a sequence of turns. An end token is put
    after each turn; the sampler stops within a turn wherever it likes."""

    @abstractmethod
    async def rollout(self, episode: Episode) -> None:
        """Drive `episode` until it has ended, or return to end it (`Stop.FINISHED`).

        Whatever it raises is reported as an error of this class. That rollout is dropped and the others go on; the
        run stops when most rollouts fail so. Let cancellation pass, and never block the thread: others wait.
        """

    async def on_start(self, episode: Episode) -> None:  # noqa: B027 (a hook: most samplers have nothing to begin)
        """Make what this rollout needs of its own, under `episode.id`; called once, before `rollout`.

        What it raises drops the rollout, as if `rollout` had; it may take as long. `on_end` comes all the same.
        """

    async def on_end(self, rollout: str, result: Trajectory | BaseException) -> None:  # noqa: B027
        """Free what `on_start` made; called exactly once for each call of that, whatever happened meanwhile.

        Not called is it where `on_start` was not: a prompt that fills the context, a cancellation before the rollout
        had its place. What it raises drops the rollout; it has five seconds.

        Args:
            rollout: the `episode.id` of that rollout.
            result: its graded trajectory, with a `failure` where it was dropped; or what ended it from outside, such
                as `asyncio.CancelledError`, or an error that stops the run.
        """

    def opened(self) -> AbstractAsyncContextManager[None]:
        """What it needs for the length of a run, such as a second engine; entered beside the policy's by `World`."""
        return nullcontext()

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        """What a rollout of `task` starts from, the same for all rollouts of a task.

        Here it is the prompt of a console.

        Args:
            task: the task; its reference answer stays out of the prompt.
            renderer: encodes text.
            template: the run's prompt template, see `Renderer.prompt`.
            version: of the Python in the sandbox.
        """
        return renderer.prompt(task.question, template, version, told=task.told)

    def check(self, limits: RolloutLimits) -> None:  # noqa: B027 (a hook: most samplers have nothing to refuse)
        """Refuse budgets under which an option of this sampler has no effect; called before anything is opened.

        Raises:
            ConfigError: there is such an option.
        """

    def check_policy(self, renderer: Renderer, template: str) -> None:
        """Refuse a policy that this sampler cannot be played with; called before anything is opened.

        Here it writes a prompt. Where rollouts go on in the model's chat format, override it and try that too.

        Args:
            renderer: of the policy.
            template: the run's prompt template.

        Raises:
            ConfigError: the tokenizer or its chat template does not fit, or what was chosen about them has no effect.
        """
        probe = Task("probe", "?", "")
        try:
            prompt = self.prompt(probe, renderer, template, "3")
            other = self.prompt(probe, renderer, "bare", "3") if template.startswith(OWN) else None
        except ReplRLError:
            raise
        except Exception:  # tasks of a user may be of a form that the probe is not of
            return
        if prompt == other:
            raise ConfigError(
                "prompt", template[:60], f"{type(self).__name__} writes its prompt without it; leave it out"
            )
        if renderer.chat.arguments and not renderer.chat.applied:
            remedy = f"no chat template is in the prompt of {type(self).__name__}; leave it out, or use --prompt chat"
            raise ConfigError("chat", renderer.chat.arguments, remedy)

    def fallback(self, renderer: Renderer) -> str | None:
        """What of it works in a lesser way with this policy, for log and summary; None: nothing does."""
        return None

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Figures of its own about a batch, name to value; here none."""
        return {}


class ReplSampler(RolloutSampler):
    """The line console: each line is executed as soon as it is written, and its output is spliced in."""

    give_up_after: int = 0
    candidates: int = 1
    thinking: str = ""
    thinking_tokens: int = THINKING_TOKENS
    rehearsals: Sequence[Sequence[str]] = (
        ("x = 6 * 7\nx\n1/0\nsubmit_final_answer(x)\n",),
        ("for i in range(2):\n    i\n\nexit()\n",),
    )

    def __init__(
        self,
        *,
        give_up_after: Annotated[int, AtLeast(0)] = 0,
        candidates: Annotated[int, AtLeast(1)] = 1,
        thinking: str = "",
        thinking_tokens: Annotated[int, AtLeast(1)] = THINKING_TOKENS,
    ) -> None:
        """Make one.

        Args:
            give_up_after: lines in a row with the same error, void, or timed out, after which a rollout is given up
                (>= 2); 0: never.
            candidates: lines written at each place (>= 1), of which the one written most often is executed, the
                likeliest of several such; the others are kept beside it, and not trained.
            thinking: what ends a span of free text before the first line, such as "</think>": sampled and trained,
                never executed. The console begins after it, without its banner. "": there is no such span.
            thinking_tokens: budget of that span (>= 1); a longer one is cut and ends the rollout.

        Raises:
            ConfigError: `give_up_after` is 1 or negative, or there is a budget for thinking without `thinking`.
        """
        if thinking_tokens != THINKING_TOKENS and not thinking:
            raise ConfigError("thinking_tokens", thinking_tokens, 'it has no effect without thinking="</think>"')
        if give_up_after == 1 or give_up_after < 0:
            raise ConfigError("give_up_after", give_up_after, "give 0, or 2 to max_lines")
        self.give_up_after = give_up_after
        self.candidates = candidates
        self.thinking = thinking
        self.thinking_tokens = thinking_tokens
        if thinking:
            self.rehearsals = [(f"hm{thinking}\n{first}", *more) for first, *more in self.rehearsals]

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        """See `RolloutSampler.prompt`; with `thinking`, it ends where the console would begin."""
        return renderer.prompt(task.question, template, version, console=not self.thinking, told=task.told)

    def check_policy(self, renderer: Renderer, template: str) -> None:
        """See `RolloutSampler.check_policy`."""
        super().check_policy(renderer, template)
        if self.thinking and renderer.prompt("?", template, console=False).text.rstrip().endswith(self.thinking):
            raise ConfigError("thinking", self.thinking, "the chat template ends the span itself; leave it out")

    def check(self, limits: RolloutLimits) -> None:
        """See `RolloutSampler.check`."""
        if self.give_up_after > limits.max_lines:
            raise ConfigError("give_up_after", self.give_up_after, f"give 0, or 2 to max_lines ({limits.max_lines})")

    async def rollout(self, episode: Episode) -> None:
        if self.thinking and not episode.begun:
            span = await episode.sample(until=re.escape(self.thinking), max_tokens=self.thinking_tokens)
            if not episode.ended:
                episode.observe(("" if span.text.endswith("\n") else "\n") + PS1)
        streak = Streak(self.give_up_after)
        write = partial(episode.choose, self.candidates, agreed) if self.candidates > 1 else None
        async for line in episode.lines(write):
            if streak.dooms(line.text, await episode.push(line)):
                episode.finish(Stop.DOOMED)

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """See `RolloutSampler.metrics`; with `candidates`, the tokens that were sampled and not chosen."""
        if self.candidates == 1:
            return {}
        others = (other for t in trajectories for line in t.lines for other in line.alternatives)
        return {"alternative_tokens": float(sum(len(other.token_ids) for other in others))}
