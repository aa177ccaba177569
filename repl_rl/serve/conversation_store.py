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
class StoredConversation:
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

    def __init__(self, rollouts: Rollouts, max_conversations: int, idle_s: float) -> None:
        """Start without conversations.

        Args:
            rollouts: the source of turns.
            max_conversations: limit of kept conversations (>= 0).
            idle_s: time without a turn after which a kept conversation ends, seconds (> 0).
        """
        self._rollouts = rollouts
        self._max_conversations = max_conversations
        self._idle_s = idle_s
        self._conversations: dict[str, StoredConversation] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._conversations)

    @asynccontextmanager
    async def open_turn(self, request: GenerationRequest, owner: str) -> AsyncIterator[StoredConversation]:
        """Yield the conversation of a turn, a new or a kept one.

        The conversation ends after the turn, unless `keep_after_turn` is True. An earlier kept conversation also
        remains if the turn did not reach the console.

        Raises:
            RequestError: the conversation does not exist, is busy or has other messages, or the limit is reached.
        """
        stored = self._create(request, owner) if request.repl.conversation is None else self._resume(request, owner)
        stored.console_used = stored.keep_after_turn = False
        try:
            yield stored
        finally:
            if stored.keep_after_turn or (stored.has_turns and not stored.console_used):
                self._start_idle_timer(stored)
            else:
                self._drop(stored)

    def end(self, id: str, owner: str) -> None:
        """End a conversation.

        Raises:
            RequestError: it does not exist (404), or has a turn in progress (409).
        """
        self._drop(self._find(id, owner))

    def end_idle(self) -> None:
        """End all conversations that have no turn in progress."""
        for stored in [stored for stored in self._conversations.values() if stored.expiry_timer is not None]:
            self._drop(stored)

    async def wait_closed(self) -> None:
        """Wait until the consoles of all ended conversations are closed."""
        while self._closing:
            await asyncio.wait(self._closing)

    def _create(self, request: GenerationRequest, owner: str) -> StoredConversation:
        """Return a new conversation, which is registered if its request keeps it."""
        # The console of a new conversation does not know what earlier messages did.
        if isinstance(request, ChatCompletionRequest) and len(request.messages) > 1:
            remedy = 'start with one message and "repl": {"keep": true}, then send the conversation id of the answer'
            raise RequestError(
                400, f"earlier messages are known only within a kept conversation; {remedy}", param="messages"
            )
        # At the limit, suggest a retry when the next idle conversation expires.
        if request.keep and len(self._conversations) >= self._max_conversations:
            now = asyncio.get_running_loop().time()
            expiries_s = [
                stored.expiry_timer.when() - now
                for stored in self._conversations.values()
                if stored.expiry_timer is not None
            ]
            message = f"all {self._max_conversations} kept conversations are in use; end one, or do not keep this one"
            retry_after_s = round_retry_after(min(expiries_s, default=1.0))
            raise RequestError(429, message, code="too_many_conversations", retry_after_s=retry_after_s)
        try:
            if request.keep:
                validate_multi_turn(self._rollouts.sampler)
            conversation = Conversation(self._rollouts, keep=request.keep)
        except ConfigError as error:
            raise RequestError(400, str(error), param="repl.keep", code="unsupported_parameter") from error
        stored = StoredConversation(f"conv-{secrets.token_urlsafe(24)}", owner, conversation)
        if request.keep:
            self._conversations[stored.id] = stored
        return stored

    def _resume(self, request: GenerationRequest, owner: str) -> StoredConversation:
        """Return a kept conversation, and stop its timer for the duration of the turn."""
        stored = self._find(request.repl.conversation or "", owner)
        # A client may send the whole history again. It must be that of this conversation.
        if isinstance(request, ChatCompletionRequest) and len(request.messages) > 1:
            history = [(message.role, message.text) for message in request.messages[:-1]]
            if history != stored.messages:
                remedy = "send only the new message, or the exact history"
                raise RequestError(400, f"the messages are not those of this conversation; {remedy}", param="messages")
        if stored.expiry_timer is not None:
            stored.expiry_timer.cancel()
            stored.expiry_timer = None
        return stored

    def _find(self, id: str, owner: str) -> StoredConversation:
        """Return a kept conversation of `owner`. The error does not reveal whether another owner has that id."""
        stored = self._conversations.get(id)
        if stored is None or stored.owner != owner:
            message = "no such conversation: it ended or timed out; start a new one"
            raise RequestError(404, message, param="repl.conversation", code="conversation_not_found")
        if stored.expiry_timer is None:
            raise RequestError(409, "this conversation has a turn in progress", param="repl.conversation", code="busy")
        return stored

    def _start_idle_timer(self, stored: StoredConversation) -> None:
        """Keep a conversation after a turn, until it was idle for too long."""
        stored.has_turns = True
        stored.expiry_timer = asyncio.get_running_loop().call_later(self._idle_s, self._drop, stored)

    def _drop(self, stored: StoredConversation) -> None:
        """End a conversation. Its console is closed in the background."""
        self._conversations.pop(stored.id, None)
        if stored.expiry_timer is not None:
            stored.expiry_timer.cancel()
        closing = asyncio.create_task(stored.conversation.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
