"""Episode: the recorder of one rollout, with which a sampler samples, executes, observes and rewards.

The episode owns the token record, so a sampler cannot get masks, log probabilities or lengths wrong.
"""

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace

from repl_rl.engine.base import EngineSession
from repl_rl.errors import ConfigError, SandboxFault, SandboxLost
from repl_rl.judges import verdict
from repl_rl.record.console import prompt
from repl_rl.record.record import UNFOLLOWED, Followed, Origin, Record
from repl_rl.record.trajectory import Execution, Line, LineEnd, LineStatus, Observed, Segment, Stop, Trajectory
from repl_rl.rollout.choosing import Choose, chosen
from repl_rl.rollout.console import Console
from repl_rl.rollout.earning import Earning
from repl_rl.rollout.ending import Ending
from repl_rl.rollout.host_session import HostSession
from repl_rl.rollout.limits import RolloutLimits
from repl_rl.rollout.renderer import Renderer
from repl_rl.rollout.writing import Watching, Writer
from repl_rl.sandbox.base import PushResult, Sandbox
from repl_rl.sandbox.lines import combined
from repl_rl.tasks import Task


class Episode(Earning):
    """Public handle of one rollout: `sample` or `turn`, `push` or `execute`, `observe`, `reward`, `submit`."""

    def __init__(
        self,
        origin: Origin,
        engine: EngineSession,
        sandbox: Sandbox,
        renderer: Renderer,
        limits: RolloutLimits,
        context_tokens: int,
        host: HostSession | None = None,
        followed: Followed = UNFOLLOWED,
    ) -> None:
        super().__init__(Record(origin, followed))
        self.renderer = renderer
        """Owner of the tokenizer, for samplers that splice a model's chat format."""
        self.limits = limits
        room = context_tokens - len(origin.prompt.token_ids)
        self._writer = Writer(engine, renderer, origin.prompt, room, followed.most_tokens)
        self._sandbox = sandbox
        self._console = Console(sandbox, origin.task, host)
        self._ending = Ending()
        self._started = time.monotonic()

    async def __aenter__(self) -> "Episode":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._console.aclose()

    @property
    def id(self) -> str:
        """Id of this rollout and of its trajectory: policy step, task, and index among the rollouts of that task.

        It is unique in a run among rollouts of its kind (training, greedy, tampered). A resumed run uses the same ids.
        """
        return self._record.origin.id

    @property
    def task(self) -> Task:
        """Task of this rollout. Its reference answer is for user code, never for the sandbox."""
        return self._record.origin.task

    @property
    def begun(self) -> bool:
        """True once a line was sampled or restored."""
        return bool(self._record.line_count)

    @property
    def ended(self) -> bool:
        """True once nothing further can be sampled."""
        return self._ending.stop is not None

    @property
    def lost(self) -> SandboxLost | None:
        """Error that reports the loss of the console, or None. Such a rollout cannot continue."""
        return self._ending.lost

    async def lines(self, write: Callable[[], Awaitable[Line]] | None = None) -> AsyncIterator[Line]:
        """Yield one sampled line after another until the rollout ends.

        `write` samples a line; None means `sample`. Truncated lines are not yielded, and neither are lines without code
        that an end token closes.
        """
        while not self.ended:
            line = await (write or self.sample)()
            if not self._ending.unwanted and (line.end is LineEnd.NEWLINE or self._console.awaits(line)):
                yield line

    async def sample(self, until: str | re.Pattern[str] | None = None, max_tokens: int | None = None) -> Line:
        """Sample until a newline, or until the text of this call matches `until`.

        Args:
            until: regular expression to search in the text of this call; None samples one line. The token that
                completes a match is kept whole, so the line may hold a few characters after it.
            max_tokens: token budget of this call (>= 1); None means `RolloutLimits.max_line_tokens`.

        Returns:
            The recorded line. An end token, a truncation or a full context ends the rollout, see `ended`.

        Raises:
            ConfigError: the rollout has ended, or `max_tokens` < 1.
            EngineError: see `EngineSession.sample`.
        """
        return await self._write(*self._stopping(until), max_tokens)

    async def choose(
        self, count: int, choose: Choose, until: str | re.Pattern[str] | None = None, max_tokens: int | None = None
    ) -> Line:
        """Sample `count` (>= 1) lines from the same ids, and continue from the one that `choose` picks.

        The others become its `alternatives`: never executed, and trained only as `Choice` specifies. Otherwise it works
        as `sample`.
        """
        wanted = self._wanted(max_tokens)
        at, line = await chosen(choose, await self._writer.several(count, wanted, *self._stopping(until)))
        await self._writer.take(at)
        return self._wrote(line, wanted)

    def _stopping(self, until: str | re.Pattern[str] | None) -> tuple[frozenset[int], Watching]:
        stop_ids = self.renderer.stop_ids if until is None else self.renderer.eos_ids
        return stop_ids, lambda: self.renderer.watch(until, self._writer.before) if until else None

    async def turn(self, max_tokens: int | None = None) -> Line:
        """Sample until the end token, which ends the turn and not the rollout.

        Arguments, errors and truncation are those of `sample`. `text` excludes the end token.
        """
        return await self._write(self.renderer.eos_ids, lambda: None, max_tokens, turn=True)

    async def _write(
        self, stop_ids: frozenset[int], watching: Watching, max_tokens: int | None, turn: bool = False
    ) -> Line:
        wanted = self._wanted(max_tokens)
        return self._wrote(await self._writer.line(wanted, stop_ids, watching()), wanted, turn)

    def _wanted(self, max_tokens: int | None) -> int:
        if (stop := self._ending.stop) is not None:
            raise ConfigError("episode.sample() after the end of the rollout", str(stop), "check episode.ended")
        return self.limits.max_line_tokens if max_tokens is None else max_tokens

    def _wrote(self, line: Line, wanted: int, turn: bool = False) -> Line:
        # The client that follows the rollout may want nothing after this line.
        if self._record.sampled(line):
            self._ending.refuse()
        # A truncated line has used up its own budget, or else that of the context.
        if line.end is LineEnd.LENGTH:
            self._ending.end(Stop.LINE_TOO_LONG if len(line.token_ids) == wanted else Stop.MAX_TOKENS)
        elif line.end is LineEnd.EOS and not turn:
            self._ending.end(Stop.EOS)
        return line

    def observe(self, text: str | Observed, cut: bool = False) -> Observed:
        """Splice in text that the policy did not write. It is masked, and it may be empty.

        A string is encoded alone, without control tokens, and its middle is cut if it is too long. An `Observed` is
        used unchanged. The rollout ends when its lines or its context are used up, see `ended`.

        `cut` means that the middle of the text is already missing, see `PushResult.cut`.

        Raises:
            ConfigError: nothing was sampled since the last observation, the last line was truncated, or our console
                failed.
        """
        if isinstance(text, str):
            rendered = self.renderer.observation(text, self.limits.max_observation_tokens, last=self.ended)
            text = replace(rendered, cut=cut or rendered.cut)
        # The record checks the order, so it comes before the engine.
        self._record.observed(text)
        self._writer.give(text)
        if self._record.line_count >= self.limits.max_lines:
            self._ending.end(Stop.MAX_LINES)
        if self._writer.room < 1:
            self._ending.end(Stop.MAX_TOKENS)
        return text

    async def push(self, line: Line) -> PushResult:
        """Execute the last sampled line in this rollout's console, and splice in its output and the next prompt.

        A token may close several physical lines: they run in order, and their joined outputs follow it. An end token
        closes the line, and an open cell like a blank line. No next prompt is recorded then.

        Raises:
            ConfigError: `line` is not the last sampled line, was executed already, or closes no physical line.
            SandboxFault: our console failed; the rollout is dropped.
        """
        last = self._record.last
        if last is None or last.execution is not None or last.token_ids != line.token_ids:
            raise ConfigError("episode.push()", line.text, "push the line that was sampled last, once")
        physical = self._console.closed(line)
        if not physical:
            raise ConfigError("episode.push()", line.text, "it has no newline; check episode.ended before you push")
        result = await self._run(physical, line.end is LineEnd.EOS)
        shown = result.text if self.ended else result.text + prompt(result.more)
        if shown:
            self.observe(shown, result.cut)
        return result

    async def execute(self, *lines: str) -> PushResult:
        """Run physical lines in this rollout's console for the last sampled line, and splice in nothing.

        Raises:
            ConfigError: nothing was sampled yet, no line is given, or the console has ended.
            SandboxFault: our console failed; the rollout is dropped.
        """
        if not lines or not self.begun:
            raise ConfigError("episode.execute()", lines, "sample a line first, then give at least one to run")
        return await self._run(lines)

    async def _run(self, lines: Sequence[str], closing: bool = False) -> PushResult:
        try:
            results = await self._console.run(lines, closing)
        except SandboxLost as lost:
            self.fail(lost)  # even if the sampler swallows the error
            raise
        # A blank line that closed an open cell is part of the record.
        result, ran = combined(results), (*lines, "")[: len(results)]
        self.executed(Execution(result.status, result.elapsed_s, result.answer, ran, self._console.host.take()))
        if result.status is LineStatus.SANDBOX_FAULT:
            self.fail(fault := SandboxFault(result.text or "the console did not answer"))  # even if it is swallowed
            raise fault
        if result.answer is not None:
            self._ending.answer()
        elif self._console.ended:
            self._ending.end(Stop.EXITED)
        return result

    async def restore(self, segments: Sequence[Segment], ran: Sequence[str], carry: str = "") -> None:
        """Start in the middle: restore recorded segments, and run physical lines to restore the console's state.

        The record keeps its ids, log probabilities, outputs and host answers. New output of the console is not spliced
        in. Restored lines count towards the limits. `carry` begins the next physical line.

        Raises:
            ConfigError: something was sampled already.
            SandboxFault: the console failed, or ended while `ran` ran.
        """
        if self.begun:
            raise ConfigError("episode.restore()", "after a sampled line", "call it first")
        for segment in segments:
            if isinstance(segment, Observed):
                self.observe(segment)
                continue
            for line in segment.lines:
                self._record.sampled(line)
            self._writer.restore(segment.token_ids)
        await self._console.restore(ran, carry, [call for run in self._record.executions for call in run.calls])

    def executed(self, execution: Execution) -> None:
        """Record the execution of the last sampled line, if something other than the console ran it.

        Raises:
            ConfigError: no line was sampled yet.
        """
        self._record.executed(execution)
        if execution.answer is not None:
            self._ending.end(Stop.ANSWERED)

    def submit(self, answer: str) -> None:
        """Submit an answer from the last sampled line as the final one. The host grades it, and the rollout ends."""
        self.executed(Execution(LineStatus.ANSWERED, 0.0, answer))

    async def judge(self, answer: str) -> float:
        """Return the grade of the task's first judge for an answer, as at the end.

        The sampler decides if the policy sees it.

        Raises:
            ConfigError, UserCodeError, SandboxFault: see `repl_rl.judges.graded`.
        """
        so_far = self._record.trajectory(Stop.FINISHED, 0.0, None, None)
        return await verdict(self.task, answer, self._sandbox, so_far)

    def finish(self, reason: Stop = Stop.FINISHED) -> None:
        """End the rollout. Only the first reason is kept.

        Raises:
            ConfigError: only the episode itself records `reason`.
        """
        self._ending.finish(reason)

    def fail(self, failure: Exception) -> None:
        """Record a failure; only the first one is kept.

        The trajectory is stored, never rewarded and never trained on.
        """
        self._ending.fail(failure)

    def trajectory(self) -> Trajectory:
        """Return the record so far.

        Raises:
            InvariantError: the ids that the engine saw are not a prefix of the record (invariant I5).
        """
        stop, failure = self._ending.stop or Stop.FINISHED, self._ending.failure
        # After a failure the engine's ids may be incomplete, so they are not compared.
        seen = None if failure else self._writer.seen
        record = self._record.trajectory(stop, time.monotonic() - self._started, failure, seen)
        return self._console.host.completed(record)
