"""Service that plays the turns of clients: admission, prompts, execution, and draining at the end.

A limited number of turns runs concurrently, and a queue of limited length holds others in the order of arrival. When
the server stops, running turns may finish for a limited time.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from repl_rl.errors import ConfigError, EngineDied, ReplRLError, UnrecoverableError
from repl_rl.rollout import ReplSampler, Rollouts
from repl_rl.serve.conversation import Conversation, build_turn_prompt
from repl_rl.serve.conversation_store import ConversationStore, StoredConversation
from repl_rl.serve.http_errors import RequestError, round_retry_after
from repl_rl.serve.openai_requests import ChatCompletionRequest, CompletionRequest, GenerationRequest
from repl_rl.serve.prometheus_metrics import ServerMetrics
from repl_rl.serve.turn_updates import ExecutedLine, TurnStreamer, TurnUpdate
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Line, Observed, Prompt, Trajectory
from repl_rl.trajectory.trajectory_builder import RolloutObserver

OnTurnUpdate = Callable[[TurnUpdate], None]
"""Callback for the updates of a turn. Its first call has an empty update, when the turn begins."""
_SEED_BITS = 31
"""Size of the seed that the server draws for a turn without one."""
_NEWEST_WEIGHT = 0.2
"""Weight of the newest turn in the moving average of turn durations."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of a server."""

    max_concurrent: int
    """Concurrent turns (>= 1)."""
    max_waiting: int
    """Turns that may wait in the queue (>= 0)."""
    max_conversations: int
    """Conversations that may be kept (>= 0)."""
    conversation_timeout_s: float
    """Time without a turn after which a kept conversation ends, seconds (> 0)."""


@dataclass(frozen=True, slots=True)
class TurnResult:
    """Finished turn."""

    trajectory: Trajectory
    lines: tuple[ExecutedLine, ...]
    text: str
    """Transcript of this turn."""
    conversation: str | None
    """Id of the conversation if another turn can follow, else None."""

    def format_content(self, request: GenerationRequest) -> str | None:
        """Return the text of the answer in the requested form."""
        return self.trajectory.answer if request.repl.show == "answer" else self.text


class TurnService:
    """Service that plays turns of one policy."""

    def __init__(
        self,
        rollouts: Rollouts,
        limits: ServerLimits,
        metrics: ServerMetrics,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Start without turns. `give_up` is called when no further turn can be played; see `failure`."""
        self.rollouts = rollouts
        self.metrics = metrics
        self.is_stopping = False
        """True if no further turn begins."""
        self.failure: UnrecoverableError | None = None
        """Reason that no further turn can be played, or None."""
        self._give_up = give_up
        self.conversations = ConversationStore(rollouts, limits.max_conversations, limits.conversation_timeout_s)
        self._limiter = TurnLimiter(limits.max_concurrent, limits.max_waiting)
        # Length of the longest token, characters; see `_validate_length`.
        self._max_token_chars = max(map(len, rollouts.renderer.tokenizer.get_vocab()))
        self._running_turns: set[asyncio.Task[object]] = set()
        metrics.add_gauge("running", lambda: self._limiter.running)
        metrics.add_gauge("waiting", lambda: self._limiter.waiting_count)
        metrics.add_gauge("conversations", lambda: len(self.conversations))

    async def run_turn(self, request: GenerationRequest, owner: str, publish: OnTurnUpdate) -> TurnResult:
        """Play a turn. Cancelling this call cancels the turn.

        Raises:
            RequestError: the turn is not played, or a part of the server failed.
        """
        self._check_not_stopping()
        self._validate_supported(request)
        async with self._track_turn(), self.conversations.open_turn(request, owner) as stored:
            prompt, task = self._build_prompt(request, stored.conversation)
            async with self._limiter.acquire():
                # The server may have begun to stop while this turn waited in the queue.
                self._check_not_stopping()
                stored.console_used = True
                return await self._run_turn(request, stored, prompt, task, publish)

    async def drain(self, patience_s: float) -> None:
        """Begin no further turn, wait for running ones, cancel them after `patience_s`, and close all consoles."""
        self.is_stopping = True
        self.conversations.end_idle()
        if self._running_turns:
            await asyncio.wait(self._running_turns.copy(), timeout=patience_s)
        # Cancel the turns that did not finish in time.
        while self._running_turns:
            cancelled = self._running_turns.copy()
            for turn in cancelled:
                turn.cancel()
            await asyncio.wait(cancelled)
        await self.conversations.wait_closed()

    @asynccontextmanager
    async def _track_turn(self) -> AsyncIterator[None]:
        """Register the current task as a running turn, and turn errors in the block into a `RequestError`."""
        task = asyncio.current_task()
        assert task is not None
        self._running_turns.add(task)
        try:
            yield
        except asyncio.CancelledError:
            self.metrics.abandoned_turns.inc()
            raise
        except EngineDied as error:
            raise RequestError(
                503, "the engine died; another one is opened", code="engine_died", retry_after_s=5
            ) from error
        except UnrecoverableError as error:
            # The engine died too often to be opened again, so the server stops.
            self.failure = error
            self._give_up()
            raise RequestError(503, f"the server can play no further turn: {error}", code="broken_down") from error
        except ReplRLError as error:
            raise RequestError(500, f"the turn failed: {error}", code="turn_failed") from error
        finally:
            self._running_turns.discard(task)

    async def _run_turn(
        self, request: GenerationRequest, stored: StoredConversation, prompt: Prompt, task: Task, publish: OnTurnUpdate
    ) -> TurnResult:
        """Play the rollout of an admitted turn, pass its updates on, and decide if the conversation is kept.

        Raises:
            RequestError: the rollout failed on our side.
        """
        seed = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed
        temperature = 1.0 if request.temperature is None else request.temperature
        streamer, lines, text = TurnStreamer(request.stop_texts), list[ExecutedLine](), list[str]()

        # Keep all updates for the whole answer, and also pass each on at once for a streamed one.
        def on_update(update: TurnUpdate) -> None:
            text.append(update.text)
            if update.executed_line is not None:
                lines.append(update.executed_line)
                self.metrics.record_line(update.executed_line)
            publish(update)

        def on_item(item: Line | Observed) -> None:
            on_update(streamer.update(item))

        # The empty update reports that the turn has begun.
        on_update(TurnUpdate())
        observer = RolloutObserver(on_item, request.max_new_tokens, request.stop_texts)
        trajectory = await stored.conversation.play_turn(task, prompt, seed, temperature, observer)
        on_update(streamer.finish())
        self.metrics.record_turn(trajectory)
        self._limiter.record_duration(trajectory.wall_s)
        if trajectory.failure is not None:
            raise RequestError(
                503, f"the rollout failed: {trajectory.failure.message}", code="rollout_failed", retry_after_s=1
            )
        # Keep the conversation only if its console can take another line.
        stored.keep_after_turn = request.keep and stored.conversation.open and not self.is_stopping
        result = TurnResult(trajectory, tuple(lines), "".join(text), stored.id if stored.keep_after_turn else None)
        if isinstance(request, ChatCompletionRequest):
            stored.messages += [("user", request.question), ("assistant", result.format_content(request) or "")]
        return result

    def _check_not_stopping(self) -> None:
        """Refuse a turn after the stop of the server."""
        if self.is_stopping:
            raise RequestError(503, "the server is stopping", code="stopping", retry_after_s=5)

    def _validate_supported(self, request: GenerationRequest) -> None:
        """Refuse fields that the sampler or the engine of this server would ignore."""
        engine, sampler = self.rollouts.engine, self.rollouts.sampler
        if request.stop_texts and not isinstance(sampler, ReplSampler):
            message = f"stop is {request.stop!r:.80}: {type(sampler).__name__} does not look for it; leave it out"
            raise RequestError(400, message, param="stop", code="unsupported_parameter")
        if request.seed is not None and request.temperature != 0 and not engine.seeds_sessions:
            message = f"seed is {request.seed}: the engine {engine.name} does not seed what it draws; leave it out"
            raise RequestError(400, message, param="seed", code="unsupported_parameter")

    def _build_prompt(self, request: GenerationRequest, conversation: Conversation) -> tuple[Prompt, Task]:
        """Return the prompt of a turn, and its task.

        Raises:
            RequestError: the prompt cannot be written, or does not fit into the context.
        """
        rollouts = self.rollouts
        question = request.question if isinstance(request, ChatCompletionRequest) else "?"
        task = Task(f"turn-{secrets.token_hex(8)}", question, "")
        field = "prompt" if isinstance(request, CompletionRequest) else "messages"
        try:
            self._validate_length(request.prompt if isinstance(request, CompletionRequest) else question, field)
            # Raw text or ids are the prompt as they are. A question is put into the prompt template.
            if isinstance(request, CompletionRequest):
                first = not conversation.token_ids
                raw = _build_raw_prompt(rollouts, request.prompt, first)
                prompt = raw if first else conversation.build_next_prompt(raw)
            else:
                prompt = build_turn_prompt(conversation, rollouts, task)
        except ConfigError as error:
            raise RequestError(400, str(error), param=field) from error
        if len(prompt.token_ids) >= rollouts.engine.context_tokens:
            raise self._make_too_long_error(f"{len(prompt.token_ids)} tokens", field)
        return prompt, task

    def _validate_length(self, prompt: str | list[int], field: str) -> None:
        """Reject a prompt that cannot fit, without encoding it. Encoding a long text would block all other clients."""
        # A token has at most `_max_token_chars` characters, which bounds the number of tokens from below.
        context_tokens = self.rollouts.engine.context_tokens
        if isinstance(prompt, str) and len(prompt) >= context_tokens * self._max_token_chars:
            raise self._make_too_long_error(f"{len(prompt)} characters", field)
        if not isinstance(prompt, str) and len(prompt) >= context_tokens:
            raise self._make_too_long_error(f"{len(prompt)} tokens", field)

    def _make_too_long_error(self, length: str, field: str) -> RequestError:
        message = f"the prompt has {length} and the context {self.rollouts.engine.context_tokens} tokens; ask less"
        return RequestError(400, message, param=field, code="context_length_exceeded")


def _build_raw_prompt(rollouts: Rollouts, content: str | list[int], first: bool) -> Prompt:
    """Return a prompt from text or ids. The `first` text of a conversation begins with BOS."""
    renderer = rollouts.renderer
    if isinstance(content, str):
        return renderer.build_plain_prompt(content) if first else Prompt(content, renderer.encode_splice(content))
    size = len(renderer.tokenizer)
    if max(content) >= size:
        raise RequestError(
            400, f"the prompt has the id {max(content)}, and the vocabulary ends at {size - 1}", param="prompt"
        )
    return renderer.build_prompt_from_ids(content)


class TurnLimiter:
    """Admission queue of one server."""

    def __init__(self, max_concurrent: int, max_waiting: int) -> None:
        """Set the limits: `max_concurrent` concurrent turns (>= 1), and `max_waiting` turns in the queue (>= 0)."""
        self.running = self.waiting_count = 0
        self._max_concurrent = max_concurrent
        self._max_waiting = max_waiting
        self._slots = asyncio.Semaphore(max_concurrent)
        self._mean_s = 1.0

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[None]:
        """Wait in the queue for a slot, and hold it for the block.

        Raises:
            RequestError: the queue is full (429).
        """
        if self._slots.locked() and self.waiting_count >= self._max_waiting:
            # Estimate the time until this turn would get a slot, for the header Retry-After.
            wait_s = self._mean_s * (self.waiting_count + 1) / self._max_concurrent
            message = f"{self.running} turns are running and {self.waiting_count} are waiting; try again later"
            raise RequestError(429, message, code="busy", retry_after_s=round_retry_after(wait_s))
        self.waiting_count += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting_count -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._slots.release()

    def record_duration(self, seconds: float) -> None:
        """Record the duration of a turn, seconds."""
        self._mean_s += _NEWEST_WEIGHT * (seconds - self._mean_s)
