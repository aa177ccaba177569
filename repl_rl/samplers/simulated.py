"""A model in the place of the person whom a policy talks to: another model folder, or an OpenAI-compatible address.

It says the words of a user turn. What the policy's turn is worth, and whether the conversation is over, is decided as
ever: a model that is talked to cannot pay.
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
    """What the user is to say next."""

    messages: Sequence[Message]
    max_tokens: int
    """Of the reply, >= 1."""
    seed: int


class Voice(Protocol):
    """What says the words of a user turn."""

    def opened(self) -> AbstractAsyncContextManager[None]:
        """Make it ready, for the length of an `async with`."""

    async def say(self, asked: Asked) -> str:
        """The reply, which may be empty.

        Raises:
            UserCodeError: there is none to be had.
        """


@dataclass(frozen=True, slots=True)
class SimulatedUser:
    """A person played by a model."""

    voice: Voice
    system: str = SYSTEM
    max_tokens: int = 256
    """Of one reply, >= 1; a longer one is cut."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError("user_tokens", self.max_tokens, "give at least 1")

    async def reply(self, rollout: str, task: Task, turns: Sequence[str], said: Sequence[str], known: str) -> str:
        """What the person says to the newest of `turns`.

        Args:
            rollout: `episode.id`: with the number of turns it seeds the reply.
            task: its question is told, its reference answer is not.
            turns: of the policy, at least one.
            said: by this person before, one fewer.
            known: of the newest turn, such as whether it is right; "" for nothing.
        """
        system = "\n".join(filter(None, (self.system, f"The task: {task.question}", known and f"You know: {known}")))
        messages: list[Message] = [{"role": "system", "content": system}]
        for number, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            messages += [{"role": "assistant", "content": said[number]}] if number < len(said) else []
        return await self.voice.say(Asked(messages, self.max_tokens, zlib.crc32(f"{rollout}/{len(turns)}".encode())))


def voice_of(where: str, engine: UserEngine, model: str, key_variable: str, timeout_s: float) -> Voice:
    """The voice at `model:FOLDER`, or at an address such as `http://localhost:8000/v1`.

    Raises:
        ConfigError: it is neither, the folder holds no model, or an option has no effect there.
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
    if engine != "transformers":
        raise ConfigError("user_engine", engine, "the server at the address has an engine of its own; leave it out")
    if key_variable and key_variable not in os.environ:
        raise ConfigError("user_key", key_variable, "name an environment variable that holds the key")
    return AddressVoice(where.rstrip("/"), model, key_variable, timeout_s)


class FolderVoice:
    """A model in an engine of its own, beside the policy's."""

    def __init__(self, folder: Path, engine: UserEngine) -> None:
        self._folder = folder
        self._kind = engine
        self._open: tuple[Engine, Renderer] | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """See `Voice.opened`."""
        async with AsyncExitStack() as stack:
            renderer = Renderer.from_folder(self._folder, "carry")
            ChatFormat(renderer)
            self._open = await stack.enter_async_context(open_engine(self._kind, model=self._folder)), renderer
            try:
                yield
            finally:
                self._open = None

    async def say(self, asked: Asked) -> str:
        """See `Voice.say`."""
        if self._open is None:
            raise ConfigError("user", f"{_FOLDER}{self._folder}", "enter `async with sampler.opened()` first")
        engine, renderer = self._open
        ids = ChatFormat(renderer).prompt(asked.messages).token_ids
        most = min(asked.max_tokens, engine.context_tokens - len(ids))
        if most < 1:
            raise UserCodeError(f"the simulated user's context of {engine.context_tokens} ids is full")
        async with engine.session(ids, Sampling(seed=asked.seed)) as session:
            chunk = await session.sample((), max_tokens=most, stop_ids=renderer.eos_ids)
        return renderer.decode([i for i in chunk.token_ids if i not in renderer.eos_ids]).strip()


@dataclass(frozen=True, slots=True)
class AddressVoice:
    """A server that speaks OpenAI's chat completions. A request has no state, so one that may go better is repeated."""

    address: str
    """Up to and with `/v1`."""
    model: str = ""
    """What the server calls it; "": it serves one."""
    key_variable: str = ""
    """The environment variable that holds the key; "": none is sent."""
    timeout_s: float = 60.0
    """Of one request."""
    pause_s: float = 1.0
    """Before a request is tried again; twice as long before the next."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """See `Voice.opened`."""
        yield

    async def say(self, asked: Asked) -> str:
        """See `Voice.say`."""
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
            headers["Authorization"] = f"Bearer {os.environ.get(self.key_variable, '')}"
        request = urllib.request.Request(f"{self.address}/chat/completions", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                found: bytes = response.read(_MOST_BYTES)
                return found
        except urllib.error.HTTPError as error:
            with error:
                told = f"status {error.code}: {error.read(300).decode(errors='replace')}"
            if error.code == 429 or error.code >= 500:
                raise _Passing(told) from error
            raise UserCodeError(f"the simulated user at {self.address} refuses the request, {told}") from error
        except (OSError, urllib.error.URLError) as error:
            raise _Passing(str(error)) from error


class _Passing(Exception):
    """It may go better when it is tried again."""


def _content(answer: object) -> str:
    """The text of the first choice."""
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
