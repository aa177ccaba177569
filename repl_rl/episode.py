"""One rollout's recorder: what a sampler holds while it samples, pushes, observes and rewards.

The episode owns the token record, so a sampler cannot get masks, log probabilities or lengths wrong. It is the only
place where an engine and a sandbox meet.
"""

import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from repl_rl.console import LineBuffer, likely_silent, prompt
from repl_rl.engine.ahead import AheadSession, Guess
from repl_rl.engine.base import Chunk, ChunkEnd, EngineSession, Watch
from repl_rl.errors import ConfigError, InvariantError, SandboxFault
from repl_rl.renderer import Renderer
from repl_rl.sandbox.base import PushResult, Sandbox, SandboxSession
from repl_rl.tasks import Task
from repl_rl.trajectory import (
    Execution,
    Failure,
    Line,
    LineEnd,
    LineStatus,
    NamedReward,
    Observed,
    Prompt,
    Sampled,
    Segment,
    Stop,
    Trajectory,
)


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Budgets of one rollout. Reaching one ends it with a typed `Stop`."""

    max_lines: int = 8
    """Sampled lines (>= 1)."""
    max_line_tokens: int = 48
    """Tokens of one line (>= 1); a longer line is cut and ends the rollout."""
    max_observation_tokens: int = 128
    """Tokens of one observation (>= 16); the middle of a longer one gives way to a visible marker."""
    max_wall_s: float = 120.0
    """Wall clock of a rollout, seconds (> 0)."""
    optimistic: bool = False
    """Sample on while a line that likely prints nothing runs; taken back if it prints. Pays where lines are slow."""
    give_up_after: int = 0
    """Lines in a row with the same error, void, or timed out, after which a rollout is given up (>= 2); 0: never."""

    def __post_init__(self) -> None:
        for name, floor in (("max_lines", 1), ("max_line_tokens", 1), ("max_observation_tokens", 16)):
            if getattr(self, name) < floor:
                raise ConfigError(name, getattr(self, name), f"give at least {floor}")
        if self.give_up_after not in (0, *range(2, 1 + max(2, self.max_lines))):
            raise ConfigError("give_up_after", self.give_up_after, "give 0, or 2 to max_lines")
        if not self.max_wall_s > 0:
            raise ConfigError("max_wall_s", self.max_wall_s, "give a positive number of seconds")


@dataclass(frozen=True, slots=True)
class Origin:
    """What a rollout starts from, and the identity of its record."""

    id: str
    task: Task
    prompt: Prompt
    seed: int
    policy_step: int


class Episode:
    """The public handle of one rollout: `sample`, `observe`, `push`, `reward`, `finish`."""

    def __init__(
        self,
        origin: Origin,
        engine: EngineSession,
        sandbox: Sandbox,
        renderer: Renderer,
        limits: RolloutLimits,
        context_tokens: int,
    ) -> None:
        self._origin = origin
        self._engine = engine
        self._sandbox = sandbox
        self._renderer = renderer
        self.limits = limits
        self._context_left = context_tokens - len(origin.prompt.token_ids)
        self._segments: list[Segment] = []
        self._lines: list[Line] = []  # of the sampled segment that is still growing
        self._unpushed: Line | None = None  # the line that `sample` returned last; None once it was pushed
        self._pending: list[int] = []  # observed ids that the engine has not seen yet
        self._buffer = LineBuffer()
        self._resources = AsyncExitStack()
        self._console: SandboxSession | None = None
        self._line_count = 0
        self._more = False  # the console waits for the rest of a cell
        self._stop: Stop | None = None
        self._failure: Failure | None = None
        self._started = time.monotonic()

    async def __aenter__(self) -> "Episode":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._resources.aclose()

    @property
    def task(self) -> Task:
        """The task of this rollout. Its reference answer is there for user code, never for the sandbox."""
        return self._origin.task

    @property
    def ended(self) -> bool:
        """True once nothing further can be sampled."""
        return self._stop is not None

    async def lines(self) -> AsyncIterator[Line]:
        """Sample line after line until the rollout ends. Lines that were cut are recorded but not yielded."""
        while not self.ended:
            line = await self.sample()
            if not self.ended:
                yield line

    async def sample(self, until: str | re.Pattern[str] | None = None, max_tokens: int | None = None) -> Line:
        """Let the policy write until a newline, or until the text written now matches `until`.

        Args:
            until: a regular expression searched in the text of this call; None: one line.
            max_tokens: budget of this call (>= 1); None: `RolloutLimits.max_line_tokens`.

        Returns:
            The recorded line. An end token, a cut or a full context end the rollout: see `ended`.

        Raises:
            ConfigError: the rollout has ended, or `max_tokens` < 1.
            EngineError: see `EngineSession.sample`.
        """
        if self._stop is not None:
            raise ConfigError("episode.sample() after the end of the rollout", str(self._stop), "check episode.ended")
        wanted = self.limits.max_line_tokens if max_tokens is None else max_tokens
        if wanted < 1:
            raise ConfigError("max_tokens", wanted, "give at least 1")
        budget = min(wanted, self._context_left)
        stop_ids = self._renderer.stop_ids if until is None else self._renderer.eos_ids
        chunk = await self._engine.sample(
            self._pending, max_tokens=budget, stop_ids=stop_ids, watch=self._watch(until) if until else None
        )
        self._pending = []
        self._context_left -= len(chunk.token_ids)
        line = self._unpushed = self._line(chunk)
        self._lines.append(line)
        self._line_count += 1
        if line.end is LineEnd.EOS:
            self._stop = Stop.EOS
        elif line.end is LineEnd.LENGTH:
            self._stop = Stop.LINE_TOO_LONG if budget == wanted else Stop.MAX_TOKENS
        return line

    def observe(self, text: str) -> Observed:
        """Splice text that the policy did not write. It is masked, and it may be empty.

        Raises:
            ConfigError: nothing was sampled since the last observation.
        """
        if not self._lines:
            raise ConfigError("episode.observe()", text[:40], "an observation follows a sampled line")
        self._unpushed = None
        observed = self._renderer.observation(text, self.limits.max_observation_tokens)
        self._segments += (Sampled(tuple(self._lines)), observed)
        self._lines = []
        self._pending.extend(observed.token_ids)
        self._context_left -= len(observed.token_ids)
        if self._context_left < 1 and self._stop is None:
            self._stop = Stop.MAX_TOKENS
        return observed

    async def push(self, line: Line) -> PushResult:
        """Execute the last sampled line in this rollout's console, and splice what it printed and the next prompt.

        A token may close several physical lines: they run in order, and their outputs are spliced together after it.

        Raises:
            ConfigError: `line` is not the last sampled line.
            SandboxFault: our console failed; the rollout is dropped.
        """
        if self._unpushed is not line:
            raise ConfigError("episode.push()", line.text, "push the line that was sampled last, once")
        self._unpushed = None
        if self._console is None:
            self._console = await self._resources.enter_async_context(self._sandbox.session())
        results: list[PushResult] = []
        closed = self._buffer.feed(line.text)
        self._sample_ahead(closed)
        for physical in closed:
            results.append(await self._console.push(physical))
            if self._console.ended:
                break
        result = _combine(results)
        self._lines[-1] = replace(self._lines[-1], execution=Execution(result.status, result.elapsed_s, result.answer))
        if result.status is LineStatus.SANDBOX_FAULT:
            raise SandboxFault(result.text or "the console did not answer")
        self._conclude(result)
        return result

    def reward(self, value: float, name: str = "sampler") -> None:
        """Give the last sampled line a reward of its own (dimensionless, finite), under a name for the metrics.

        Raises:
            ConfigError: no line was sampled yet.
            InvariantError: `value` is not finite.
        """
        given = NamedReward(name, float(value))
        if self._lines:
            self._lines[-1] = replace(self._lines[-1], rewards=(*self._lines[-1].rewards, given))
            return
        for i in reversed(range(len(self._segments))):
            segment = self._segments[i]
            if isinstance(segment, Sampled):
                last = replace(segment.lines[-1], rewards=(*segment.lines[-1].rewards, given))
                self._segments[i] = Sampled((*segment.lines[:-1], last))
                return
        raise ConfigError("episode.reward()", value, "sample a line first")

    def finish(self, reason: Stop = Stop.FINISHED) -> None:
        """End the rollout. The first reason stands."""
        self._stop = self._stop or reason

    def fail(self, failure: Exception) -> None:
        """Record our own failure: the trajectory is kept, never rewarded and never trained on."""
        self._stop = Stop.FAULT
        self._failure = Failure(type(failure).__name__, str(failure))

    def trajectory(self) -> Trajectory:
        """The record so far.

        Raises:
            InvariantError: the ids that the engine saw are not a prefix of the record (invariant I5).
        """
        segments = (*self._segments, Sampled(tuple(self._lines))) if self._lines else tuple(self._segments)
        record = Trajectory(
            id=self._origin.id,
            task_id=self._origin.task.id,
            prompt=self._origin.prompt,
            segments=segments,
            stop=self._stop or Stop.FINISHED,
            policy_step=self._origin.policy_step,
            seed=self._origin.seed,
            wall_s=time.monotonic() - self._started,
            failure=self._failure,
        )
        if self._failure is None:
            _check_prefix(self._engine.ids, (*record.prompt.token_ids, *record.completion_ids), record.id)
        return record

    def _sample_ahead(self, closed: Sequence[str]) -> None:
        """Let the engine go on as if the line that is about to run printed nothing, where that is likely."""
        if not isinstance(self._engine, AheadSession) or self._more or len(closed) != 1:
            return
        observed = self._renderer.encode(prompt(False))
        room = self._context_left - len(observed)
        if room >= 1 and self._line_count < self.limits.max_lines and likely_silent(closed[0]):
            most = min(self.limits.max_line_tokens, room)
            self._engine.guess(Guess(observed, most, self._renderer.stop_ids))

    def _conclude(self, result: PushResult) -> None:
        """Splice a result, and end the rollout where the console or a budget says so."""
        assert self._console is not None
        self._more = result.more
        if self._console.ended:
            self._stop = Stop.ANSWERED if result.answer is not None else Stop.EXITED
            if result.text:
                self.observe(result.text)
            return
        if self._line_count >= self.limits.max_lines:
            self._stop = Stop.MAX_LINES
        self.observe(result.text + prompt(result.more))

    def _line(self, chunk: Chunk) -> Line:
        last = chunk.token_ids[-1]
        if last in self._renderer.eos_ids:
            text, end = self._renderer.decode(chunk.token_ids[:-1]), LineEnd.EOS
        else:
            text = self._renderer.decode(chunk.token_ids)
            ends = {ChunkEnd.STOP_ID: LineEnd.NEWLINE, ChunkEnd.WATCH: LineEnd.MATCH, ChunkEnd.LENGTH: LineEnd.LENGTH}
            end = ends[chunk.end]
        return Line(chunk.token_ids, chunk.logprobs, text, end)

    def _watch(self, until: str | re.Pattern[str]) -> Watch:
        pattern = re.compile(until)
        ids: list[int] = []

        def matches(token: int) -> bool:
            ids.append(token)
            return pattern.search(self._renderer.decode(ids)) is not None

        return matches


def _combine(results: Sequence[PushResult]) -> PushResult:
    """One result for the physical lines that one token closed: the first that is more than fine decides."""
    if len(results) == 1:
        return results[0]
    plain = (LineStatus.OK, LineStatus.INCOMPLETE)
    deciding = next((r for r in results if r.status not in plain), results[-1])
    return PushResult(
        text="".join(r.text for r in results),
        more=results[-1].more,
        status=deciding.status,
        answer=deciding.answer,
        elapsed_s=sum(r.elapsed_s for r in results),
    )


def _check_prefix(seen: Sequence[int], record: Sequence[int], id: str) -> None:
    # Ids are only ever appended on both sides, so equality at the end implies that every request was a prefix.
    if tuple(seen) != tuple(record[: len(seen)]):
        at = next((i for i, (a, b) in enumerate(zip(seen, record, strict=False)) if a != b), len(record))
        raise InvariantError(f"trajectory {id}: the engine's ids differ from the record at position {at} (I5)")
