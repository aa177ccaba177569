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
from repl_rl.serve.conversation_store import ConversationStore, HeldConversation
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

    def format_content(self, asked: GenerationRequest) -> str | None:
        """Return the text of the answer in the requested form."""
        return self.trajectory.answer if asked.repl.show == "answer" else self.text


class TurnService:
    """Service that plays turns of one policy."""

    def __init__(
        self,
        rollouts: Rollouts,
        bounds: ServerLimits,
        figures: ServerMetrics,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Start without turns. `give_up` is called when no further turn can be played; see `failure`."""
        self.rollouts = rollouts
        self.metrics = figures
        self.is_stopping = False
        """True if no further turn begins."""
        self.failure: UnrecoverableError | None = None
        """Reason that no further turn can be played, or None."""
        self._give_up = give_up
        self.conversations = ConversationStore(rollouts, bounds.max_conversations, bounds.conversation_timeout_s)
        self._places = TurnLimiter(bounds.max_concurrent, bounds.max_waiting)
        # Length of the longest token, characters; see `_validate_length`.
        self._longest = max(map(len, rollouts.renderer.tokenizer.get_vocab()))
        self._playing: set[asyncio.Task[object]] = set()
        figures.add_gauge("running", lambda: self._places.running)
        figures.add_gauge("waiting", lambda: self._places.waiting_count)
        figures.add_gauge("conversations", lambda: len(self.conversations))

    async def run_turn(self, asked: GenerationRequest, owner: str, tell: OnTurnUpdate) -> TurnResult:
        """Play a turn. Cancelling this call cancels the turn.

        Raises:
            RequestError: the turn is not played, or a part of the server failed.
        """
        self._check_not_stopping()
        self._validate_supported(asked)
        async with self._track_turn(), self.conversations.open_turn(asked, owner) as held:
            prompt, task = self._build_prompt(asked, held.conversation)
            async with self._places.acquire():
                # The server may have begun to stop while this turn waited in the queue.
                self._check_not_stopping()
                held.console_used = True
                return await self._run_turn(asked, held, prompt, task, tell)

    async def drain(self, patience_s: float) -> None:
        """Begin no further turn, wait for running ones, cancel them after `patience_s`, and close all consoles."""
        self.is_stopping = True
        self.conversations.end_idle()
        if self._playing:
            await asyncio.wait(self._playing.copy(), timeout=patience_s)
        # Cancel the turns that did not finish in time.
        while self._playing:
            cut = self._playing.copy()
            for playing in cut:
                playing.cancel()
            await asyncio.wait(cut)
        await self.conversations.wait_closed()

    @asynccontextmanager
    async def _track_turn(self) -> AsyncIterator[None]:
        """Register the current task as a running turn, and turn errors in the block into a `RequestError`."""
        task = asyncio.current_task()
        assert task is not None
        self._playing.add(task)
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
            raise RequestError(503, f"nothing can be played any more: {error}", code="broken_down") from error
        except ReplRLError as error:
            raise RequestError(500, f"the turn failed: {error}", code="turn_failed") from error
        finally:
            self._playing.discard(task)

    async def _run_turn(
        self, asked: GenerationRequest, held: HeldConversation, prompt: Prompt, task: Task, tell: OnTurnUpdate
    ) -> TurnResult:
        """Play the rollout of an admitted turn, pass its updates on, and decide if the conversation is kept.

        Raises:
            RequestError: the rollout failed on our side.
        """
        seed = secrets.randbits(_SEED_BITS) if asked.seed is None else asked.seed
        temperature = 1.0 if asked.temperature is None else asked.temperature
        teller, lines, text = TurnStreamer(asked.stops), list[ExecutedLine](), list[str]()

        # Keep all updates for the whole answer, and also pass each on at once for a streamed one.
        def on_update(new: TurnUpdate) -> None:
            text.append(new.text)
            if new.executed_line is not None:
                lines.append(new.executed_line)
                self.metrics.record_line(new.executed_line)
            tell(new)

        def on_item(item: Line | Observed) -> None:
            on_update(teller.update(item))

        # The empty update reports that the turn has begun.
        on_update(TurnUpdate())
        followed = RolloutObserver(on_item, asked.most_tokens, asked.stops)
        played = await held.conversation.play_turn(task, prompt, seed, temperature, followed)
        on_update(teller.finish())
        self.metrics.record_turn(played)
        self._places.record_duration(played.wall_s)
        if played.failure is not None:
            raise RequestError(
                503, f"the rollout failed: {played.failure.message}", code="rollout_failed", retry_after_s=1
            )
        # Keep the conversation only if its console can take another line.
        held.keep_after_turn = asked.keep and held.conversation.open and not self.is_stopping
        done = TurnResult(played, tuple(lines), "".join(text), held.id if held.keep_after_turn else None)
        if isinstance(asked, ChatCompletionRequest):
            held.messages += [("user", asked.question), ("assistant", done.format_content(asked) or "")]
        return done

    def _check_not_stopping(self) -> None:
        """Refuse a turn after the stop of the server."""
        if self.is_stopping:
            raise RequestError(503, "the server is stopping", code="stopping", retry_after_s=5)

    def _validate_supported(self, asked: GenerationRequest) -> None:
        """Refuse fields that the sampler or the engine of this server would ignore."""
        engine, sampler = self.rollouts.engine, self.rollouts.sampler
        if asked.stops and not isinstance(sampler, ReplSampler):
            message = f"stop is {asked.stop!r:.80}: {type(sampler).__name__} does not look for it; leave it out"
            raise RequestError(400, message, param="stop", code="unsupported_parameter")
        if asked.seed is not None and asked.temperature != 0 and not engine.seeds_sessions:
            message = f"seed is {asked.seed}: the engine {engine.name} does not seed what it draws; leave it out"
            raise RequestError(400, message, param="seed", code="unsupported_parameter")

    def _build_prompt(self, asked: GenerationRequest, conversation: Conversation) -> tuple[Prompt, Task]:
        """Return the prompt of a turn, and its task.

        Raises:
            RequestError: the prompt cannot be written, or does not fit into the context.
        """
        rollouts = self.rollouts
        question = asked.question if isinstance(asked, ChatCompletionRequest) else "?"
        task = Task(f"turn-{secrets.token_hex(8)}", question, "")
        field = "prompt" if isinstance(asked, CompletionRequest) else "messages"
        try:
            self._validate_length(asked.prompt if isinstance(asked, CompletionRequest) else question, field)
            # Raw text or ids are the prompt as they are. A question is put into the prompt template.
            if isinstance(asked, CompletionRequest):
                first = not conversation.token_ids
                raw = _build_raw_prompt(rollouts, asked.prompt, first)
                prompt = raw if first else conversation.build_next_prompt(raw)
            else:
                prompt = build_turn_prompt(conversation, rollouts, task)
        except ConfigError as error:
            raise RequestError(400, str(error), param=field) from error
        if len(prompt.token_ids) >= rollouts.engine.context_tokens:
            raise self._make_too_long_error(f"{len(prompt.token_ids)} tokens", field)
        return prompt, task

    def _validate_length(self, given: str | list[int], field: str) -> None:
        """Reject a prompt that cannot fit, without encoding it. Encoding a long text would block all other clients."""
        # A token has at most `_longest` characters, which bounds the number of tokens from below.
        most = self.rollouts.engine.context_tokens
        if isinstance(given, str) and len(given) >= most * self._longest:
            raise self._make_too_long_error(f"{len(given)} characters", field)
        if not isinstance(given, str) and len(given) >= most:
            raise self._make_too_long_error(f"{len(given)} tokens", field)

    def _make_too_long_error(self, length: str, field: str) -> RequestError:
        message = f"the prompt has {length} and the context {self.rollouts.engine.context_tokens} tokens; ask less"
        return RequestError(400, message, param=field, code="context_length_exceeded")


def _build_raw_prompt(rollouts: Rollouts, given: str | list[int], first: bool) -> Prompt:
    """Return a prompt from text or ids. The `first` text of a conversation begins with BOS."""
    renderer = rollouts.renderer
    if isinstance(given, str):
        return renderer.build_plain_prompt(given) if first else Prompt(given, renderer.encode_splice(given))
    size = len(renderer.tokenizer)
    if max(given) >= size:
        raise RequestError(
            400, f"the prompt has the id {max(given)}, and the vocabulary ends at {size - 1}", param="prompt"
        )
    return renderer.build_prompt_from_ids(given)


class TurnLimiter:
    """Admission queue of one server."""

    def __init__(self, at_once: int, waiting: int) -> None:
        """Set the limits: `at_once` concurrent turns (>= 1), and `waiting` turns in the queue (>= 0)."""
        self.running = self.waiting_count = 0
        self._at_once = at_once
        self._most_waiting = waiting
        self._free = asyncio.Semaphore(at_once)
        self._mean_s = 1.0

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[None]:
        """Wait in the queue for a slot, and hold it for the block.

        Raises:
            RequestError: the queue is full (429).
        """
        if self._free.locked() and self.waiting_count >= self._most_waiting:
            # Estimate the time until this turn would get a slot, for the header Retry-After.
            wait_s = self._mean_s * (self.waiting_count + 1) / self._at_once
            message = f"{self.running} turns are played and {self.waiting_count} wait; try again"
            raise RequestError(429, message, code="busy", retry_after_s=round_retry_after(wait_s))
        self.waiting_count += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting_count -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._free.release()

    def record_duration(self, seconds: float) -> None:
        """Record the duration of a turn, seconds."""
        self._mean_s += _NEWEST_WEIGHT * (seconds - self._mean_s)
