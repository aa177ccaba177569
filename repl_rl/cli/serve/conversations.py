"""Conversations that are kept between turns, with owners, a timeout and a limit on their number."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from repl_rl.cli.serve.asking import Asked, ChatAsked
from repl_rl.cli.serve.refusal import Refusal, whole_seconds
from repl_rl.errors import ConfigError
from repl_rl.rollout import Rollouts
from repl_rl.rollout.conversation import Conversation
from repl_rl.samplers.following import refuse_single


@dataclass(slots=True, eq=False)
class Held:
    """Conversation with its owner."""

    id: str
    owner: str
    conversation: Conversation
    said: list[tuple[str, str]] = field(default_factory=list)
    """Roles and texts of all messages so far."""
    going_on: bool = False
    """True once a turn has ended and the conversation was kept."""
    changed: bool = False
    """True once the current turn has reached the console."""
    stays: bool = False
    """True if the conversation is kept after the current turn."""
    expiry: asyncio.TimerHandle | None = None
    """Timer that ends an idle conversation, or None during a turn."""


class Conversations:
    """Conversations of one server."""

    def __init__(self, rollouts: Rollouts, most: int, idle_s: float) -> None:
        """Start without conversations.

        Args:
            rollouts: the source of turns.
            most: limit of kept conversations (>= 0).
            idle_s: time without a turn after which a kept conversation ends, seconds (> 0).
        """
        self._rollouts = rollouts
        self._most = most
        self._idle_s = idle_s
        self._kept: dict[str, Held] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._kept)

    @asynccontextmanager
    async def seat(self, asked: Asked, owner: str) -> AsyncIterator[Held]:
        """Yield the conversation of a turn, a new or a kept one.

        It ends after the turn unless it `stays`. A kept one also remains if the turn did not reach its console.

        Raises:
            Refusal: the conversation does not exist, is busy or has other messages, or the limit is reached.
        """
        held = self._begun(asked, owner) if asked.repl.conversation is None else self._taken(asked, owner)
        held.changed = held.stays = False
        try:
            yield held
        finally:
            if held.stays or (held.going_on and not held.changed):
                self._rest(held)
            else:
                self._drop(held)

    def end(self, id: str, owner: str) -> None:
        """End a conversation.

        Raises:
            Refusal: it does not exist (404), or has a turn in progress (409).
        """
        self._drop(self._found(id, owner))

    def end_idle(self) -> None:
        """End all conversations that have no turn in progress."""
        for held in [held for held in self._kept.values() if held.expiry is not None]:
            self._drop(held)

    async def closed(self) -> None:
        """Wait until the consoles of all ended conversations are closed."""
        while self._closing:
            await asyncio.wait(self._closing)

    def _begun(self, asked: Asked, owner: str) -> Held:
        if isinstance(asked, ChatAsked) and len(asked.messages) > 1:
            remedy = 'begin with one message and "repl": {"keep": true}, and give back the conversation that it names'
            raise Refusal(400, f"what was said before is only known of a conversation; {remedy}", param="messages")
        # At the limit, suggest a retry when the next idle conversation expires.
        if asked.keep and len(self._kept) >= self._most:
            now = asyncio.get_running_loop().time()
            ends = [held.expiry.when() - now for held in self._kept.values() if held.expiry is not None]
            message = f"{len(self._kept)} conversations are kept, and no more can be; end one, or do not keep this one"
            soonest = whole_seconds(min(ends, default=1.0))
            raise Refusal(429, message, code="too_many_conversations", retry_after_s=soonest)
        try:
            if asked.keep:
                refuse_single(self._rollouts.sampler)
            conversation = Conversation(self._rollouts, keep=asked.keep)
        except ConfigError as error:
            raise Refusal(400, str(error), param="repl.keep", code="unsupported_parameter") from error
        held = Held(f"conv-{secrets.token_urlsafe(24)}", owner, conversation)
        if asked.keep:
            self._kept[held.id] = held
        return held

    def _taken(self, asked: Asked, owner: str) -> Held:
        held = self._found(asked.repl.conversation or "", owner)
        # A client may send the whole history again. It must be that of this conversation.
        if isinstance(asked, ChatAsked) and len(asked.messages) > 1:
            before = [(message.role, message.text) for message in asked.messages[:-1]]
            if before != held.said:
                remedy = "give the new message alone, or all that was said as it was said"
                raise Refusal(400, f"the messages are not those of this conversation; {remedy}", param="messages")
        if held.expiry is not None:
            held.expiry.cancel()
            held.expiry = None
        return held

    def _found(self, id: str, owner: str) -> Held:
        """Return a kept conversation of `owner`. The error does not reveal whether another owner has that id."""
        held = self._kept.get(id)
        if held is None or held.owner != owner:
            message = "there is no such conversation: it ended, or was kept for too long without a turn; begin another"
            raise Refusal(404, message, param="repl.conversation", code="conversation_not_found")
        if held.expiry is None:
            raise Refusal(409, "this conversation has a turn under way", param="repl.conversation", code="busy")
        return held

    def _rest(self, held: Held) -> None:
        held.going_on = True
        held.expiry = asyncio.get_running_loop().call_later(self._idle_s, self._drop, held)

    def _drop(self, held: Held) -> None:
        """End a conversation. Its console is closed in the background."""
        self._kept.pop(held.id, None)
        if held.expiry is not None:
            held.expiry.cancel()
        closing = asyncio.create_task(held.conversation.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
