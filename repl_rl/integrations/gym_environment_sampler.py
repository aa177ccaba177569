"""Sampler for environments with `reset` and `step`.

It accepts the return values of gymnasium, AReaL and OpenEnv clients; methods may be plain or async.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.sampler_base import RolloutSampler
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.samplers.chat_format import ChatFormat, build_opening_prompt
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import LineEnd, Prompt
from repl_rl.utils.timeouts import run_in_thread

SOLVED, NOT_SOLVED = "solved", "not solved"
"""Answers that are submitted when an environment is done."""
FAMILY = "environment"
"""Family of the tasks that `EnvironmentSampler.make_tasks` makes."""


class Environment(Protocol):
    """Environment that the sampler adapts.

    Both methods may be async; plain ones are called in threads. `close()` is called if the environment has one.
    """

    def reset(self) -> object:
        """Start over. Return an observation, `(observation, info)`, or an object with `observation`."""

    def step(self, action: object) -> object:
        """Apply an action. Return a tuple, or an object with `observation`, `reward` and `done`.

        The tuple is `(observation, reward, terminated, truncated, info)` or `(observation, reward, done, info)`.
        """


MakeEnvironment = Callable[[Task], Environment]
"""Function that makes the environment of one rollout from the task alone, so that all its rollouts start the same."""

ResetEnvironment = Callable[[Environment, Task], object]
"""Function that resets an environment for a task, such as by a seed. It returns the result of `reset`, or an awaitable
of it."""


@dataclass(frozen=True, slots=True)
class EnvironmentStep:
    """Result of one step of an environment."""

    observation: object
    reward: float = 0.0
    done: bool = False


@keeps_old_names
class EnvironmentSampler(RolloutSampler):
    """Sampler in which turns of the policy are actions of an environment.

    The reward of a step goes to the turn that acted. The outcome is the sum of the rewards, on the environment's own
    scale, even if the environment is not done. When it is done, `solved` or `not solved` is submitted; a sum of at
    least `solved_at` counts as solved.
    """

    def __init__(
        self,
        make: MakeEnvironment,
        *,
        action: Callable[[str], object] = str.strip,
        show: Callable[[object], str] = str,
        chat: bool = True,
        solved_at: float = 1.0,
        system: str = "",
        start: ResetEnvironment = lambda environment, task: environment.reset(),
        per_turn: bool = True,
    ) -> None:
        """Create the sampler.

        Args:
            make: see `MakeEnvironment`.
            action: function from the policy's text to an action.
            show: function from an observation to text.
            chat: True uses turns and user messages in the model's chat format. False uses one line per action and one
                per observation.
            solved_at: sum of rewards that counts as solved.
            system: system message or text before the question; "" for none.
            start: see `ResetEnvironment`; for environments whose `reset` needs arguments that `make` cannot give.
            per_turn: True also rewards each turn with the reward of its step, in addition to the outcome. An estimator
                that adds rewards up then counts it twice. False uses the outcome only.
        """
        self.make = make
        self.start = start
        self.action = action
        self.show = show
        self.chat = chat
        self.solved_at = solved_at
        self.system = system
        self.per_turn = per_turn
        self.rehearsals = (("1", "2", "3", "4"),) if chat else (("1\n2\n3\n4\n",),)

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        return build_opening_prompt(renderer, self.system, task.question, "chat" if self.chat else "bare")

    def check_policy(self, renderer: Renderer, template: str) -> None:
        """See `RolloutSampler.check_policy`. The template must be able to write an observation."""
        super().check_policy(renderer, template)
        if self.chat:
            ChatFormat(renderer).encode_reply([{"role": "user", "content": "?"}], 16)

    async def make_tasks(self, count: int) -> list[Task]:
        """Return `count` tasks (>= 1) whose questions are the first observations of environments made for them.

        `make` gets tasks of which only the `id` is meaningful ("0", "1", ...); use it as the seed.

        Raises:
            ConfigError: `count` is below 1, or the first observation of an environment is empty.
        """
        if count < 1:
            raise ConfigError("number of tasks", count, "ask for at least 1")
        found = []
        for i in range(count):
            name = str(i)
            # The question is not known yet, so the environment gets a task with an id only.
            named = Task(name, f"environment {name}", SOLVED)
            environment = self.make(named)
            try:
                text = self.show(_get_first_observation(await _call_function(self.start, environment, named)))
            finally:
                await _close_environment(environment)
            if not text.strip():
                remedy = "a question must not be empty; create the tasks without make_tasks, each with a question"
                raise ConfigError(f"first observation of environment {name}", text, remedy)
            found.append(Task(name, text, SOLVED, family=FAMILY))
        return found

    async def rollout(self, episode: Episode) -> None:
        environment = self.make(episode.task)
        try:
            first = self.show(_get_first_observation(await _call_function(self.start, environment, episode.task)))
            # The prompt holds the observation from when the task was made, so this one must be the same.
            if episode.task.family == FAMILY and first != episode.task.question:
                message = f"environment {episode.task.id} starts with {first!r:.80}, its task says otherwise"
                raise UserCodeError(f"{message}; make() must give the same one for the same task")
            await self._play(episode, environment)
        finally:
            await _close_environment(environment)

    async def _play(self, episode: Episode, environment: Environment) -> None:
        """Alternate actions and observations until the environment is done or the rollout has ended."""
        total = 0.0
        while not episode.ended:
            line = await (episode.sample_turn() if self.chat else episode.sample())
            # A truncated action is not sent to the environment.
            if line.end is LineEnd.LENGTH:
                return
            step = _parse_step(await _call_function(environment.step, self.action(line.text)))
            total += step.reward
            # Set after every step, so that it is right wherever the rollout ends.
            episode.set_outcome(total, name="environment")
            if self.per_turn:
                episode.reward(step.reward, name="environment")
            if step.done:
                episode.submit(SOLVED if total >= self.solved_at else NOT_SOLVED)
            elif not episode.ended:
                self._append_message(episode, self.show(step.observation))

    def _append_message(self, episode: Episode, text: str) -> None:
        if self.chat:
            message = {"role": "user", "content": text}
            chat = ChatFormat(episode.renderer)
            episode.observe(chat.encode_reply([message], episode.limits.max_observation_tokens))
        else:
            episode.observe(text + "\n")


async def _call_function(function: Callable[..., object], *args: object) -> object:
    """Call a function of the user: an async function here, any other in a thread."""
    # A plain method may block, or return an awaitable.
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    value = await run_in_thread(partial(function, *args), "environment")
    return await value if inspect.isawaitable(value) else value


async def _close_environment(environment: Environment) -> None:
    """Call `close()` of an environment that has one."""
    close = getattr(environment, "close", None)
    if callable(close):
        await _call_function(close)


def _get_first_observation(value: object) -> object:
    """Return the observation in the result of `reset`."""
    if isinstance(value, tuple):
        return value[0]
    return getattr(value, "observation", value)


def _parse_step(value: object) -> EnvironmentStep:
    """Convert the result of `step`: a tuple of gymnasium or AReaL, or an object as from OpenEnv clients.

    Raises:
        UserCodeError: it is neither.
    """
    # Between reward and info there are one or two flags that end the episode.
    if isinstance(value, tuple) and len(value) in (4, 5):
        return EnvironmentStep(value[0], float(value[1]), any(map(bool, value[2:-1])))
    if not hasattr(value, "observation"):
        remedy = "return (observation, reward, done, info)"
        raise UserCodeError(f"the environment's step returned {value!r:.80}; {remedy}")
    reward = getattr(value, "reward", None)
    return EnvironmentStep(value.observation, float(reward or 0.0), bool(getattr(value, "done", False)))
