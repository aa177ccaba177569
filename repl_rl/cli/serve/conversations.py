"""Conversations that are kept between their turns: whose they are, for how long, and how many."""

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
    """A conversation, and whose it is."""

    id: str
    owner: str
    conversation: Conversation
    said: list[tuple[str, str]] = field(default_factory=list)
    """Roles and texts of all messages so far."""
    going_on: bool = False
    """It has had a turn."""
    changed: bool = False
    """The turn that is under way has reached its console."""
    stays: bool = False
    """It is kept after the turn that is under way."""
    expiry: asyncio.TimerHandle | None = None
    """When it ends by itself; None: a turn is under way."""


class Conversations:
    """Those of one server."""

    def __init__(self, rollouts: Rollouts, most: int, idle_s: float) -> None:
        """`most`: that are kept at once (>= 0). `idle_s`: how long one is kept without a turn, seconds (> 0)."""
        self._rollouts = rollouts
        self._most = most
        self._idle_s = idle_s
        self._kept: dict[str, Held] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._kept)

    @asynccontextmanager
    async def seat(self, asked: Asked, owner: str) -> AsyncIterator[Held]:
        """The conversation of a turn, a new one or one that is kept.

        It is over after the turn unless it `stays`, and where the turn was cut after it had reached the console.

        Raises:
            Refusal: there is no such conversation, or there can be no further one.
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
        """End one.

        Raises:
            Refusal: it is not there (404), or has a turn under way (409).
        """
        self._drop(self._found(id, owner))

    def end_idle(self) -> None:
        """End all that wait for their next turn."""
        for held in [held for held in self._kept.values() if held.expiry is not None]:
            self._drop(held)

    async def closed(self) -> None:
        """Wait until the consoles of those that are over are closed."""
        while self._closing:
            await asyncio.wait(self._closing)

    def _begun(self, asked: Asked, owner: str) -> Held:
        if isinstance(asked, ChatAsked) and len(asked.messages) > 1:
            remedy = 'begin with one message and "repl": {"keep": true}, and give back the conversation that it names'
            raise Refusal(400, f"what was said before is only known of a conversation; {remedy}", param="messages")
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
        """Nobody can tell somebody else's from one that is not there."""
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
        """It is over; its console is given back at once, in the background."""
        self._kept.pop(held.id, None)
        if held.expiry is not None:
            held.expiry.cancel()
        closing = asyncio.create_task(held.conversation.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
