"""Service that plays turns, and drains running ones when the server stops."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from repl_rl.cli.serve.asking import Asked, ChatAsked, TextAsked
from repl_rl.cli.serve.conversations import Conversations, Held
from repl_rl.cli.serve.figures import Figures
from repl_rl.cli.serve.places import Places
from repl_rl.cli.serve.refusal import Refusal
from repl_rl.cli.serve.telling import Ran, Teller, Told
from repl_rl.errors import BrokenDown, ConfigError, EngineDied, ReplRLError
from repl_rl.record.record import Followed
from repl_rl.record.trajectory import Line, Observed, Prompt, Trajectory
from repl_rl.rollout import ReplSampler, Rollouts
from repl_rl.rollout.conversation import Conversation
from repl_rl.samplers.following import prompt_in
from repl_rl.tasks import Task

_SEED_BITS = 31
Tell = Callable[[Told], None]
"""Callback for the news of a turn. Its first call has empty news, when the turn begins."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a server."""

    at_once: int
    """Concurrent turns (>= 1)."""
    waiting: int
    """Turns that may wait in the queue (>= 0)."""
    conversations: int
    """Conversations that may be kept (>= 0)."""
    idle_s: float
    """Time without a turn after which a kept conversation ends, seconds (> 0)."""


@dataclass(frozen=True, slots=True)
class Done:
    """Finished turn."""

    trajectory: Trajectory
    lines: tuple[Ran, ...]
    text: str
    """Transcript of this turn."""
    conversation: str | None
    """Id of the conversation if another turn can follow, else None."""

    def content(self, asked: Asked) -> str | None:
        """Return the text of the answer in the requested form."""
        return self.trajectory.answer if asked.repl.show == "answer" else self.text


class Desk:
    """Service that plays turns of one policy."""

    def __init__(
        self, rollouts: Rollouts, bounds: Bounds, figures: Figures, give_up: Callable[[], None] = lambda: None
    ) -> None:
        """Start without turns. `give_up` is called when no further turn can be played; see `broken`."""
        self.rollouts = rollouts
        self.figures = figures
        self.stopping = False
        """True if no further turn begins."""
        self.broken: BrokenDown | None = None
        """Reason that no further turn can be played, or None."""
        self._give_up = give_up
        self.conversations = Conversations(rollouts, bounds.conversations, bounds.idle_s)
        self._places = Places(bounds.at_once, bounds.waiting)
        self._longest = max(map(len, rollouts.renderer.tokenizer.get_vocab()))
        self._playing: set[asyncio.Task[object]] = set()
        figures.watch("running", lambda: self._places.running)
        figures.watch("waiting", lambda: self._places.waiting)
        figures.watch("conversations", lambda: len(self.conversations))

    async def play(self, asked: Asked, owner: str, tell: Tell) -> Done:
        """Play a turn. Cancelling this call cancels the turn.

        Raises:
            Refusal: the turn is not played, or a part of the server failed.
        """
        self._refuse_stopping()
        self._refuse_unhonoured(asked)
        async with self._under_way(), self.conversations.seat(asked, owner) as held:
            prompt, task = self._prompt(asked, held.conversation)
            async with self._places.place():
                # The server may have begun to stop while this turn waited in the queue.
                self._refuse_stopping()
                held.changed = True
                return await self._played(asked, held, prompt, task, tell)

    async def drain(self, patience_s: float) -> None:
        """Begin no further turn, wait for running ones, cancel them after `patience_s`, and close all consoles."""
        self.stopping = True
        self.conversations.end_idle()
        if self._playing:
            await asyncio.wait(self._playing.copy(), timeout=patience_s)
        # Cancel the turns that did not finish in time.
        while self._playing:
            cut = self._playing.copy()
            for playing in cut:
                playing.cancel()
            await asyncio.wait(cut)
        await self.conversations.closed()

    @asynccontextmanager
    async def _under_way(self) -> AsyncIterator[None]:
        """Register the current task as a running turn, and turn errors in the block into a `Refusal`."""
        task = asyncio.current_task()
        assert task is not None
        self._playing.add(task)
        try:
            yield
        except asyncio.CancelledError:
            self.figures.abandoned.inc()
            raise
        except EngineDied as error:
            raise Refusal(503, "the engine died; another one is opened", code="engine_died", retry_after_s=5) from error
        except BrokenDown as error:
            # The engine died too often to be opened again, so the server stops.
            self.broken = error
            self._give_up()
            raise Refusal(503, f"nothing can be played any more: {error}", code="broken_down") from error
        except ReplRLError as error:
            raise Refusal(500, f"the turn failed: {error}", code="turn_failed") from error
        finally:
            self._playing.discard(task)

    async def _played(self, asked: Asked, held: Held, prompt: Prompt, task: Task, tell: Tell) -> Done:
        seed = secrets.randbits(_SEED_BITS) if asked.seed is None else asked.seed
        temperature = 1.0 if asked.temperature is None else asked.temperature
        teller, lines, text = Teller(asked.stops), list[Ran](), list[str]()

        # Keep all news for the whole answer, and also pass each on at once for a streamed one.
        def told(new: Told) -> None:
            text.append(new.text)
            if new.ran is not None:
                lines.append(new.ran)
                self.figures.line(new.ran)
            tell(new)

        def heard(item: Line | Observed) -> None:
            told(teller.hear(item))

        told(Told())
        followed = Followed(heard, asked.most_tokens, asked.stops)
        played = await held.conversation.turn(task, prompt, seed, temperature, followed)
        told(teller.end())
        self.figures.turn(played)
        self._places.took(played.wall_s)
        if played.failure is not None:
            raise Refusal(503, f"the rollout failed: {played.failure.message}", code="rollout_failed", retry_after_s=1)
        # Keep the conversation only if its console can take another line.
        held.stays = asked.keep and held.conversation.open and not self.stopping
        done = Done(played, tuple(lines), "".join(text), held.id if held.stays else None)
        if isinstance(asked, ChatAsked):
            held.said += [("user", asked.question), ("assistant", done.content(asked) or "")]
        return done

    def _refuse_stopping(self) -> None:
        if self.stopping:
            raise Refusal(503, "the server is stopping", code="stopping", retry_after_s=5)

    def _refuse_unhonoured(self, asked: Asked) -> None:
        engine, sampler = self.rollouts.engine, self.rollouts.sampler
        if asked.stops and not isinstance(sampler, ReplSampler):
            message = f"stop is {asked.stop!r:.80}: {type(sampler).__name__} does not look for it; leave it out"
            raise Refusal(400, message, param="stop", code="unsupported_parameter")
        if asked.seed is not None and asked.temperature != 0 and not engine.seeds_sessions:
            message = f"seed is {asked.seed}: the engine {engine.name} does not seed what it draws; leave it out"
            raise Refusal(400, message, param="seed", code="unsupported_parameter")

    def _prompt(self, asked: Asked, conversation: Conversation) -> tuple[Prompt, Task]:
        """Return the prompt of a turn, and its task.

        Raises:
            Refusal: the prompt cannot be written, or does not fit into the context.
        """
        rollouts = self.rollouts
        question = asked.question if isinstance(asked, ChatAsked) else "?"
        task = Task(f"turn-{secrets.token_hex(8)}", question, "")
        field = "prompt" if isinstance(asked, TextAsked) else "messages"
        try:
            self._refuse_long(asked.prompt if isinstance(asked, TextAsked) else question, field)
            if isinstance(asked, TextAsked):
                first = not conversation.token_ids
                raw = _raw(rollouts, asked.prompt, first)
                prompt = raw if first else conversation.after(raw)
            else:
                prompt = prompt_in(conversation, rollouts, task)
        except ConfigError as error:
            raise Refusal(400, str(error), param=field) from error
        if len(prompt.token_ids) >= rollouts.engine.context_tokens:
            raise self._too_long(f"{len(prompt.token_ids)} tokens", field)
        return prompt, task

    def _refuse_long(self, given: str | list[int], field: str) -> None:
        """Reject a prompt that cannot fit, without encoding it. Encoding a long text would block all other clients."""
        # A token has at most `_longest` characters, which bounds the number of tokens from below.
        most = self.rollouts.engine.context_tokens
        if isinstance(given, str) and len(given) >= most * self._longest:
            raise self._too_long(f"{len(given)} characters", field)
        if not isinstance(given, str) and len(given) >= most:
            raise self._too_long(f"{len(given)} tokens", field)

    def _too_long(self, length: str, field: str) -> Refusal:
        message = f"the prompt has {length} and the context {self.rollouts.engine.context_tokens} tokens; ask less"
        return Refusal(400, message, param=field, code="context_length_exceeded")


def _raw(rollouts: Rollouts, given: str | list[int], first: bool) -> Prompt:
    """Return a prompt from text or ids. The `first` text of a conversation begins with BOS."""
    renderer = rollouts.renderer
    if isinstance(given, str):
        return renderer.plain_prompt(given) if first else Prompt(given, renderer.splice(given))
    size = len(renderer.tokenizer)
    if max(given) >= size:
        raise Refusal(400, f"the prompt has the id {max(given)}, and the vocabulary ends at {size - 1}", param="prompt")
    return renderer.prompt_of_ids(given)
