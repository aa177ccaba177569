"""Episode: the recorder of one rollout, with which a sampler samples, executes, observes and rewards.

The episode owns the token record, so a sampler cannot get masks, log probabilities or lengths wrong. It is built out of
the following parts, in this order: the choice among several lines sampled at one position, the console, the rewards
from a sampler, the termination, and the generation with the engine.
"""

import asyncio
import inspect
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

from repl_rl.deprecations import bind_protocol_methods, keeps_old_names
from repl_rl.engine.base import Chunk, EngineSession, Watch
from repl_rl.errors import ConfigError, SandboxFault, SandboxLost, SetupError
from repl_rl.judges import grade_with_first_judge
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox.base import (
    HostCallHandler,
    LineResult,
    Sandbox,
    SandboxSession,
    SupportsHostFunctions,
    combine_results,
    open_console,
    push_each,
)
from repl_rl.tasks import Task
from repl_rl.trajectory.console_text import LineBuffer, choose_prompt, clip_middle
from repl_rl.trajectory.trajectory import (
    UNANSWERED,
    Alternative,
    Execution,
    Failure,
    HostCall,
    Line,
    LineEnd,
    LineStatus,
    Observed,
    OutcomeClaims,
    Prompt,
    Segment,
    Stop,
    Trajectory,
)
from repl_rl.trajectory.trajectory_builder import UNFOLLOWED, EpisodeRecorder, RolloutObserver, RolloutSpec


@dataclass(frozen=True, slots=True)
class Choice:
    """Line, among several candidates, from which a rollout continues."""

    at: int
    """Index of that line, from 0. It is trained as any other line."""
    advantages: Sequence[float] = ()
    """Advantages to train lines that are not chosen: one finite number per candidate line, in order.

    The number of the chosen line is ignored. () trains none of the other lines.
    """


ChooseLine = Callable[[Sequence[Line]], Choice | Awaitable[Choice]]
"""Function of the lines in the order of sampling. A plain one must not block, because other rollouts wait."""


async def choose_line(choose: ChooseLine, lines: Sequence[Line]) -> tuple[int, Line]:
    """Return the index of the chosen line, and that line with the others as its alternatives.

    Raises:
        ConfigError: the line does not exist, or the advantages are not one finite number per line.
    """
    result = choose(lines)
    choice = await result if inspect.isawaitable(result) else result
    if not isinstance(choice, Choice) or not 0 <= choice.at < len(lines):
        raise ConfigError("episode.choose(), choice", choice, f"give a Choice among {len(lines)} lines, from 0")
    # Without advantages, no alternative is trained.
    advantages = choice.advantages or (None,) * len(lines)
    if len(advantages) != len(lines):
        raise ConfigError("episode.choose(), advantages", len(advantages), f"give one for each of {len(lines)} lines")
    alternatives = tuple(
        Alternative(line.token_ids, line.logprobs, line.text, line.end, advantage, line.policy_step)
        for index, (line, advantage) in enumerate(zip(lines, advantages, strict=True))
        if index != choice.at
    )
    return choice.at, replace(lines[choice.at], alternatives=alternatives)


def choose_by_majority(lines: Sequence[Line]) -> Choice:
    """Choose the line whose text was written most often; the one with the likeliest tokens wins a tie."""
    counts = Counter(line.text for line in lines)
    # The earliest line wins if all else is equal.
    return Choice(
        max(range(len(lines)), key=lambda index: (counts[lines[index].text], fmean(lines[index].logprobs), -index))
    )


class HostCallRecorder(HostCallHandler, Protocol):
    """Handler of the host function calls of one rollout, with their record."""

    def take_calls(self) -> tuple[HostCall, ...]:
        """Return the calls since the last `take_calls`."""

    def start_recall(self, calls: Sequence[HostCall]) -> None:
        """Answer calls from a record until `stop_recall`."""

    def stop_recall(self) -> str:
        """Answer calls by the functions again. Return the difference between calls and record, empty if they agree."""

    def add_to_trajectory(self, trajectory: Trajectory) -> Trajectory:
        """Return a trajectory with the names of the offered functions and the trajectories sampled for calls."""


class RolloutConsole:
    """Console of one rollout: a sandbox session that opens at the first executed line, and the text of an open line."""

    def __init__(self, sandbox: Sandbox, task: Task) -> None:
        """Set the sandbox and the task, with whose workspace the session begins; the session opens later."""
        self._sandbox = sandbox
        self._task = task
        self.host: HostCallRecorder | None = None
        """Handler of the calls that lines make; None means that they can make none."""
        self._resources = AsyncExitStack()
        self._session: SandboxSession | None = None
        self._buffer = LineBuffer()
        self.in_cell = False
        """True while the console waits for the rest of a cell."""

    async def aclose(self) -> None:
        """Return the session to the sandbox."""
        await self._resources.aclose()

    async def open_session(self) -> None:
        """Open the session now instead of at the first line.

        Raises:
            SandboxFault, SetupError: see `run`.
        """
        await self._open_session()

    @property
    def ended(self) -> bool:
        """True once the console takes no further line."""
        return self._session is not None and self._session.ended

    def needs_execution(self, line: Line) -> bool:
        """Return True if an end token closes the line and leaves something to run: code, or an open cell."""
        return line.end is LineEnd.EOS and (self.in_cell or bool((self._buffer.carry + line.text).strip()))

    def feed_line(self, line: Line) -> tuple[str, ...]:
        """Add a line's text, and return the physical lines that it completes.

        An end token completes a line as a newline does.
        """
        if self.needs_execution(line) and not line.text.endswith("\n"):
            return self._buffer.feed(f"{line.text}\n")
        return self._buffer.feed(line.text)

    async def run(self, lines: Sequence[str], closing: bool = False) -> list[LineResult]:
        """Run physical lines (at least one) until the console ends, and return one result per line that ran.

        With `closing`, a blank line closes a cell that is still open. Its result is then the last one.

        Raises:
            SandboxFault: no console is available.
            SetupError: the task's workspace cannot be created.
        """
        console = await self._open_session()
        results = await push_each(console, lines)
        if closing and results[-1].incomplete and not console.ended:
            results += await push_each(console, ("",))
        self.in_cell = results[-1].incomplete
        return results

    async def restore(self, ran: Sequence[str], carry: str, calls: Sequence[HostCall] = ()) -> None:
        """Run physical lines again to restore the console's state; `carry` begins the next line.

        `calls` are the recorded calls of these lines. The record answers them, and no function runs.

        Raises:
            SandboxFault: no console is available, it ended during these lines, or its calls differ from the record.
        """
        self._buffer = LineBuffer(carry)
        # Host functions may have effects, so the record answers their calls.
        if self.host is not None:
            self.host.start_recall(calls)
        if ran:
            await self.run(ran)
        difference = self.host.stop_recall() if self.host is not None else _describe_missing_calls(calls)
        if difference:
            raise SandboxFault(f"the console called the host otherwise than recorded: {difference}")
        if self.ended:
            raise SandboxFault("the console ended while its state was rebuilt")

    async def _open_session(self) -> SandboxSession:
        if self._session is None:
            opening = open_console(self._sandbox, self._task.workspace)
            try:
                self._session = await self._resources.enter_async_context(opening)
            except SetupError as error:
                raise SetupError(f"task {self._task.id}: {error.thing}", error.value, error.remedy) from error
            # Functions have to be offered before the first line runs.
            if self.host is not None and self.host.functions:
                offer_host_functions(self._session, self.host, self._sandbox.name)
        return self._session


def _describe_missing_calls(calls: Sequence[HostCall]) -> str:
    """Return the recorded host function calls that a console without host functions cannot repeat; "" for none.

    Calls that were not answered need no repetition.
    """
    missing = [f"{call.name}({call.arguments})" for call in calls if call.error != UNANSWERED]
    return "; ".join(f"not called: {clip_middle(call, 80)}" for call in missing)


def offer_host_functions(session: SandboxSession, host: HostCallHandler, sandbox: str) -> None:
    """Offer host functions to a fresh console.

    Raises:
        ConfigError: the console cannot call functions of the host.
    """
    bind_protocol_methods(session, SupportsHostFunctions)
    if not isinstance(session, SupportsHostFunctions):
        remedy = "its consoles have no way to call the host; use local, docker, gateway, nodes or unsafe"
        raise ConfigError("sandbox, with host functions", sandbox, remedy)
    session.offer_functions(host)


@keeps_old_names
class EpisodeRewards:
    """Reward methods of an episode."""

    def __init__(self, record: EpisodeRecorder) -> None:
        self._record = record
        self.outcome_claims = OutcomeClaims()
        """Claims on the outcome so far."""

    def reward(self, value: float, name: str = "sampler", line: int = -1) -> None:
        """Add a reward (dimensionless, finite) to a sampled line, under a name for the metrics.

        Args:
            value: added unchanged to the other rewards of the line; it is neither bounded nor scaled.
            name: purpose of the reward; a line may have several rewards of one name.
            line: index among all sampled lines; -1 is the last one.

        Raises:
            ConfigError: the line does not exist, or `value` is not finite.
        """
        self._record.add_reward(value, name, line)

    def set_outcome(self, value: float, name: str = "sampler", add: bool = False) -> None:
        """Set or increase the outcome of the whole rollout, under a name for the metrics.

        A submitted answer is still graded, and the grade decides if the task is solved.

        Args:
            value: finite number on any scale. It replaces the outcome of the task's judge. The last value that is set
                wins.
            name: purpose of the value.
            add: add `value` to the outcome (the judge's, or one that was set) instead of replacing it.

        Raises:
            ConfigError: `value` is not finite, or `name` is blank.
        """
        self.outcome_claims = self.outcome_claims.with_claim(value, name, add)


_EPISODE_ONLY_STOPS = frozenset({Stop.ANSWERED, Stop.EOS, Stop.LINE_TOO_LONG, Stop.FAULT})
"""Stop reasons that only the episode itself records."""


class Termination:
    """Termination of one rollout: its stop reason and its failure. The first reason wins; a failure overrides it."""

    def __init__(self) -> None:
        self.stop: Stop | None = None
        self.failure: Failure | None = None
        self.is_unwanted = False
        """True if the client that follows this rollout does not want the last sampled line to run."""
        self.console_loss: SandboxLost | None = None
        """Error that reports the loss of the console, or None. Such a rollout cannot continue."""

    def end(self, reason: Stop) -> None:
        """End the rollout with `reason` if it has not ended yet."""
        self.stop = self.stop or reason

    def finish(self, reason: Stop) -> None:
        """End the rollout for a reason that a sampler may give.

        Raises:
            ConfigError: only the episode itself records `reason`.
        """
        if reason in _EPISODE_ONLY_STOPS:
            raise ConfigError(
                "episode.finish(), reason", str(reason), "only the episode itself records this reason; leave it out"
            )
        self.end(reason)

    def stop_following(self) -> None:
        """End the rollout because the client wants no more. The last sampled line does not run."""
        self.is_unwanted = True
        self.end(Stop.FINISHED)

    def mark_answered(self) -> None:
        """Record that the last line gave the answer.

        The answer takes precedence over the end token that closed the line.
        """
        if self.stop is Stop.EOS:
            self.stop = Stop.ANSWERED

    def record_failure(self, failure: Exception) -> None:
        """Record a failure; only the first one is kept.

        It overrides any stop reason, because the trajectory must not be trained on.
        """
        self.stop = Stop.FAULT
        self.failure = self.failure or Failure.from_error(failure)
        # The runner retries a rollout that lost its console.
        if isinstance(failure, SandboxLost):
            self.console_loss = failure


MakeWatch = Callable[[], Watch | None]
"""Function that makes the watch of one call. A watch keeps state, so each call needs a new one."""


class Generation:
    """Engine side of one rollout: ids already sent, ids still pending, and the remaining token budget.

    It makes one engine call at a time. Ids are only ever appended.
    """

    def __init__(
        self,
        engine: EngineSession,
        renderer: Renderer,
        prompt: Prompt,
        context_left: int,
        max_tokens: int | None = None,
    ) -> None:
        """Set the token budgets.

        Args:
            engine: session that samples.
            renderer: builder of lines from sampled ids.
            prompt: prompt of the session.
            context_left: number of ids that fit into the context after the prompt.
            max_tokens: number of ids that may be sampled; None means no limit besides `context_left`.
        """
        self._preceding: Prompt | Observed | None = prompt
        self._context_left = context_left
        self._sampling_left = context_left if max_tokens is None else max_tokens
        self._engine = engine
        self._renderer = renderer
        self._pending: list[int] = []  # ids that the engine has not seen yet
        self._ids_before_call: int | None = None  # number of ids in the engine before the running call
        self._newest_call: asyncio.Task[Chunk] | None = None  # newest of several calls at one position
        self._candidates: list[Line] = []  # lines of those calls

    @property
    def tokens_left(self) -> int:
        """Number of ids that may still be sampled, limited by the context and by the sampling budget."""
        return min(self._context_left, self._sampling_left)

    def append_observation(self, observation: Observed) -> None:
        """Append an observation; the engine sees it at the next call."""
        self.append_sampled(observation.token_ids)
        self._preceding = observation

    def append_sampled(self, ids: Sequence[int]) -> None:
        """Append ids that were sampled before; the engine sees them at the next call."""
        self._preceding = None
        self._pending.extend(ids)
        self._context_left -= len(ids)

    @property
    def preceding(self) -> Prompt | Observed | None:
        """Prompt or observation directly before the next line. None means that a sampled line comes before it."""
        return self._preceding

    async def sample_line(self, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None) -> Line:
        """Sample the next line, of at most `max_tokens` ids or as many as fit.

        Raises:
            ConfigError: `max_tokens` < 1, or another call is running.
            EngineError: see `EngineSession.sample`.
        """
        budget = self._begin_call(max_tokens)
        chunk = await self._engine.sample(self._pending, max_tokens=budget, stop_ids=stop_ids, watch=watch)
        # The call returned, so the engine holds all ids.
        self._ids_before_call, self._pending = None, []
        line = self._renderer.make_line(chunk, self._preceding)
        self._count_sampled(len(chunk.token_ids))
        return line

    async def sample_candidates(
        self, count: int, max_tokens: int, stop_ids: frozenset[int], make_watch: MakeWatch
    ) -> Sequence[Line]:
        """Sample `count` (>= 1) candidate lines from the same ids; call `choose_candidate` next.

        Raises:
            ConfigError: `count` or `max_tokens` < 1, or another call is running.
            EngineError: see `EngineSession.sample`.
        """
        if count < 1:
            raise ConfigError("episode.choose(), count", count, "give at least 1")
        budget, self._candidates = self._begin_call(max_tokens), []
        for _ in range(count):
            # The engine holds one continuation only: undo the last candidate before it samples another one.
            if self._newest_call is not None:
                await self._engine.undo(self._newest_call)
            call = self._engine.sample(self._pending, max_tokens=budget, stop_ids=stop_ids, watch=make_watch())
            self._newest_call = asyncio.create_task(call)
            self._candidates.append(self._renderer.make_line(await self._newest_call, self._preceding))
        return tuple(self._candidates)

    async def choose_candidate(self, index: int) -> None:
        """Continue from one of the lines of `sample_candidates`, chosen by index."""
        assert self._newest_call is not None
        # The engine still holds the last candidate; the ids of any other one are sent again.
        if index == len(self._candidates) - 1:
            self._pending = []
        else:
            await self._engine.undo(self._newest_call)
            self._pending.extend(self._candidates[index].token_ids)
        self._ids_before_call = self._newest_call = None
        self._count_sampled(len(self._candidates[index].token_ids))

    def _count_sampled(self, ids: int) -> None:
        self._preceding = None
        self._context_left -= ids
        self._sampling_left -= ids

    def _begin_call(self, max_tokens: int) -> int:
        """Record that a call is running, and return the number of ids that it may sample."""
        if self._ids_before_call is not None:
            state = "called while another call runs, or after one was interrupted"
            raise ConfigError("episode.sample()", state, "await each call to its end")
        if max_tokens < 1:
            raise ConfigError("max_tokens", max_tokens, "give at least 1")
        # This mark stays if the call is interrupted, so that `seen_ids` can leave out its ids.
        self._ids_before_call = len(self._engine.ids)
        return min(max_tokens, self.tokens_left)

    @property
    def seen_ids(self) -> Sequence[int]:
        """All ids that the engine received or sampled. Ids of a call that never returned are left out."""
        ids = self._engine.ids
        return ids if self._ids_before_call is None else ids[: self._ids_before_call]


@keeps_old_names
class Episode(EpisodeRewards):
    """Public handle of one rollout: `sample` or `turn`, `push` or `execute`, `observe`, `reward`, `submit`."""

    def __init__(
        self,
        spec: RolloutSpec,
        engine: EngineSession,
        sandbox: Sandbox,
        renderer: Renderer,
        limits: RolloutLimits,
        context_tokens: int,
        observer: RolloutObserver = UNFOLLOWED,
    ) -> None:
        super().__init__(EpisodeRecorder(spec, observer))
        self.renderer = renderer
        """Owner of the tokenizer, for samplers that splice a model's chat format."""
        self.limits = limits
        context_left = context_tokens - len(spec.prompt.token_ids)
        self._generation = Generation(engine, renderer, spec.prompt, context_left, observer.max_tokens)
        self._sandbox = sandbox
        self._console = RolloutConsole(sandbox, spec.task)
        self._termination = Termination()
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
        return self._record.spec.id

    @property
    def task(self) -> Task:
        """Task of this rollout. Its reference answer is for user code, never for the sandbox."""
        return self._record.spec.task

    @property
    def has_lines(self) -> bool:
        """True once a line was sampled or restored."""
        return bool(self._record.line_count)

    @property
    def ended(self) -> bool:
        """True once nothing further can be sampled."""
        return self._termination.stop is not None

    @property
    def console_loss(self) -> SandboxLost | None:
        """Error that reports the loss of the console, or None. Such a rollout cannot continue."""
        return self._termination.console_loss

    def set_call_handler(self, host: HostCallRecorder) -> None:
        """Let lines call the functions of `host`. Hooks call this before the first line runs."""
        self._console.host = host

    async def lines(self, write: Callable[[], Awaitable[Line]] | None = None) -> AsyncIterator[Line]:
        """Yield one sampled line after another until the rollout ends.

        `write` samples a line; None means `sample`. Truncated lines are not yielded, and neither are lines without code
        that an end token closes.
        """
        while not self.ended:
            line = await (write or self.sample)()
            if not self._termination.is_unwanted and (
                line.end is LineEnd.NEWLINE or self._console.needs_execution(line)
            ):
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
        return await self._sample_line(*self._build_stop_condition(until), max_tokens)

    async def choose(
        self, count: int, choose: ChooseLine, until: str | re.Pattern[str] | None = None, max_tokens: int | None = None
    ) -> Line:
        """Sample `count` (>= 1) lines from the same ids, and continue from the one that `choose` picks.

        The others become its `alternatives`: never executed, and trained only as `Choice` specifies. Otherwise it works
        as `sample`.
        """
        max_line_tokens = self._limit_tokens(max_tokens)
        index, line = await choose_line(
            choose, await self._generation.sample_candidates(count, max_line_tokens, *self._build_stop_condition(until))
        )
        await self._generation.choose_candidate(index)
        return self._record_line(line, max_line_tokens)

    def _build_stop_condition(self, until: str | re.Pattern[str] | None) -> tuple[frozenset[int], MakeWatch]:
        stop_ids = self.renderer.stop_ids if until is None else self.renderer.eos_ids
        return stop_ids, lambda: self.renderer.make_watch(until, self._generation.preceding) if until else None

    async def sample_turn(self, max_tokens: int | None = None) -> Line:
        """Sample until the end token, which ends the turn and not the rollout.

        Arguments, errors and truncation are those of `sample`. `text` excludes the end token.
        """
        return await self._sample_line(self.renderer.eos_ids, lambda: None, max_tokens, turn=True)

    async def _sample_line(
        self, stop_ids: frozenset[int], make_watch: MakeWatch, max_tokens: int | None, turn: bool = False
    ) -> Line:
        max_line_tokens = self._limit_tokens(max_tokens)
        return self._record_line(
            await self._generation.sample_line(max_line_tokens, stop_ids, make_watch()), max_line_tokens, turn
        )

    def _limit_tokens(self, max_tokens: int | None) -> int:
        if (stop := self._termination.stop) is not None:
            raise ConfigError("episode.sample() after the end of the rollout", str(stop), "check episode.ended")
        return self.limits.max_line_tokens if max_tokens is None else max_tokens

    def _record_line(self, line: Line, max_tokens: int, turn: bool = False) -> Line:
        # The client that follows the rollout may want nothing after this line.
        if self._record.append_line(line):
            self._termination.stop_following()
        # A truncated line has used up its own budget, or else that of the context.
        if line.end is LineEnd.LENGTH:
            self._termination.end(Stop.LINE_TOO_LONG if len(line.token_ids) == max_tokens else Stop.MAX_TOKENS)
        elif line.end is LineEnd.EOS and not turn:
            self._termination.end(Stop.EOS)
        return line

    def observe(self, text: str | Observed, cut: bool = False) -> Observed:
        """Splice in text that the policy did not write. It is masked, and it may be empty.

        A string is encoded alone, without control tokens, and its middle is cut if it is too long. An `Observed` is
        used unchanged. The rollout ends when its lines or its context are used up, see `ended`.

        `cut` means that the middle of the text is already missing, see `LineResult.truncated`.

        Raises:
            ConfigError: nothing was sampled since the last observation, the last line was truncated, or our console
                failed.
        """
        if isinstance(text, str):
            rendered = self.renderer.encode_observation(text, self.limits.max_observation_tokens, last=self.ended)
            text = replace(rendered, cut=cut or rendered.cut)
        # The record checks the order, so it comes before the engine.
        self._record.append_observation(text)
        self._generation.append_observation(text)
        if self._record.line_count >= self.limits.max_lines:
            self._termination.end(Stop.MAX_LINES)
        if self._generation.tokens_left < 1:
            self._termination.end(Stop.MAX_TOKENS)
        return text

    async def push(self, line: Line) -> LineResult:
        """Execute the last sampled line in this rollout's console, and splice in its output and the next prompt.

        A token may complete several physical lines. They run in order, and their joined outputs are spliced in after
        the token. An end token completes the line, and closes an open cell as a blank line would. After an end token,
        no next prompt is spliced in.

        Raises:
            ConfigError: `line` is not the last sampled line, was executed already, or closes no physical line.
            SandboxFault: our console failed; the rollout is dropped.
        """
        last = self._record.last_line
        if last is None or last.execution is not None or last.token_ids != line.token_ids:
            raise ConfigError("episode.push()", line.text, "push the line that was sampled last, once")
        physical_lines = self._console.feed_line(line)
        # A line that ends within a physical line has nothing to run yet.
        if not physical_lines:
            raise ConfigError("episode.push()", line.text, "it has no newline; check episode.ended before you push")
        result = await self._run(physical_lines, line.end is LineEnd.EOS)
        shown = result.text if self.ended else result.text + choose_prompt(result.incomplete)
        if shown:
            self.observe(shown, result.truncated)
        return result

    async def execute(self, *lines: str) -> LineResult:
        """Run physical lines in this rollout's console for the last sampled line, and splice in nothing.

        Raises:
            ConfigError: nothing was sampled yet, no line is given, or the console has ended.
            SandboxFault: our console failed; the rollout is dropped.
        """
        if not lines or not self.has_lines:
            raise ConfigError("episode.execute()", lines, "sample a line first, then give at least one to run")
        return await self._run(lines)

    async def _run(self, lines: Sequence[str], closing: bool = False) -> LineResult:
        try:
            results = await self._console.run(lines, closing)
        except SandboxLost as loss:
            self.fail(loss)  # even if the sampler swallows the error
            raise
        # A blank line that closed an open cell is part of the record.
        result, ran = combine_results(results), (*lines, "")[: len(results)]
        host = self._console.host
        calls = host.take_calls() if host is not None else ()
        self.record_execution(Execution(result.status, result.elapsed_s, result.answer, ran, calls))
        if result.status is LineStatus.SANDBOX_FAULT:
            self.fail(fault := SandboxFault(result.text or "the console did not answer"))  # even if it is swallowed
            raise fault
        # An answer has already ended the rollout, even if it closed the console.
        if result.answer is not None:
            self._termination.mark_answered()
        elif self._console.ended:
            self._termination.end(Stop.EXITED)
        return result

    async def restore(self, segments: Sequence[Segment], ran: Sequence[str], carry: str = "") -> None:
        """Start in the middle: restore recorded segments, and run physical lines to restore the console's state.

        The record keeps its ids, log probabilities, outputs and host answers. New output of the console is not spliced
        in. Restored lines count towards the limits. `carry` begins the next physical line.

        Raises:
            ConfigError: something was sampled already.
            SandboxFault: the console failed, or ended while `ran` ran.
        """
        if self.has_lines:
            raise ConfigError("episode.restore()", "after a sampled line", "call it first")
        for segment in segments:
            if isinstance(segment, Observed):
                self.observe(segment)
                continue
            for line in segment.lines:
                self._record.append_line(line)
            # The engine sees these ids at its next call.
            self._generation.append_sampled(segment.token_ids)
        await self._console.restore(ran, carry, [call for run in self._record.executions for call in run.calls])

    def record_execution(self, execution: Execution) -> None:
        """Record the execution of the last sampled line, if something other than the console ran it.

        Raises:
            ConfigError: no line was sampled yet.
        """
        self._record.record_execution(execution)
        if execution.answer is not None:
            self._termination.end(Stop.ANSWERED)

    def submit(self, answer: str) -> None:
        """Submit an answer from the last sampled line as the final one. The host grades it, and the rollout ends."""
        self.record_execution(Execution(LineStatus.ANSWERED, 0.0, answer))

    async def judge(self, answer: str) -> float:
        """Return the grade of the task's first judge for an answer, as at the end.

        The sampler decides if the policy sees it.

        Raises:
            ConfigError, UserCodeError, SandboxFault: see `repl_rl.judges.grade_with_first_judge`.
        """
        so_far = self._record.build_trajectory(Stop.FINISHED, 0.0, None, None)
        return await grade_with_first_judge(self.task, answer, self._sandbox, so_far)

    def finish(self, reason: Stop = Stop.FINISHED) -> None:
        """End the rollout. Only the first reason is kept.

        Raises:
            ConfigError: only the episode itself records `reason`.
        """
        self._termination.finish(reason)

    def fail(self, failure: Exception) -> None:
        """Record a failure; only the first one is kept.

        The trajectory is stored, never rewarded and never trained on.
        """
        self._termination.record_failure(failure)

    def build_trajectory(self) -> Trajectory:
        """Return the record so far.

        Raises:
            InvariantError: the ids that the engine saw are not a prefix of the record (invariant I5).
        """
        stop, failure = self._termination.stop or Stop.FINISHED, self._termination.failure
        # After a failure the engine's ids may be incomplete, so they are not compared.
        seen_ids = None if failure else self._generation.seen_ids
        record = self._record.build_trajectory(stop, time.monotonic() - self._started, failure, seen_ids)
        host = self._console.host
        return record if host is None else host.add_to_trajectory(record)
