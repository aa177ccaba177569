"""Shipped host functions (a query of the policy, a rollout within a rollout), and the loading of functions by name."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

from repl_rl.engine.base import Sampling
from repl_rl.errors import ConfigError
from repl_rl.record.trajectory import LineEnd, Prompt, Sampled, Stop, Trajectory
from repl_rl.rollout.host import HostFunction, HostLimits, host_function, own_function, refuse_twins, split_names
from repl_rl.rollout.host_record import Refused
from repl_rl.rollout.host_session import Model, Played, Stage
from repl_rl.rollout.renderer import Renderer
from repl_rl.settings.bounds import Above, AtLeast
from repl_rl.settings.named import Named
from repl_rl.tasks import Task

_STOPS = {LineEnd.EOS: Stop.EOS, LineEnd.LENGTH: Stop.LINE_TOO_LONG}


def llm_query(
    *,
    train: bool = False,
    model: str = "",
    max_tokens: Annotated[int, AtLeast(1)] = 256,
    calls: Annotated[int, AtLeast(1)] = 64,
    seconds: Annotated[float, Above(0)] = 60.0,
    at_once: Annotated[int, AtLeast(1)] = 4,
    at_once_in_all: Annotated[int, AtLeast(1)] = 64,
) -> HostFunction:
    """Return `llm_query(prompt)`: the policy's answer to a prompt, in a separate context.

    The answer is sampled with the temperature of the rollout.

    Args:
        train: train its tokens, each with the advantage of the calling line; otherwise they are masked.
        model: another model to query, a folder or owner/name, on the transformers engine; "" means the policy.
        max_tokens: token budget of an answer (>= 1); a longer one is truncated.
        calls: calls per rollout (>= 1).
        seconds: wall-clock time of a call (> 0).
        at_once: concurrent calls per rollout (>= 1).
        at_once_in_all: concurrent calls over all rollouts (>= 1).

    Raises:
        ConfigError: `train` is set together with another model.
    """
    if train and model:
        raise ConfigError("train of llm_query", True, f"only the policy is trained, and {model} is asked; leave it out")

    async def query(stage: Stage, prompt: str) -> Played:
        child = await _queried(stage, stage.player.asked(model), prompt, max_tokens)
        return Played("".join(line.text for line in child.lines).removesuffix("\n"), child, train)

    limits = HostLimits(seconds=seconds, calls=calls, at_once=at_once, at_once_in_all=at_once_in_all)
    described = host_function(_ask, limits, "llm_query")
    return replace(described, run=query, staged=True, model=model)


# The docstring is part of the prompt: it describes `llm_query` to the policy.
def _ask(prompt: str) -> str:
    """Ask a language model; it sees the prompt alone.

    Args:
        prompt: What it is told.
    """
    raise NotImplementedError


async def _queried(stage: Stage, model: Model, text: str, max_tokens: int) -> Trajectory:
    engine, renderer, origin = model.engine, model.renderer, stage.origin
    prompt = _prompt(renderer, text)
    left = engine.context_tokens - len(prompt.token_ids)
    if left < 1:
        raise Refused(f"the prompt has {len(prompt.token_ids)} tokens; the context holds {engine.context_tokens}")
    # A chat model ends its answer itself. Another model writes one line, because nothing else would end it.
    stop_ids = renderer.eos_ids if renderer.chat.there else renderer.stop_ids
    # Each call has its own seed; 31 bits, as for rollouts.
    seed = (origin.seed + 7919 * (stage.number + 1)) & 0x7FFFFFFF
    started = time.monotonic()
    async with engine.session(prompt.token_ids, Sampling(stage.temperature, seed, nested=True)) as session:
        chunk = await session.sample([], max_tokens=min(max_tokens, left), stop_ids=stop_ids)
    line = renderer.line(chunk, prompt)
    return Trajectory(
        id=f"{origin.id}/query-{stage.number}",
        task_id=origin.task.id,
        prompt=prompt,
        segments=(Sampled((line,)),),
        stop=_STOPS.get(line.end, Stop.FINISHED),
        policy_step=origin.policy_step,
        seed=seed,
        wall_s=time.monotonic() - started,
        parent=origin.id,
    )


def _prompt(renderer: Renderer, text: str) -> Prompt:
    if renderer.chat.there:
        return renderer.question_prompt("", text)
    return renderer.plain_prompt(f"{text}\n")


def child_rollout(
    *,
    depth: Annotated[int, AtLeast(1)] = 1,
    train: bool = True,
    calls: Annotated[int, AtLeast(1)] = 4,
    seconds: Annotated[float, Above(0)] = 120.0,
    at_once: Annotated[int, AtLeast(1)] = 2,
    at_once_in_all: Annotated[int, AtLeast(1)] = 16,
) -> HostFunction:
    """Return `rollout(question)`: the answer of a nested rollout of the same policy and sampler, or None.

    The nested rollout has a separate console.

    Args:
        depth: levels of nested rollouts (>= 1); the innermost ones are not offered the function.
        train: train its tokens, each with the advantage of the calling line; otherwise they are masked.
        calls: calls per rollout (>= 1).
        seconds: wall-clock time of a call (> 0).
        at_once: concurrent calls per rollout (>= 1).
        at_once_in_all: concurrent calls over all rollouts, at each depth (>= 1).
    """

    async def run(stage: Stage, question: str) -> Played:
        within = stage.depth + 1
        name = f"rollout-{stage.number}"
        task = Task(f"{stage.origin.task.id}/{name}", question, "")
        origin = stage.player.begin(task, f"{stage.origin.id}/{name}", stage.origin, within)
        # A prompt that fills the context is an error of the call, not a failure of the rollout.
        held = stage.player.asked("").engine.context_tokens
        if len(origin.prompt.token_ids) >= held:
            raise Refused(
                f"the question makes a prompt of {len(origin.prompt.token_ids)} tokens; the context has {held}"
            )
        child = await stage.player.play(origin, stage.temperature, within)
        child = replace(child, parent=stage.origin.id)
        return Played(child.answer, child, train and child.trainable)

    limits = HostLimits(seconds=seconds, calls=calls, at_once=at_once, at_once_in_all=at_once_in_all)
    described = host_function(_solve, limits, "rollout")
    return replace(described, run=run, staged=True, depth=depth)


# The docstring is part of the prompt: it describes `rollout` to the policy.
def _solve(question: str) -> str | None:
    """Have a question solved in another console of this kind; None: it was not answered.

    Args:
        question: What is to be solved; nothing else is known there.
    """
    raise NotImplementedError


SHIPPED: dict[str, Callable[..., HostFunction]] = {"llm_query": llm_query, "rollout": child_rollout}
"""Shipped host functions by name."""


def host_functions(text: str) -> tuple[HostFunction, ...]:
    """Load host functions by name: shipped ones, or functions of the user as `module:name`.

    Options follow a name in parentheses. Those of a user's function are the fields of `HostLimits`.

    Raises:
        ConfigError: a function or an option does not exist, a function cannot be described, or its name is not unique.
        UserCodeError: a module of the user raised.
    """
    functions = []
    for part in split_names(text):
        named = Named.read("host function", part)
        if named.name in SHIPPED:
            functions.append(named.bound("host function", SHIPPED[named.name])())
        elif ":" in named.name:
            functions.append(own_function(named))
        else:
            raise ConfigError("host function", named.name, f"choose one of {', '.join(SHIPPED)}, or give module:name")
    refuse_twins(functions)
    return tuple(functions)


def nested_sessions(functions: tuple[HostFunction, ...]) -> int:
    """Return the largest number of engine sessions that calls may need, without those of the calling rollouts."""
    # The limit of concurrent calls holds at each depth at which a function is offered.
    levels = 1 + max((f.depth for f in functions), default=0)
    return sum(f.limits.at_once_in_all * (f.depth or levels) for f in functions if f.staged and not f.model)
