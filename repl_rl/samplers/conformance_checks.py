"""Conformance suite for samplers: checks that every sampler has to pass.

`run_checks(sampler)` returns a table. A scripted policy writes the sampler's `rehearsals`, and texts that no protocol
expects. Consoles run in this process, so a rehearsal must not write code that you would not run yourself.

The parts in order: an engine that plays scripts and records its ids, test doubles of a sampler and a sandbox, the
fixture, the checks, and the runner. A check raises AssertionError with a sentence about the promise and the result.
"""

import asyncio
import itertools
import random
import string
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from repl_rl.deprecations import keeps_old_names
from repl_rl.engine.base import Chunk, Engine, EngineSession, Sampling, Watch
from repl_rl.engine.scripted_engine import ScriptedEngine
from repl_rl.errors import EngineDied
from repl_rl.rollout.concurrent_rollouts import Rollouts, RolloutSettings
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.retry import FaultRetries
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.sampler_base import RolloutSampler
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox.base import LineResult, Sandbox, SandboxSession
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import LineStatus, Observed, Prompt, Sampled, Stop, Trajectory
from repl_rl.utils.hardware import read_cpu_wait_s
from repl_rl.utils.package_data import find_asset
from repl_rl.utils.timeouts import DaemonThread

__all__ = ["CHECKS", "SamplerCheck", "SamplerCheckResult", "SamplerFixture", "run_checks"]

TIMEOUT_S = 30.0
"""Wall clock of one check, seconds."""
_REFERENCE = "REFERENCE-7391"
"""Reference answer of each task. No script contains it."""
_LIMITS = RolloutLimits(max_lines=12, max_line_tokens=256, max_observation_tokens=64, max_wall_s=5.0)
_FILLER = 12 * 256
"""Repetitions that fill all lines of a rollout under `_LIMITS`, so that no script runs out."""
_SOON_S = 2.0
"""Time for a cancelled rollout to end, seconds."""
_GAP_S = 1.0
"""Longest time for which a sampler may keep the event loop busy, seconds."""
_TAIL_IDS = 16
"""Ids to decode at the end of a splice. They are enough to see its last character."""
# For a bundled tokenizer without a chat template.
_CHAT_TEMPLATE = """
{%- if tools %}system: call with <tool_call>{"name": ..., "arguments": ...}</tool_call>:
{%- for tool in tools %} {{ tool | tojson }}{% endfor %}{{ eos_token }}
{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments
| tojson }}}</tool_call>{% endfor %}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""


@dataclass(frozen=True, slots=True)
class UndoneChunk:
    """Chunk that was sampled and taken back."""

    position: int
    """Position of its first id."""
    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]


@dataclass(slots=True)
class SessionRecording:
    """Record of one session: each id after the prompt with its log probability (nats), or None for an observed id."""

    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    chunks: int = 0
    undone_chunks: list[UndoneChunk] = field(default_factory=list)

    def add_observed(self, ids: Sequence[int]) -> None:
        """Record ids that the session received as input.

        They count as observed. If they start with a chunk that was undone at this position, that chunk was chosen, and
        keeps its log probabilities.
        """
        # Several undone chunks may begin here. The longest that fits was chosen.
        undone = (t for t in self.undone_chunks if t.position == len(self.ids) and t.ids == (*ids[: len(t.ids)],))
        chosen_logprobs = max((t.logprobs for t in undone), key=len, default=())
        self.ids += ids
        self.logprobs += [*chosen_logprobs, *[None] * (len(ids) - len(chosen_logprobs))]

    def undo_chunk(self, position: int) -> None:
        """Remove the newest chunk, which began at `position`, from the session."""
        self.undone_chunks.append(UndoneChunk(position, tuple(self.ids[position:]), tuple(self.logprobs[position:])))
        del self.ids[position:], self.logprobs[position:]

    def get_undone_at(self, position: int) -> list[tuple[tuple[int, ...], tuple[float | None, ...]]]:
        """Return ids and log probabilities that were sampled at a position and taken back."""
        return [
            (t.ids[position - t.position :], t.logprobs[position - t.position :])
            for t in self.undone_chunks
            if t.position <= position
        ]


class PausePoint:
    """Point at which a session waits forever."""

    def __init__(self) -> None:
        self.reached_event = asyncio.Event()

    async def wait(self) -> None:
        """Signal that it was reached, and never return."""
        self.reached_event.set()
        await asyncio.Event().wait()


FaultSchedule = Callable[[int], Exception | PausePoint | None]
"""Function from the number of a chunk, from 1, to an error to raise, a pause, or None."""


def inject_nothing(chunk: int) -> None:
    """Return None, so that every chunk succeeds."""


def inject_at(number: int, fault: Exception | PausePoint) -> FaultSchedule:
    """Return a schedule with one fault, at chunk `number`."""
    return lambda chunk: fault if chunk == number else None


class RecordingEngine:
    """Scripted engine that records every id. Log probabilities differ from token to token."""

    name = "recording"
    policy_step = 0
    fallback_reason: str | None = None
    seeds_sessions = True

    def __init__(
        self,
        scripts: Sequence[Sequence[int]],
        context_tokens: int,
        faults: FaultSchedule = inject_nothing,
        forbidden_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.inner = ScriptedEngine(scripts, context_tokens=context_tokens, forbidden_ids=forbidden_ids)
        self.context_tokens = context_tokens
        self.forbidden_ids = forbidden_ids
        self.faults = faults
        self.recordings: list[SessionRecording] = []

    def session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AbstractAsyncContextManager[EngineSession]:
        """See `Engine.session`."""
        return self._session(prompt_ids, sampling)

    @asynccontextmanager
    async def _session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncIterator[EngineSession]:
        recording = SessionRecording(tuple(prompt_ids))
        self.recordings.append(recording)
        async with self.inner.session(prompt_ids, sampling) as session:
            yield _RecordingSession(session, recording, self.faults)

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        """See `Engine.load_weights`."""
        await self.inner.load_weights(folder, policy_step)


class _RecordingSession:
    """Session of a scripted engine that records the ids of each call."""

    def __init__(self, inner: EngineSession, recording: SessionRecording, faults: FaultSchedule) -> None:
        self._inner = inner
        self._recording = recording
        self._faults = faults
        self._length_before = 0

    @property
    def ids(self) -> Sequence[int]:
        return self._inner.ids

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        recording = self._recording
        recording.chunks += 1
        fault = self._faults(recording.chunks)
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            await fault.wait()
        observed_ids = tuple(observed)
        # `undo` shortens the record to this length.
        self._length_before = len(recording.ids)
        chunk = await self._inner.sample(observed_ids, max_tokens=max_tokens, stop_ids=stop_ids, watch=watch)
        start = len(recording.ids) + len(observed_ids)
        # A value that depends on position and id, so that exchanged log probabilities are noticed.
        logprobs = tuple(-((position + token) % 97 + 1) / 128 for position, token in enumerate(chunk.token_ids, start))
        recording.add_observed(observed_ids)
        recording.ids += chunk.token_ids
        recording.logprobs += logprobs
        return replace(chunk, logprobs=logprobs)

    async def undo(self, call: asyncio.Task[Chunk]) -> int:
        # The record of the session must lose the same chunk.
        count = await self._inner.undo(call)
        self._recording.undo_chunk(self._length_before)
        return count


class CompletionRecorder(RolloutSampler):
    """Wrapper around a sampler that records whether its rollout ended without an error."""

    def __init__(self, inner: RolloutSampler) -> None:
        self._inner = inner
        self.completed_normally = False

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        """Return the prompt of the other sampler."""
        return self._inner.prompt(task, renderer, template, version)

    async def on_start(self, episode: Episode) -> None:
        """Call `on_start` of the other sampler."""
        await self._inner.on_start(episode)

    async def on_end(self, rollout: str, result: Trajectory | BaseException) -> None:
        """Call `on_end` of the other sampler."""
        await self._inner.on_end(rollout, result)

    async def rollout(self, episode: Episode) -> None:
        await self._inner.rollout(episode)
        self.completed_normally = True


class FaultySandbox:
    """Sandbox whose consoles fail with a sandbox fault at their first line."""

    name = "faulty"

    def __init__(self, sandbox: Sandbox) -> None:
        self.python_version = sandbox.python_version
        self.sessions = 0

    @asynccontextmanager
    async def session(self) -> AsyncIterator[SandboxSession]:
        """See `Sandbox.session`."""
        self.sessions += 1
        yield _FaultySession()


class _FaultySession:
    """Session whose first line ends it with a sandbox fault."""

    ended = False

    async def push(self, line: str) -> LineResult:
        self.ended = True
        return LineResult("", False, LineStatus.SANDBOX_FAULT, None, 0.0)


@keeps_old_names
@dataclass(frozen=True)
class SamplerFixture:
    """Sampler under test, with everything that the checks need."""

    sampler: RolloutSampler
    renderer: Renderer
    template: str
    sandbox: Sandbox = field(default_factory=InProcessSandbox)

    @cached_property
    def scripts(self) -> list[list[int]]:
        """Ids that the policy writes: each rehearsal, and texts that no protocol expects. They never run out."""
        encode, end = self.renderer.encode_as_sampled, self.renderer.end_id
        rehearsals = [[i for turn in turns for i in (*encode(turn), end)] for turns in self.sampler.rehearsals]
        rng = random.Random(0)
        noise = "".join(rng.choice(string.printable) for _ in range(400))
        # An immediate end, a line without end, empty lines, and noise.
        unusual = [[], [*encode("a")] * _FILLER, [*encode("\n")] * 20, [*encode(noise)]]
        # End tokens and more text follow each script, so that any sampler can end its rollout.
        return [[*ids, *itertools.repeat(end, 20), *([*encode("a\n")] * _FILLER)] for ids in (*rehearsals, *unusual)]

    def make_rollouts(self, engine: Engine, sandbox: Sandbox | None = None, concurrency: int = 64) -> Rollouts:
        """Return rollouts of the sampler on `engine`."""
        return Rollouts(
            engine,
            sandbox or self.sandbox,
            self.renderer,
            self.sampler,
            _LIMITS,
            RolloutSettings(self.template, concurrency=concurrency),
            (FaultRetries(),),
        )

    def make_recording_engine(
        self, context_tokens: int = 1 << 20, faults: FaultSchedule = inject_nothing
    ) -> RecordingEngine:
        """Return a recording engine that plays `scripts`."""
        return RecordingEngine(self.scripts, context_tokens, faults, self.renderer.forbidden_ids)

    @cached_property
    def tasks(self) -> list[Task]:
        """Tasks, of such a number that every script is very likely played."""
        return [Task(str(i), f"Question {i}?", _REFERENCE) for i in range(5 * len(self.scripts))]


SamplerCheck = Callable[[SamplerFixture], Coroutine[None, None, None]]
"""Function that checks one guarantee. Its name, with spaces for underscores, names its row in the table."""


def assert_promise(promise: bool, text: str) -> None:
    """Raise AssertionError(text) unless `promise` holds."""
    if not promise:
        raise AssertionError(text)


async def the_prompt_is_the_same_for_all_rollouts_of_a_task(fixture: SamplerFixture) -> None:
    """Check that all rollouts of a task have the same prompt. A group without a common prompt has no baseline."""
    task = fixture.tasks[0]
    prompts = {fixture.sampler.prompt(task, fixture.renderer, fixture.template, "3.11.0") for _ in range(3)}
    assert_promise(len(prompts) == 1, f"three calls of prompt() gave {len(prompts)} different prompts")


async def every_rollout_ends(fixture: SamplerFixture) -> None:
    """Check that each rollout ends before its wall-clock limit, for any text of the policy."""
    trajectories = await fixture.make_rollouts(fixture.make_recording_engine()).collect(fixture.tasks)
    failures = [t.failure.message for t in trajectories if t.failure is not None]
    assert_promise(not failures, f"{len(failures)} of {len(trajectories)} rollouts failed: {'; '.join(failures[:1])}")
    timed_out = sum(t.stop is Stop.WALL_CLOCK for t in trajectories)
    assert_promise(
        not timed_out,
        f"{timed_out} of {len(trajectories)} rollouts were ended by the wall clock, after {_LIMITS.max_wall_s:g} s",
    )


async def the_record_is_what_the_engine_saw(fixture: SamplerFixture) -> None:
    """Check that every id is in its place: sampled ones with their log probability, observed ones masked."""
    engine = fixture.make_recording_engine()
    rollouts = fixture.make_rollouts(engine, concurrency=1)
    for task in fixture.tasks:
        # One rollout at a time, so that the newest session of the engine is its own.
        (trajectory,) = await rollouts.collect([task])
        if trajectory.failure is None:
            compare_with_recording(trajectory, engine.recordings[-1])


def compare_with_recording(t: Trajectory, recording: SessionRecording) -> None:
    """Check that a trajectory agrees with the ids that its engine sampled and was given."""
    # Compare candidates first, then the sequence of ids, then mask and log probability per token.
    ids, mask, logprobs = t.completion_ids, t.loss_mask, t.logprobs_T()
    _compare_alternatives(t, recording)
    if t.lines and t.lines[-1].alternatives and len(recording.ids) < len(ids):
        # The engine was not called again after the last choice between candidates, so it lacks the chosen line.
        recording.add_observed(ids[len(recording.ids) :])
    assert_promise(recording.prompt_ids == t.prompt.token_ids, f"rollout {t.id}: the engine was given another prompt")
    assert_promise(
        list(ids[: len(recording.ids)]) == recording.ids,
        f"rollout {t.id}: the engine saw other ids than the record has",
    )
    assert_promise(
        not any(mask[len(recording.ids) :]), f"rollout {t.id}: the record trains on ids that the engine never sampled"
    )
    for position, (engine_logprob, is_sampled, recorded_logprob) in enumerate(
        zip(recording.logprobs, mask, logprobs, strict=False)
    ):
        assert_promise(
            is_sampled is (engine_logprob is not None), f"rollout {t.id}: the loss mask is wrong at token {position}"
        )
        assert_promise(
            engine_logprob in (None, recorded_logprob),
            f"rollout {t.id}: the log probability is wrong at token {position}",
        )


def _compare_alternatives(t: Trajectory, recording: SessionRecording) -> None:
    """Check that each alternative was sampled by the engine at the place of its line."""
    position = 0
    for segment in t.segments:
        if isinstance(segment, Observed):
            position += len(segment.token_ids)
            continue
        for line in segment.lines:
            # Candidates that were not chosen were sampled here and taken back.
            known = recording.get_undone_at(position)
            for alternative in line.alternatives:
                was_sampled = (alternative.token_ids, alternative.logprobs) in known
                assert_promise(
                    was_sampled,
                    f"rollout {t.id}: the engine sampled no {alternative.text!r} where it is an alternative",
                )
            position += len(line.token_ids)


async def rollouts_share_no_state(fixture: SamplerFixture) -> None:
    """Check that the same tasks give the same trajectories, one after the other and all at once."""
    tasks = fixture.tasks

    async def collect_all(concurrency: int) -> list[tuple[object, ...]]:
        trajectories = await fixture.make_rollouts(fixture.make_recording_engine(), concurrency=concurrency).collect(
            tasks
        )
        return [(t.completion_ids, t.loss_mask, t.stop, t.outcome, [x.rewards for x in t.lines]) for t in trajectories]

    sequential, concurrent = await collect_all(1), await collect_all(len(tasks))
    differing = sum(a != b for a, b in zip(sequential, concurrent, strict=True))
    assert_promise(
        not differing,
        f"{differing} of {len(tasks)} rollouts differ when others run at the same time; keep state in local variables",
    )


async def the_reference_answer_is_never_shown(fixture: SamplerFixture) -> None:
    """Check that neither the prompt nor an observation contains the reference answer."""
    for t in await fixture.make_rollouts(fixture.make_recording_engine()).collect(fixture.tasks):
        texts = [t.prompt.text, *(s.text for s in t.segments if isinstance(s, Observed))]
        assert_promise(
            not any(_REFERENCE in text for text in texts), f"rollout {t.id} shows the reference answer to the policy"
        )


async def no_splice_splits_a_word(fixture: SamplerFixture) -> None:
    """Check that no text spliced in before a line ends in a space that the tokenizer joins with the next word."""
    if not fixture.renderer.samples_space:
        return
    for t in await fixture.make_rollouts(fixture.make_recording_engine()).collect(fixture.tasks):
        neighbours = itertools.pairwise((t.prompt, *t.segments))
        # Prompts and observations directly before a line of the policy.
        for preceding in (
            first for first, second in neighbours if isinstance(second, Sampled) and not isinstance(first, Sampled)
        ):
            tail = fixture.renderer.decode(preceding.token_ids[-_TAIL_IDS:])
            assert_promise(
                not tail.endswith(" "), f"rollout {t.id} splices {tail[-20:]!r}; end it before its last space"
            )


async def a_full_context_ends_the_rollout(fixture: SamplerFixture) -> None:
    """Check that a full context ends the rollout with a typed stop, without an error."""
    for task in fixture.tasks[:8]:
        prompt = fixture.sampler.prompt(task, fixture.renderer, fixture.template, "3.11.0")
        # The context has room for the prompt and a few ids.
        engine = fixture.make_recording_engine(len(prompt.token_ids) + 24)
        (t,) = await fixture.make_rollouts(engine).collect([task])
        assert_promise(
            t.failure is None, f"rollout {t.id} failed in a small context: {t.failure and t.failure.message}"
        )


async def cancellation_passes(fixture: SamplerFixture) -> None:
    """Check that a cancelled rollout ends soon, and that its engine session is closed."""
    # The sampler may call the engine in several places, so pause in its first and in its second call.
    for chunk in (1, 2):
        pause = PausePoint()
        engine = fixture.make_recording_engine(faults=inject_at(chunk, pause))
        run = asyncio.ensure_future(fixture.make_rollouts(engine).collect(fixture.tasks[:1]))
        paused = asyncio.ensure_future(pause.reached_event.wait())
        # A rollout with fewer chunks ends without reaching the pause.
        await asyncio.wait({run, paused}, return_when=asyncio.FIRST_COMPLETED)
        paused.cancel()
        run.cancel()
        await asyncio.wait({run}, timeout=_SOON_S)
        assert_promise(
            run.done(), f"{_SOON_S:g} s after it was cancelled, the rollout still runs; let CancelledError pass"
        )
        assert_promise(engine.inner.open_sessions == 0, "the session of the engine is still open after the rollout")


async def errors_of_the_engine_pass(fixture: SamplerFixture) -> None:
    """Check that the sampler does not catch errors of the engine. They end the run."""
    # The sampler may call the engine in several places, so raise in its first and in its second call.
    for chunk in (1, 2):
        engine = fixture.make_recording_engine(faults=inject_at(chunk, EngineDied("gone")))
        try:
            await fixture.make_rollouts(engine).collect(fixture.tasks[:4])
        except EngineDied:
            continue
        # The collection returned, which is correct only if no session reached that chunk.
        assert_promise(
            max(recording.chunks for recording in engine.recordings) < chunk,
            "the engine died and the sampler continued; catch fewer exceptions",
        )


async def errors_of_the_console_pass(fixture: SamplerFixture) -> None:
    """Check that the sampler does not catch a sandbox fault, which must drop the rollout."""
    sandbox = FaultySandbox(fixture.sandbox)
    for task in fixture.tasks:
        sessions_before = sandbox.sessions
        recorder = CompletionRecorder(fixture.sampler)
        (t,) = await replace(fixture.make_rollouts(fixture.make_recording_engine(), sandbox), sampler=recorder).collect(
            [task]
        )
        # A rollout that opened no console may end normally.
        opened_console = sandbox.sessions > sessions_before
        assert_promise(
            not (opened_console and recorder.completed_normally),
            f"rollout {t.id} continued after its console had failed; catch fewer exceptions",
        )


async def the_thread_is_never_blocked(fixture: SamplerFixture) -> None:
    """Check that the sampler never blocks the thread, which all rollouts share."""
    longest = 0.0

    async def measure_loop_gaps() -> None:
        nonlocal longest
        while True:
            # Subtract time in which the machine did not run this process.
            start = time.monotonic() - read_cpu_wait_s()
            await asyncio.sleep(0.005)
            longest = max(longest, time.monotonic() - read_cpu_wait_s() - start)

    monitor = asyncio.ensure_future(measure_loop_gaps())
    await fixture.make_rollouts(fixture.make_recording_engine()).collect(fixture.tasks[:16])
    monitor.cancel()
    assert_promise(longest < _GAP_S, f"other rollouts waited {longest:.1f} s for one that blocked the thread")


CHECKS: Sequence[SamplerCheck] = (
    the_prompt_is_the_same_for_all_rollouts_of_a_task,
    every_rollout_ends,
    the_record_is_what_the_engine_saw,
    rollouts_share_no_state,
    the_reference_answer_is_never_shown,
    no_splice_splits_a_word,
    a_full_context_ends_the_rollout,
    cancellation_passes,
    errors_of_the_engine_pass,
    errors_of_the_console_pass,
    the_thread_is_never_blocked,
)


@dataclass(frozen=True, slots=True)
class SamplerCheckResult:
    """One row of the table."""

    name: str
    passed: bool
    detail: str = ""


def run_checks(
    sampler: RolloutSampler,
    renderer: Renderer | None = None,
    template: str = "bare",
    timeout_s: float = TIMEOUT_S,
    only: Sequence[str] = (),
) -> list[SamplerCheckResult]:
    """Run the checks on `sampler`, with a new event loop per check.

    Args:
        sampler: sampler under test.
        renderer: tokenizer and chat format of its prompts. None means the bundled policy's, with a plain chat template.
        template: prompt template, see `Renderer.build_prompt`.
        timeout_s: wall clock of one check, seconds. A sampler that blocks its thread for that long is abandoned, and
            the remaining checks are skipped.
        only: names of checks, as in `CHECKS`; an empty sequence means all.

    Raises:
        ConfigError: the sampler does not fit the tokenizer or its chat template.
    """
    fixture = SamplerFixture(sampler, renderer or _make_bundled_renderer(), template)
    # Do this before any timeout starts, because it may import slow packages.
    sampler.check_policy(fixture.renderer, template)
    rows = []
    for check in (check for check in CHECKS if not only or check.__name__ in only):
        row, finished = _run_check(check, fixture, timeout_s)
        rows.append(row)
        # The abandoned thread could disturb later checks.
        if not finished:
            break
    return rows


def _make_bundled_renderer() -> Renderer:
    """Load the bundled policy's tokenizer, with a plain chat template if it has none."""
    renderer = Renderer.from_folder(find_asset("policies/quickstart"))
    renderer.tokenizer.chat_template = renderer.tokenizer.chat_template or _CHAT_TEMPLATE
    return renderer


def _run_check(check: SamplerCheck, fixture: SamplerFixture, timeout_s: float) -> tuple[SamplerCheckResult, bool]:
    """Return the row of one check, and True if the check has finished."""
    name = check.__name__.replace("_", " ")
    # Run in a thread, because a sampler may block its thread forever.
    thread = DaemonThread(lambda: _run_in_new_loop(check(fixture)), name)
    thread.join(timeout_s)
    if not thread.future.done():
        return SamplerCheckResult(
            name, False, f"it blocks its thread, or swallows its cancellation: {_find_current_line(thread)}"
        ), False
    error = thread.future.exception()
    problem = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    return SamplerCheckResult(name, error is None, problem if error else ""), True


def _run_in_new_loop(coroutine: Coroutine[None, None, None]) -> None:
    """Run `coroutine` like `asyncio.run`, but do not wait for tasks that ignore their cancellation."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _loop, _context: None)
    try:
        loop.run_until_complete(coroutine)
    finally:
        loop.close()


def _find_current_line(thread: threading.Thread) -> str:
    """Return the line that a thread executes, outside of asyncio and threading."""
    frame = sys._current_frames().get(thread.ident or 0)
    stack: Sequence[traceback.FrameSummary] = traceback.extract_stack(frame) if frame else ()
    # The innermost frame outside of the event loop is the sampler's.
    frames = [f for f in stack if "asyncio" not in f.filename and "threading" not in f.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "an unknown line"
