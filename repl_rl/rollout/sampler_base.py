"""Samplers of rollouts: the extension point `RolloutSampler`, and the shipped line console `ReplSampler`.

A sampler drives one rollout at a time. `ReplSampler` can end a rollout early, see `ErrorStreakStopper`; this is off by
default.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Annotated, ClassVar

from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ConfigError, ReplRLError
from repl_rl.rollout.episode import Episode, choose_by_majority
from repl_rl.rollout.prompts import OWN
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox.base import LineResult
from repl_rl.settings.value_bounds import AtLeast
from repl_rl.tasks import Task
from repl_rl.trajectory.console_text import PS1, is_noop
from repl_rl.trajectory.trajectory import LineStatus, Prompt, Stop, Trajectory

API_VERSION = 1
"""Version of `RolloutSampler` and `Episode`. It grows if a sampler for the previous version may break."""
THINKING_TOKENS = 1024
"""Default token budget of a thinking span."""


@keeps_old_names
class RolloutSampler(ABC):
    """Driver of rollouts: it decides what is sampled, executed, observed and rewarded.

    One instance serves all rollouts concurrently. Keep the state of a rollout in local variables, or under its
    `episode.id` from `on_start` to `on_end`.
    """

    kind: ClassVar[str]
    """Name of a registered sampler. One that is given as `module:name` needs none."""
    about: ClassVar[str]
    """Description of a registered sampler in a few words, for the help."""
    api_version: int = API_VERSION
    """API version that a sampler was written for. Every other version refuses to load it."""
    rehearsals: Sequence[Sequence[str]] = ()
    """Possible rollouts of a policy for `repl-rl sampler check`, each a sequence of turns.

    An end token follows each turn. The sampler may stop anywhere within a turn.
    """

    @abstractmethod
    async def rollout(self, episode: Episode) -> None:
        """Drive `episode` until it has ended, or return to end it (`Stop.FINISHED`).

        An exception is reported as an error of this class and drops only this rollout. The run stops if most rollouts
        fail so. Do not catch cancellation, and never block the thread: other rollouts share it.
        """

    async def on_start(self, episode: Episode) -> None:  # noqa: B027 (a hook: most samplers have nothing to begin)
        """Create the resources of this rollout under `episode.id`; called once, before `rollout`.

        An exception drops the rollout, as one of `rollout` does. The time limit is the same. `on_end` is called in any
        case.
        """

    async def on_end(self, rollout: str, result: Trajectory | BaseException) -> None:  # noqa: B027
        """Free the resources of `on_start`; called exactly once per call of `on_start`.

        It is not called without `on_start`: after a prompt that fills the context, or a cancellation before the rollout
        started. An exception drops the rollout. The time limit is five seconds.

        Args:
            rollout: `episode.id` of the rollout.
            result: graded trajectory, with a `failure` if the rollout was dropped. Otherwise the exception that ended
                it from outside, such as `asyncio.CancelledError` or an error that stops the run.
        """

    def open_resources(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager of the resources of a whole run, such as a second engine.

        `RolloutConfig` enters it together with the policy's engine.
        """
        return nullcontext()

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        """Return the prompt of a rollout of `task`, the same for all rollouts of a task.

        The default is the prompt of a console.

        Args:
            task: task of the rollout; its reference answer stays out of the prompt.
            renderer: encoder of text.
            template: prompt template of the run, see `Renderer.build_prompt`.
            version: Python version in the sandbox.
        """
        return renderer.build_prompt(task.question, template, version, told=task.workspace_text)

    def check(self, limits: RolloutLimits) -> None:  # noqa: B027 (a hook: most samplers have nothing to refuse)
        """Refuse budgets under which an option of this sampler has no effect; called before anything is opened.

        Raises:
            ConfigError: an option has no effect.
        """

    def check_policy(self, renderer: Renderer, template: str) -> None:
        """Refuse a policy that this sampler cannot be used with; called before anything is opened.

        The default builds a prompt. If rollouts continue in the model's chat format, override it to try that too.

        Args:
            renderer: renderer of the policy.
            template: prompt template of the run.

        Raises:
            ConfigError: the tokenizer or its chat template does not fit, or a setting of either has no effect.
        """
        probe = Task("probe", "?", "")
        try:
            prompt = self.prompt(probe, renderer, template, "3")
            # A text that leads to the same prompt as `bare` is not used by this sampler.
            other = self.prompt(probe, renderer, "bare", "3") if template.startswith(OWN) else None
        except ReplRLError:
            raise
        except Exception:  # tasks of a user may have another form than the probe
            return
        if prompt == other:
            raise ConfigError(
                "prompt", template[:60], f"{type(self).__name__} does not use it in its prompt; leave it out"
            )
        if renderer.chat_template.kwargs and not renderer.chat_template.was_applied:
            remedy = f"no chat template is in the prompt of {type(self).__name__}; leave it out, or use --prompt chat"
            raise ConfigError("chat_template_kwargs", renderer.chat_template.kwargs, remedy)

    def fallback(self, renderer: Renderer) -> str | None:
        """Describe the part of this sampler that works in a lesser way with this policy, for log and summary.

        None means that everything works as configured.
        """
        return None

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return the sampler's own metrics of a batch, name to value; none by default."""
        return {}


@keeps_old_names
class ReplSampler(RolloutSampler):
    """Line console: each line runs as soon as it is written, and its output is spliced in."""

    kind: ClassVar[str] = "repl"
    about: ClassVar[str] = "runs each line"

    max_error_streak: int = 0
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
        max_error_streak: Annotated[int, AtLeast(0)] = 0,
        candidates: Annotated[int, AtLeast(1)] = 1,
        thinking: str = "",
        thinking_tokens: Annotated[int, AtLeast(1)] = THINKING_TOKENS,
    ) -> None:
        """Set the options.

        Args:
            max_error_streak: number of consecutive lines with the same error, void, or timed out, that stops a rollout
                early (>= 2); 0 disables it.
            candidates: lines sampled per position (>= 1). The most frequent one is executed, and the likeliest wins a
                tie. The others are recorded, and not trained.
            thinking: end of a span of free text before the first line, such as "</think>". The span is sampled and
                trained, never executed. The console begins after it, without its banner. "" disables it.
            thinking_tokens: token budget of that span (>= 1); a longer one is truncated and ends the rollout.

        Raises:
            ConfigError: `max_error_streak` is 1 or negative, or `thinking_tokens` is set without `thinking`.
        """
        if thinking_tokens != THINKING_TOKENS and not thinking:
            raise ConfigError("thinking_tokens", thinking_tokens, 'it has no effect without thinking="</think>"')
        if max_error_streak == 1 or max_error_streak < 0:
            raise ConfigError("max_error_streak", max_error_streak, "give 0, or 2 to max_lines")
        self.max_error_streak = max_error_streak
        self.candidates = candidates
        self.thinking = thinking
        self.thinking_tokens = thinking_tokens
        # Rehearsed rollouts begin with a thinking span, too.
        if thinking:
            self.rehearsals = [(f"hm{thinking}\n{turn}", *further) for turn, *further in self.rehearsals]

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        """See `RolloutSampler.prompt`; with `thinking`, the prompt ends before the console begins."""
        return renderer.build_prompt(
            task.question, template, version, console=not self.thinking, told=task.workspace_text
        )

    def check_policy(self, renderer: Renderer, template: str) -> None:
        """See `RolloutSampler.check_policy`."""
        super().check_policy(renderer, template)
        if self.thinking and renderer.build_prompt("?", template, console=False).text.rstrip().endswith(self.thinking):
            raise ConfigError("thinking", self.thinking, "the chat template ends the span itself; leave it out")

    def check(self, limits: RolloutLimits) -> None:
        """See `RolloutSampler.check`."""
        if self.max_error_streak > limits.max_lines:
            raise ConfigError(
                "max_error_streak", self.max_error_streak, f"give 0, or 2 to max_lines ({limits.max_lines})"
            )

    async def rollout(self, episode: Episode) -> None:
        """See `RolloutSampler.rollout`."""
        # Sample the thinking span first, then splice in the first console prompt.
        if self.thinking and not episode.has_lines:
            span = await episode.sample(until=re.escape(self.thinking), max_tokens=self.thinking_tokens)
            if not episode.ended:
                episode.observe(("" if span.text.endswith("\n") else "\n") + PS1)
        # Each line runs as soon as it is sampled, or chosen among candidates.
        streak = ErrorStreakStopper(self.max_error_streak)
        write = partial(episode.choose, self.candidates, choose_by_majority) if self.candidates > 1 else None
        async for line in episode.lines(write):
            if streak.should_stop(line.text, await episode.push(line)):
                episode.finish(Stop.EARLY_STOPPED)

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """See `RolloutSampler.metrics`; with `candidates`, the number of tokens that were sampled and not chosen."""
        if self.candidates == 1:
            return {}
        alternatives = (alternative for t in trajectories for line in t.lines for alternative in line.alternatives)
        return {"alternative_tokens": float(sum(len(alternative.token_ids) for alternative in alternatives))}


class ErrorStreakStopper:
    """Early stopping: a counter of consecutive lines of one kind, which ends a rollout with `Stop.EARLY_STOPPED`.

    The kinds are lines that end in the very same error message, lines that time out, and void lines. A void line is
    blank, a comment or `pass` where a cell would start.

    A stopped rollout is graded and trained on like any other. Later lines are never sampled, so early stopping changes
    which rollouts are seen, as `max_lines` does. Use it if such rollouts are known to fail.
    """

    def __init__(self, max_streak: int) -> None:
        """Set the number of consecutive lines of one kind that stops a rollout; 0 disables it."""
        self._max_streak = max_streak
        self._kind: str | None = None
        self._count = 0
        self._in_block = False

    def should_stop(self, text: str, result: LineResult) -> bool:
        """Count a line with its result, and return True if the rollout should end."""
        kind = self._classify_line(text, result)
        self._in_block = result.incomplete
        # A line of another kind begins a new streak; a line without a kind ends the streak.
        self._count = self._count + 1 if kind is not None and kind == self._kind else int(kind is not None)
        self._kind = kind
        return 0 < self._max_streak <= self._count

    def _classify_line(self, text: str, result: LineResult) -> str | None:
        """Return the kind of a line, or None for a line that begins no streak."""
        if result.status is LineStatus.TIMEOUT:
            return "timeout"
        if result.status.is_error:
            # The last line of a traceback has the error class and its message.
            return result.text.rstrip("\n").rpartition("\n")[2]
        return "void" if is_noop(text) and not self._in_block and not result.incomplete else None


def count_lines_saved(trajectories: Sequence[Trajectory], max_lines: int) -> int:
    """Return the largest number of lines that early stopping can have saved."""
    return sum(max_lines - len(t.lines) for t in trajectories if t.stop is Stop.EARLY_STOPPED)
