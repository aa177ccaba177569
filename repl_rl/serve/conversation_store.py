"""Conversations that are kept between turns, with owners, a timeout and a limit on their number."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from repl_rl.errors import ConfigError
from repl_rl.rollout import Rollouts
from repl_rl.serve.conversation import Conversation, validate_multi_turn
from repl_rl.serve.http_errors import RequestError, round_retry_after
from repl_rl.serve.openai_requests import ChatCompletionRequest, GenerationRequest


@dataclass(slots=True, eq=False)
class HeldConversation:
    """Conversation with its owner."""

    id: str
    owner: str
    conversation: Conversation
    messages: list[tuple[str, str]] = field(default_factory=list)
    """Roles and texts of all messages so far."""
    has_turns: bool = False
    """True once a turn has ended and the conversation was kept."""
    console_used: bool = False
    """True once the current turn has reached the console."""
    keep_after_turn: bool = False
    """True if the conversation is kept after the current turn."""
    expiry_timer: asyncio.TimerHandle | None = None
    """Timer that ends an idle conversation, or None during a turn."""


class ConversationStore:
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
        self._kept: dict[str, HeldConversation] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._kept)

    @asynccontextmanager
    async def open_turn(self, asked: GenerationRequest, owner: str) -> AsyncIterator[HeldConversation]:
        """Yield the conversation of a turn, a new or a kept one.

        It ends after the turn unless it `keep_after_turn`. A kept one also remains if the turn did not reach its
        console.

        Raises:
            RequestError: the conversation does not exist, is busy or has other messages, or the limit is reached.
        """
        held = self._create(asked, owner) if asked.repl.conversation is None else self._resume(asked, owner)
        held.console_used = held.keep_after_turn = False
        try:
            yield held
        finally:
            if held.keep_after_turn or (held.has_turns and not held.console_used):
                self._start_idle_timer(held)
            else:
                self._drop(held)

    def end(self, id: str, owner: str) -> None:
        """End a conversation.

        Raises:
            RequestError: it does not exist (404), or has a turn in progress (409).
        """
        self._drop(self._find(id, owner))

    def end_idle(self) -> None:
        """End all conversations that have no turn in progress."""
        for held in [held for held in self._kept.values() if held.expiry_timer is not None]:
            self._drop(held)

    async def wait_closed(self) -> None:
        """Wait until the consoles of all ended conversations are closed."""
        while self._closing:
            await asyncio.wait(self._closing)

    def _create(self, asked: GenerationRequest, owner: str) -> HeldConversation:
        """Return a new conversation, which is registered if its request keeps it."""
        # The console of a new conversation does not know what earlier messages did.
        if isinstance(asked, ChatCompletionRequest) and len(asked.messages) > 1:
            remedy = 'begin with one message and "repl": {"keep": true}, and give back the conversation that it names'
            raise RequestError(400, f"what was said before is only known of a conversation; {remedy}", param="messages")
        # At the limit, suggest a retry when the next idle conversation expires.
        if asked.keep and len(self._kept) >= self._most:
            now = asyncio.get_running_loop().time()
            ends = [held.expiry_timer.when() - now for held in self._kept.values() if held.expiry_timer is not None]
            message = f"{len(self._kept)} conversations are kept, and no more can be; end one, or do not keep this one"
            soonest = round_retry_after(min(ends, default=1.0))
            raise RequestError(429, message, code="too_many_conversations", retry_after_s=soonest)
        try:
            if asked.keep:
                validate_multi_turn(self._rollouts.sampler)
            conversation = Conversation(self._rollouts, keep=asked.keep)
        except ConfigError as error:
            raise RequestError(400, str(error), param="repl.keep", code="unsupported_parameter") from error
        held = HeldConversation(f"conv-{secrets.token_urlsafe(24)}", owner, conversation)
        if asked.keep:
            self._kept[held.id] = held
        return held

    def _resume(self, asked: GenerationRequest, owner: str) -> HeldConversation:
        """Return a kept conversation, and stop its timer for the duration of the turn."""
        held = self._find(asked.repl.conversation or "", owner)
        # A client may send the whole history again. It must be that of this conversation.
        if isinstance(asked, ChatCompletionRequest) and len(asked.messages) > 1:
            before = [(message.role, message.text) for message in asked.messages[:-1]]
            if before != held.messages:
                remedy = "give the new message alone, or all that was said as it was said"
                raise RequestError(400, f"the messages are not those of this conversation; {remedy}", param="messages")
        if held.expiry_timer is not None:
            held.expiry_timer.cancel()
            held.expiry_timer = None
        return held

    def _find(self, id: str, owner: str) -> HeldConversation:
        """Return a kept conversation of `owner`. The error does not reveal whether another owner has that id."""
        held = self._kept.get(id)
        if held is None or held.owner != owner:
            message = "there is no such conversation: it ended, or was kept for too long without a turn; begin another"
            raise RequestError(404, message, param="repl.conversation", code="conversation_not_found")
        if held.expiry_timer is None:
            raise RequestError(409, "this conversation has a turn under way", param="repl.conversation", code="busy")
        return held

    def _start_idle_timer(self, held: HeldConversation) -> None:
        """Keep a conversation after a turn, until it was idle for too long."""
        held.has_turns = True
        held.expiry_timer = asyncio.get_running_loop().call_later(self._idle_s, self._drop, held)

    def _drop(self, held: HeldConversation) -> None:
        """End a conversation. Its console is closed in the background."""
        self._kept.pop(held.id, None)
        if held.expiry_timer is not None:
            held.expiry_timer.cancel()
        closing = asyncio.create_task(held.conversation.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
