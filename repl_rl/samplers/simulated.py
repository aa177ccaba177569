"""Simulated user: a model in a folder, or behind an OpenAI-compatible address, replaces the person in a conversation.

The model writes the text of a user turn only. It does not decide the reward of the policy's turn or the end of the
conversation.
"""

import asyncio
import json
import os
import urllib.error
import urllib.request
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from repl_rl.engine import Engine, Sampling, open_engine
from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.machine.threads import in_thread
from repl_rl.rollout.chat_template import Message
from repl_rl.rollout.renderer import Renderer
from repl_rl.samplers.chat import ChatFormat
from repl_rl.tasks import Task

SYSTEM = "You asked an assistant to solve a task. Answer its newest turn as a person would, in a sentence or two."
UserEngine = Literal["transformers", "vllm"]
_FOLDER = "model:"
_MOST_BYTES = 1 << 20
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """Request for the next user turn."""

    messages: Sequence[Message]
    max_tokens: int
    """Limit of the reply, >= 1."""
    seed: int


class Voice(Protocol):
    """Source of the text of user turns."""

    def opened(self) -> AbstractAsyncContextManager[None]:
        """Prepare it for the duration of an `async with` block."""

    async def say(self, asked: Asked) -> str:
        """Return the reply, which may be empty.

        Raises:
            UserCodeError: no reply is available.
        """


@dataclass(frozen=True, slots=True)
class SimulatedUser:
    """User whose turns a model writes."""

    voice: Voice
    system: str = SYSTEM
    max_tokens: int = 256
    """Limit of one reply, >= 1; longer replies are truncated."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError("user_tokens", self.max_tokens, "give at least 1")

    async def reply(self, rollout: str, task: Task, turns: Sequence[str], said: Sequence[str], known: str) -> str:
        """Return the user's reply to the newest of `turns`.

        Args:
            rollout: `episode.id`; with the number of turns it is the seed of the reply.
            task: its question is part of the request, its reference answer is not.
            turns: turns of the policy, at least one.
            said: earlier replies of this user, one fewer than `turns`.
            known: facts about the newest turn, such as its correctness; "" for none.
        """
        system = "\n".join(filter(None, (self.system, f"The task: {task.question}", known and f"You know: {known}")))
        messages: list[Message] = [{"role": "system", "content": system}]
        # The roles are swapped: this model is the assistant, and the policy is its user.
        for number, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            messages += [{"role": "assistant", "content": said[number]}] if number < len(said) else []
        return await self.voice.say(Asked(messages, self.max_tokens, zlib.crc32(f"{rollout}/{len(turns)}".encode())))


def voice_of(where: str, engine: UserEngine, model: str, key_variable: str, timeout_s: float) -> Voice:
    """Return the voice for `model:FOLDER`, or for an address such as `http://localhost:8000/v1`.

    Raises:
        ConfigError: `where` is neither, the folder holds no model, or an option has no effect there.
    """
    if where.startswith(_FOLDER):
        if model or key_variable:
            raise ConfigError("user_model, user_key", (model, key_variable), "they are for an address; leave them out")
        folder = Path(where.removeprefix(_FOLDER))
        if not (folder / "config.json").is_file():
            raise ConfigError("user", where, "there is no model; give model: and a folder with a config.json")
        return FolderVoice(folder, engine)
    if not where.startswith(("http://", "https://")):
        raise ConfigError("user", where, "give model:FOLDER, or the http(s) address of an OpenAI-compatible server")
    # Only a value other than the default shows that the option was set.
    if engine != "transformers":
        raise ConfigError("user_engine", engine, "the server at the address has an engine of its own; leave it out")
    if key_variable and key_variable not in os.environ:
        raise ConfigError("user_key", key_variable, "name an environment variable that holds the key")
    return AddressVoice(where.rstrip("/"), model, key_variable, timeout_s)


class FolderVoice:
    """Model in a separate engine, next to that of the policy."""

    def __init__(self, folder: Path, engine: UserEngine) -> None:
        self._folder = folder
        self._kind = engine
        self._open: tuple[Engine, Renderer] | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """See `Voice.opened`."""
        async with AsyncExitStack() as stack:
            renderer = Renderer.from_folder(self._folder, "carry")
            # Fails for a model without a chat template, before the engine starts.
            ChatFormat(renderer)
            self._open = await stack.enter_async_context(open_engine(self._kind, model=self._folder)), renderer
            try:
                yield
            finally:
                self._open = None

    async def say(self, asked: Asked) -> str:
        """Sample the reply in the opened engine."""
        if self._open is None:
            raise ConfigError("user", f"{_FOLDER}{self._folder}", "enter `async with sampler.opened()` first")
        engine, renderer = self._open
        ids = ChatFormat(renderer).prompt(asked.messages).token_ids
        # The conversation may have filled the context of this model.
        most = min(asked.max_tokens, engine.context_tokens - len(ids))
        if most < 1:
            raise UserCodeError(f"the simulated user's context of {engine.context_tokens} ids is full")
        async with engine.session(ids, Sampling(seed=asked.seed)) as session:
            chunk = await session.sample((), max_tokens=most, stop_ids=renderer.eos_ids)
        return renderer.decode([i for i in chunk.token_ids if i not in renderer.eos_ids]).strip()


@dataclass(frozen=True, slots=True)
class AddressVoice:
    """Server with OpenAI's chat completions API.

    Requests have no state, so a request that may succeed later is retried.
    """

    address: str
    """Address up to and including `/v1`."""
    model: str = ""
    """Name of the model on the server; "" if it serves one only."""
    key_variable: str = ""
    """Name of the environment variable with the key; "" sends no key."""
    timeout_s: float = 60.0
    """Timeout of one request, seconds."""
    pause_s: float = 1.0
    """Pause before the first retry, seconds. It doubles with each further retry."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """See `Voice.opened`."""
        yield

    async def say(self, asked: Asked) -> str:
        """Request the reply from the server, with retries."""
        body: dict[str, object] = {"messages": list(asked.messages), "max_tokens": asked.max_tokens, "seed": asked.seed}
        data = json.dumps({**body, **({"model": self.model} if self.model else {})}).encode()
        told = ""
        for number in range(_TRIES):
            if number:
                await asyncio.sleep(self.pause_s * 2 ** (number - 1))
            try:
                return _content(await in_thread(partial(self._post, data), "simulated user"))
            except _Passing as error:
                told = str(error)
        raise UserCodeError(f"the simulated user at {self.address} did not answer {_TRIES} requests: {told}")

    def _post(self, data: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.key_variable:
            # Read for each request, so that the key is stored in no object.
            headers["Authorization"] = f"Bearer {os.environ.get(self.key_variable, '')}"
        request = urllib.request.Request(f"{self.address}/chat/completions", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                found: bytes = response.read(_MOST_BYTES)
                return found
        except urllib.error.HTTPError as error:
            with error:
                told = f"status {error.code}: {error.read(300).decode(errors='replace')}"
            # Rate limits and errors of the server may pass; other statuses do not.
            if error.code == 429 or error.code >= 500:
                raise _Passing(told) from error
            raise UserCodeError(f"the simulated user at {self.address} refuses the request, {told}") from error
        except (OSError, urllib.error.URLError) as error:
            raise _Passing(str(error)) from error


class _Passing(Exception):
    """Error that may disappear on a retry."""


def _content(answer: object) -> str:
    """Return the text of the first choice.

    Raises:
        UserCodeError: the answer is not a chat completion.
    """
    try:
        assert isinstance(answer, bytes)
        said = json.loads(answer)["choices"][0]["message"]["content"]
        if said is None:
            return ""
        if isinstance(said, str):
            return said.strip()
    except (ValueError, KeyError, IndexError, TypeError):
        pass
    raise UserCodeError(f"the simulated user answered {answer!r:.200}; it is no chat completion")
