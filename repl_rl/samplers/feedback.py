"""Sampler for answer, feedback and retry: a function answers each turn with the next message, as a user would."""

import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.record.trajectory import LineEnd, Prompt, Trajectory
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.renderer import Renderer
from repl_rl.rollout.sampler import RolloutSampler
from repl_rl.samplers.chat import ChatFormat, conversation
from repl_rl.samplers.patterns import BOXED, last_match, one_group
from repl_rl.samplers.simulated import SYSTEM, SimulatedUser, UserEngine, voice_of
from repl_rl.settings.bounds import Above, AtLeast
from repl_rl.tasks import Task
from repl_rl.tasks.weights import weighed


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


Respond = Callable[[Exchange], Feedback | Awaitable[Feedback]]
"""Function of the user that answers a turn, plain or async. A plain one must not block, since other rollouts wait
meanwhile."""

Interaction = Callable[[Task], Respond]
"""Function that makes the responder of one rollout, such as a class with a `__call__`. Its `close()`, plain or async,
is called at the end if there is one, even after an error."""

Reassign = Callable[[Sequence[float]], Sequence[float]]
"""Function from the turns' own rewards to the rewards that they are credited with, one per turn."""


def right_or_wrong(exchange: Exchange) -> Feedback:
    """Report whether the answer is right, and nothing else. A right answer has reward 1 and ends the conversation."""
    if exchange.score >= 1.0:
        return Feedback("That is right, well done.", reward=1.0, done=True)
    if exchange.answer is None:
        return Feedback("There is no answer in \\boxed{}. Try again.")
    return Feedback("That is wrong. Look for the mistake and try again.")


def each_its_own(rewards: Sequence[float]) -> Sequence[float]:
    """Return the rewards unchanged, so that every turn keeps its own."""
    return rewards


def to_go(discount: float) -> Reassign:
    """Return a function that adds later rewards to those of a turn, discounted per turn by `discount` (in (0, 1])."""
    _discount(discount)

    def reassign(rewards: Sequence[float]) -> list[float]:
        return [
            math.fsum(later * discount**distance for distance, later in enumerate(rewards[turn:]))
            for turn in range(len(rewards))
        ]

    return reassign


def _discount(value: float) -> float:
    if not 0 < value <= 1:
        raise ConfigError("discount", value, "it must be above 0 and at most 1")
    return value


class FeedbackSampler(RolloutSampler):
    """Sampler for a conversation with feedback: the policy answers, gets a response, and may answer again.

    It uses the model's chat format. The newest answer is submitted at the end. A turn that a budget truncates ends the
    rollout. The run's prompt template has no effect here.
    """

    rehearsals = (("It is \\boxed{1}.", "No answer.", "It is \\boxed{2}.", "\\boxed{3}"),)

    def __init__(
        self,
        respond: Respond = right_or_wrong,
        *,
        interaction: Interaction | None = None,
        max_assistant_turns: int = 3,
        max_user_turns: int | None = None,
        reassign: Reassign = each_its_own,
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
            max_user_turns: answers to it, >= 0, not counting the task. None means one less than the policy's turns.
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
        if interaction is not None and respond is not right_or_wrong:
            raise ConfigError("respond and interaction", "both", "give one of them")
        for name, value, least in (
            ("max_assistant_turns", max_assistant_turns, 1),
            ("max_user_turns", max_user_turns, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(name, value, f"give at least {least}")
        self.discount = _discount(discount)
        self.respond = respond
        self.interaction = interaction
        # The policy has one turn more than the user.
        self.turns = min(max_assistant_turns, max_assistant_turns if max_user_turns is None else max_user_turns + 1)
        self.reassign = reassign
        self.system = system
        self._answer = one_group("answer", answer)
        self._answering: dict[str, Respond] = {}
        self._user: SimulatedUser | None = None
        if user:
            # The simulated user puts the text of `respond` into its own words.
            voice = voice_of(user, user_engine, user_model, user_key, user_timeout_s)
            self._user = SimulatedUser(voice, user_system, user_tokens)
        elif (user_system, user_tokens, user_engine, user_model, user_key) != (SYSTEM, 256, "transformers", "", ""):
            raise ConfigError("user", user, "options of a simulated user have no effect without one; give user=")

    def opened(self) -> AbstractAsyncContextManager[None]:
        """Open the engine of the simulated user. See `RolloutSampler.opened`."""
        return nullcontext() if self._user is None else self._user.voice.opened()

    async def on_start(self, episode: Episode) -> None:
        """Create the interaction of this rollout. See `RolloutSampler.on_start`."""
        if self.interaction is not None:
            self._answering[episode.id] = self.interaction(episode.task)

    async def on_end(self, rollout: str, result: Trajectory | BaseException) -> None:
        """Close the interaction of this rollout. See `RolloutSampler.on_end`."""
        close = getattr(self._answering.pop(rollout, None), "close", None)
        if callable(close) and inspect.isawaitable(closing := close()):
            await closing

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        return ChatFormat(renderer).prompt(conversation(self.system, task.question))

    def check_policy(self, renderer: Renderer, template: str) -> None:
        """See `RolloutSampler.check_policy`. The template must be able to write a reply."""
        super().check_policy(renderer, template)
        ChatFormat(renderer).reply([{"role": "user", "content": "?"}], 16)

    async def rollout(self, episode: Episode) -> None:
        chat = ChatFormat(episode.renderer)
        turns: list[str] = []
        said: list[str] = []
        rewards: list[float] = []
        answer: str | None = None
        score = 0.0
        while not episode.ended:
            line = await episode.turn()
            if line.end is LineEnd.LENGTH:
                break
            turns.append(line.text)
            given = last_match(self._answer, line.text)
            exchange = await self._exchange(episode, turns, given)
            # A turn without an answer leaves the previous answer valid.
            answer, score = (answer, score) if given is None else (given, exchange.score)
            feedback = await self._feedback(exchange)
            rewards.append(feedback.reward)
            # No turn follows, so the feedback is not spliced in.
            if feedback.done or len(turns) == self.turns:
                break
            said.append(feedback.text)
            if self._user is not None:
                said[-1] = await self._user.reply(episode.id, episode.task, turns, said[:-1], feedback.text)
            message = {"role": "user", "content": said[-1]}
            episode.observe(chat.reply([message], episode.limits.max_observation_tokens))
        # Rewards are assigned at the end, when those of later turns are known.
        for number, reward in enumerate(self._reassigned(rewards)):
            episode.reward(reward, name="turn", line=number)
        if answer is not None:
            if self.discount < 1:
                # `submit` grades the answer in full, so add the difference to the discounted score.
                worth = weighed(episode.task.judge)[0].weight * score
                episode.outcome(worth * (self.discount ** (len(turns) - 1) - 1), name="discount", add=True)
            episode.submit(answer)

    async def _exchange(self, episode: Episode, turns: Sequence[str], answer: str | None) -> Exchange:
        score = 0.0 if answer is None else await episode.judge(answer)
        return Exchange(episode.task, tuple(turns), answer, score, episode.id)

    async def _feedback(self, exchange: Exchange) -> Feedback:
        given = self._answering.get(exchange.rollout, self.respond)(exchange)
        feedback = await given if inspect.isawaitable(given) else given
        if not isinstance(feedback, Feedback):
            raise UserCodeError(f"the feedback function returned {feedback!r}; return a Feedback")
        return feedback

    def _reassigned(self, rewards: Sequence[float]) -> Sequence[float]:
        reassigned = list(self.reassign(rewards))
        if len(reassigned) != len(rewards):
            raise UserCodeError(f"reassign gave {len(reassigned)} rewards for {len(rewards)} turns; give one per turn")
        return reassigned
