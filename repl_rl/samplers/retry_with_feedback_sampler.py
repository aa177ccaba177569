"""Sampler for answer, feedback and retry, and a simulated user that writes the feedback.

A function answers each turn with the next message, as a user would. A model in a folder, or behind an OpenAI-compatible
address, can replace the person in the conversation. It only writes the text of user turns. It does not decide the
reward of the policy's turn or the end of the conversation.

The parts in order: feedback functions, rewards of turns, the sampler, the simulated user and its two kinds of models.
"""

import asyncio
import inspect
import json
import math
import os
import urllib.error
import urllib.request
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Protocol

from repl_rl.engine import Engine, Sampling, open_engine
from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.rollout.chat_template import Message
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.sampler_base import RolloutSampler
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.samplers.chat_format import BOXED, ChatFormat, build_conversation, compile_single_group, find_last_match
from repl_rl.settings.value_bounds import Above, AtLeast
from repl_rl.tasks import Task
from repl_rl.tasks.task import parse_weighted_judges
from repl_rl.trajectory.trajectory import LineEnd, Prompt, Trajectory
from repl_rl.utils.timeouts import run_in_thread

SYSTEM = "You asked an assistant to solve a task. Answer its newest turn as a person would, in a sentence or two."
"""Default system message of a simulated user."""
UserEngine = Literal["transformers", "vllm"]
"""Engine of a simulated user in a folder."""
_FOLDER = "model:"
_MAX_REPLY_BYTES = 1 << 20
"""Maximum bytes of a server's reply to read."""
_TRIES = 3
"""Number of requests for one reply."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Information for the function that answers a turn."""

    task: Task
    turns: tuple[str, ...]
    """Turns of the policy so far, the newest last."""
    answer: str | None
    """Answer in the newest turn. None means that the turn has no answer."""
    score: float
    """Score of `answer` by the task's first judge. It is 0.0 if there is no answer."""
    rollout: str = ""
    """Id of the rollout: `episode.id`."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """Response to a turn."""

    text: str = ""
    """Next user message. If no turn follows, it is not spliced in."""
    reward: float = 0.0
    """Reward of the turn alone, in reward units."""
    done: bool = False
    """True ends the conversation."""


RespondFn = Callable[[Exchange], Feedback | Awaitable[Feedback]]
"""Function of the user that answers a turn, plain or async. A plain one must not block, since other rollouts wait
meanwhile."""
MakeResponder = Callable[[Task], RespondFn]
"""Function that makes the responder of one rollout, such as a class with a `__call__`. If the responder has a method
`close`, plain or async, it is called at the end of the rollout, even after an error."""
ReassignRewards = Callable[[Sequence[float]], Sequence[float]]
"""Function from the turns' own rewards to the rewards that they are credited with, one per turn."""


def say_right_or_wrong(exchange: Exchange) -> Feedback:
    """Report whether the answer is right, and nothing else. A right answer has reward 1 and ends the conversation."""
    if exchange.score >= 1.0:
        return Feedback("That is right, well done.", reward=1.0, done=True)
    if exchange.answer is None:
        return Feedback("There is no answer in \\boxed{}. Try again.")
    return Feedback("That is wrong. Look for the mistake and try again.")


def keep_rewards(rewards: Sequence[float]) -> Sequence[float]:
    """Return the rewards unchanged, so that every turn keeps its own."""
    return rewards


def make_reward_to_go(discount: float) -> ReassignRewards:
    """Return a function that adds later rewards to those of a turn, discounted per turn by `discount` (in (0, 1])."""
    _check_discount(discount)

    def reassign(rewards: Sequence[float]) -> list[float]:
        return [
            math.fsum(reward * discount**distance for distance, reward in enumerate(rewards[turn:]))
            for turn in range(len(rewards))
        ]

    return reassign


def _check_discount(value: float) -> float:
    if not 0 < value <= 1:
        raise ConfigError("discount", value, "it must be above 0 and at most 1")
    return value


class FeedbackSampler(RolloutSampler):
    """Sampler for a conversation with feedback: the policy answers, gets a response, and may answer again.

    It uses the model's chat format. The newest answer is submitted at the end. A turn that a budget truncates ends the
    rollout. The run's prompt template has no effect here.
    """

    kind: ClassVar[str] = "feedback"
    about: ClassVar[str] = "a function or a model answers each turn"

    rehearsals = (("It is \\boxed{1}.", "No answer.", "It is \\boxed{2}.", "\\boxed{3}"),)

    def __init__(
        self,
        respond: RespondFn = say_right_or_wrong,
        *,
        interaction: MakeResponder | None = None,
        max_assistant_turns: int = 3,
        max_user_turns: int | None = None,
        reassign: ReassignRewards = keep_rewards,
        discount: float = 1.0,
        answer: str = BOXED,
        system: str = "",
        user: str = "",
        user_system: str = SYSTEM,
        user_tokens: Annotated[int, AtLeast(1)] = 256,
        user_engine: UserEngine = "transformers",
        user_model: str = "",
        user_key: str = "",
        user_timeout_s: Annotated[float, Above(0)] = 60.0,
    ) -> None:
        """Create the sampler.

        Args:
            respond: answers a turn; it serves all rollouts.
            interaction: makes a responder per rollout, which may store the conversation. It replaces `respond`.
            max_assistant_turns: turns of the policy, >= 1.
            max_user_turns: feedback messages to the policy, >= 0. The task's question does not count. None means one
                less than the policy's turns.
            reassign: distributes the rewards of the turns over the turns, once, at the end.
            discount: factor on the worth of a right answer per later turn, in (0, 1]. With 0.9, an answer that is
                right in the third turn has an outcome of 0.81. The task still counts as solved.
            answer: regular expression of an answer, with one group; the last match of a turn counts.
            system: the system message; "" for none.
            user: model that writes the user turns and gets the text of `respond` as a fact: `model:FOLDER`, or the
                address of an OpenAI-compatible server, up to and including `/v1`. With "" the text of `respond` is the
                user turn.
            user_system: system message of that model; the task's question follows it.
            user_tokens: limit of one of its replies, >= 1.
            user_engine: engine that samples from its folder.
            user_model: name of the model on the server; "" if it serves one only.
            user_key: environment variable with the server's key; "" sends no key.
            user_timeout_s: wall clock of one request, seconds, > 0. Errors that may pass are retried, with three
                requests in all.

        Raises:
            ConfigError: a bound is too small, both `respond` and `interaction` are given, or there is no such user. Or
                an option of the user has no effect.
        """
        if interaction is not None and respond is not say_right_or_wrong:
            raise ConfigError("respond and interaction", "both", "give one of them")
        for name, value, minimum in (
            ("max_assistant_turns", max_assistant_turns, 1),
            ("max_user_turns", max_user_turns, 0),
        ):
            if value is not None and value < minimum:
                raise ConfigError(name, value, f"give at least {minimum}")
        self.discount = _check_discount(discount)
        self.respond = respond
        self.interaction = interaction
        # The policy has one turn more than the user.
        self.turns = min(max_assistant_turns, max_assistant_turns if max_user_turns is None else max_user_turns + 1)
        self.reassign = reassign
        self.system = system
        self._answer = compile_single_group("answer", answer)
        self._responders: dict[str, RespondFn] = {}
        self._user: SimulatedUser | None = None
        if user:
            # The simulated user puts the text of `respond` into its own words.
            model = open_user_model(user, user_engine, user_model, user_key, user_timeout_s)
            self._user = SimulatedUser(model, user_system, user_tokens)
        elif (user_system, user_tokens, user_engine, user_model, user_key) != (SYSTEM, 256, "transformers", "", ""):
            raise ConfigError("user", user, "options of a simulated user have no effect without one; give user=")

    def open_resources(self) -> AbstractAsyncContextManager[None]:
        """Open the engine of the simulated user. See `RolloutSampler.open_resources`."""
        return nullcontext() if self._user is None else self._user.user_model.connect()

    async def on_start(self, episode: Episode) -> None:
        """Create the interaction of this rollout. See `RolloutSampler.on_start`."""
        if self.interaction is not None:
            self._responders[episode.id] = self.interaction(episode.task)

    async def on_end(self, rollout: str, result: Trajectory | BaseException) -> None:
        """Close the interaction of this rollout. See `RolloutSampler.on_end`."""
        close = getattr(self._responders.pop(rollout, None), "close", None)
        if callable(close) and inspect.isawaitable(close_result := close()):
            await close_result

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        return ChatFormat(renderer).build_prompt(build_conversation(self.system, task.question))

    def check_policy(self, renderer: Renderer, template: str) -> None:
        """See `RolloutSampler.check_policy`. The template must be able to write a reply."""
        super().check_policy(renderer, template)
        ChatFormat(renderer).encode_reply([{"role": "user", "content": "?"}], 16)

    async def rollout(self, episode: Episode) -> None:
        chat = ChatFormat(episode.renderer)
        turns: list[str] = []
        replies: list[str] = []
        rewards: list[float] = []
        answer: str | None = None
        score = 0.0
        while not episode.ended:
            line = await episode.sample_turn()
            if line.end is LineEnd.LENGTH:
                break
            turns.append(line.text)
            # Grade the answer of this turn, if it has one.
            new_answer = find_last_match(self._answer, line.text)
            exchange = await self._build_exchange(episode, turns, new_answer)
            # A turn without an answer leaves the previous answer valid.
            answer, score = (answer, score) if new_answer is None else (new_answer, exchange.score)
            feedback = await self._get_feedback(exchange)
            rewards.append(feedback.reward)
            # No turn follows, so the feedback is not spliced in.
            if feedback.done or len(turns) == self.turns:
                break
            replies.append(feedback.text)
            # A simulated user gets the text of the function as a fact, and writes the turn itself.
            if self._user is not None:
                replies[-1] = await self._user.generate_reply(
                    episode.id, episode.task, turns, replies[:-1], feedback.text
                )
            message = {"role": "user", "content": replies[-1]}
            episode.observe(chat.encode_reply([message], episode.limits.max_observation_tokens))
        # Rewards are assigned at the end, when those of later turns are known.
        for number, reward in enumerate(self._reassign_rewards(rewards)):
            episode.reward(reward, name="turn", line=number)
        if answer is not None:
            if self.discount < 1:
                # `submit` grades the answer in full, so add the difference to the discounted score.
                value = parse_weighted_judges(episode.task.judge)[0].weight * score
                episode.set_outcome(value * (self.discount ** (len(turns) - 1) - 1), name="discount", add=True)
            episode.submit(answer)

    async def _build_exchange(self, episode: Episode, turns: Sequence[str], answer: str | None) -> Exchange:
        score = 0.0 if answer is None else await episode.judge(answer)
        return Exchange(episode.task, tuple(turns), answer, score, episode.id)

    async def _get_feedback(self, exchange: Exchange) -> Feedback:
        """Call the responder of this rollout, or the function that serves all rollouts."""
        response = self._responders.get(exchange.rollout, self.respond)(exchange)
        feedback = await response if inspect.isawaitable(response) else response
        if not isinstance(feedback, Feedback):
            raise UserCodeError(f"the feedback function returned {feedback!r}; return a Feedback")
        return feedback

    def _reassign_rewards(self, rewards: Sequence[float]) -> Sequence[float]:
        reassigned = list(self.reassign(rewards))
        if len(reassigned) != len(rewards):
            raise UserCodeError(
                f"reassign returned {len(reassigned)} rewards for {len(rewards)} turns; give one per turn"
            )
        return reassigned


@dataclass(frozen=True, slots=True)
class UserTurnRequest:
    """Request for the next user turn."""

    messages: Sequence[Message]
    max_tokens: int
    """Limit of the reply, >= 1."""
    seed: int


class UserModel(Protocol):
    """Source of the text of user turns."""

    def connect(self) -> AbstractAsyncContextManager[None]:
        """Prepare it for the duration of an `async with` block."""

    async def generate_reply(self, request: UserTurnRequest) -> str:
        """Return the reply, which may be empty.

        Raises:
            UserCodeError: no reply is available.
        """


@dataclass(frozen=True, slots=True)
class SimulatedUser:
    """User whose turns a model writes."""

    user_model: UserModel
    system: str = SYSTEM
    max_tokens: int = 256
    """Limit of one reply, >= 1; longer replies are truncated."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError("user_tokens", self.max_tokens, "give at least 1")

    async def generate_reply(
        self, rollout: str, task: Task, turns: Sequence[str], replies: Sequence[str], facts: str
    ) -> str:
        """Return the user's reply to the newest of `turns`.

        Args:
            rollout: `episode.id`; with the number of turns it is the seed of the reply.
            task: its question is part of the request, its reference answer is not.
            turns: turns of the policy, at least one.
            replies: earlier replies of this user, one fewer than `turns`.
            facts: facts about the newest turn, such as its correctness; "" for none.
        """
        system = "\n".join(filter(None, (self.system, f"The task: {task.question}", facts and f"You know: {facts}")))
        messages: list[Message] = [{"role": "system", "content": system}]
        # The roles are swapped: this model is the assistant, and the policy is its user.
        for number, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            messages += [{"role": "assistant", "content": replies[number]}] if number < len(replies) else []
        return await self.user_model.generate_reply(
            UserTurnRequest(messages, self.max_tokens, zlib.crc32(f"{rollout}/{len(turns)}".encode()))
        )


def open_user_model(location: str, engine: UserEngine, model: str, key_variable: str, timeout_s: float) -> UserModel:
    """Return the user model for `model:FOLDER`, or for an address such as `http://localhost:8000/v1`.

    Raises:
        ConfigError: `location` is neither, the folder holds no model, or an option has no effect there.
    """
    if location.startswith(_FOLDER):
        if model or key_variable:
            raise ConfigError("user_model, user_key", (model, key_variable), "they are for an address; leave them out")
        folder = Path(location.removeprefix(_FOLDER))
        if not (folder / "config.json").is_file():
            raise ConfigError("user", location, "there is no model; give model: and a folder with a config.json")
        return LocalUserModel(folder, engine)
    if not location.startswith(("http://", "https://")):
        raise ConfigError("user", location, "give model:FOLDER, or the http(s) address of an OpenAI-compatible server")
    # Only a value other than the default shows that the option was set.
    if engine != "transformers":
        raise ConfigError("user_engine", engine, "the server chooses its own engine; leave it out")
    if key_variable and key_variable not in os.environ:
        raise ConfigError("user_key", key_variable, "name an environment variable that holds the key")
    return RemoteUserModel(location.rstrip("/"), model, key_variable, timeout_s)


class LocalUserModel:
    """Model in a separate engine, next to that of the policy."""

    def __init__(self, folder: Path, engine: UserEngine) -> None:
        self._folder = folder
        self._kind = engine
        self._open: tuple[Engine, Renderer] | None = None

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[None]:
        """See `UserModel.connect`."""
        async with AsyncExitStack() as stack:
            renderer = Renderer.from_folder(self._folder, "carry")
            # Fails for a model without a chat template, before the engine starts.
            ChatFormat(renderer)
            self._open = await stack.enter_async_context(open_engine(self._kind, model=self._folder)), renderer
            try:
                yield
            finally:
                self._open = None

    async def generate_reply(self, request: UserTurnRequest) -> str:
        """Sample the reply in the opened engine."""
        if self._open is None:
            raise ConfigError("user", f"{_FOLDER}{self._folder}", "enter `async with sampler.opened()` first")
        engine, renderer = self._open
        ids = ChatFormat(renderer).build_prompt(request.messages).token_ids
        # The conversation may have filled the context of this model.
        max_tokens = min(request.max_tokens, engine.context_tokens - len(ids))
        if max_tokens < 1:
            raise UserCodeError(f"the simulated user's context of {engine.context_tokens} ids is full")
        async with engine.session(ids, Sampling(seed=request.seed)) as session:
            chunk = await session.sample((), max_tokens=max_tokens, stop_ids=renderer.eos_ids)
        return renderer.decode([i for i in chunk.token_ids if i not in renderer.eos_ids]).strip()


@dataclass(frozen=True, slots=True)
class RemoteUserModel:
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
    retry_delay_s: float = 1.0
    """Pause before the first retry, seconds. It doubles with each further retry."""

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[None]:
        """See `UserModel.connect`."""
        yield

    async def generate_reply(self, request: UserTurnRequest) -> str:
        """Request the reply from the server, with retries."""
        body: dict[str, object] = {
            "messages": list(request.messages),
            "max_tokens": request.max_tokens,
            "seed": request.seed,
        }
        data = json.dumps({**body, **({"model": self.model} if self.model else {})}).encode()
        reason = ""
        for number in range(_TRIES):
            if number:
                await asyncio.sleep(self.retry_delay_s * 2 ** (number - 1))
            try:
                return _get_first_choice(await run_in_thread(partial(self._post_request, data), "simulated user"))
            except _RetryableError as error:
                reason = str(error)
        raise UserCodeError(f"the simulated user at {self.address} did not answer {_TRIES} requests: {reason}")

    def _post_request(self, data: bytes) -> bytes:
        """Send one request and return the body of its response.

        Raises:
            _RetryableError: the server is not reachable, is busy or has failed.
            UserCodeError: the server refuses the request.
        """
        headers = {"Content-Type": "application/json"}
        if self.key_variable:
            # Read for each request, so that the key is stored in no object.
            headers["Authorization"] = f"Bearer {os.environ.get(self.key_variable, '')}"
        request = urllib.request.Request(f"{self.address}/chat/completions", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                body: bytes = response.read(_MAX_REPLY_BYTES)
                return body
        except urllib.error.HTTPError as error:
            with error:
                reason = f"status {error.code}: {error.read(300).decode(errors='replace')}"
            # Rate limits and errors of the server may pass; other statuses do not.
            if error.code == 429 or error.code >= 500:
                raise _RetryableError(reason) from error
            raise UserCodeError(f"the simulated user at {self.address} refuses the request, {reason}") from error
        except (OSError, urllib.error.URLError) as error:
            raise _RetryableError(str(error)) from error


class _RetryableError(Exception):
    """Error that may disappear on a retry."""


def _get_first_choice(answer: object) -> str:
    """Return the text of the first choice.

    Raises:
        UserCodeError: the answer is not a chat completion.
    """
    try:
        assert isinstance(answer, bytes)
        content = json.loads(answer)["choices"][0]["message"]["content"]
        # Servers write null for an empty reply.
        if content is None:
            return ""
        if isinstance(content, str):
            return content.strip()
    except (ValueError, KeyError, IndexError, TypeError):
        pass
    raise UserCodeError(f"the simulated user answered {answer!r:.200}; it is not a chat completion")
