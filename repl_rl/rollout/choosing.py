"""Several lines written at one place, of which a rollout goes on from one; the others stay in the record."""

import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from repl_rl.errors import ConfigError
from repl_rl.record.trajectory import Alternative, Line


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of several lines a rollout goes on from."""

    at: int
    """Its number among them, from 0. It is trained as any other line."""
    advantages: Sequence[float] = ()
    """What the tokens of each line are trained with where it is not chosen, one finite number a line; (): they are
    not trained."""


Choose = Callable[[Sequence[Line]], Choice | Awaitable[Choice]]
"""Takes the lines in the order in which they were written. A plain one must not block: other rollouts wait."""


async def chosen(choose: Choose, lines: Sequence[Line]) -> tuple[int, Line]:
    """The number of the line that is chosen, and that line with the others as its alternatives.

    Raises:
        ConfigError: there is no such line, or not one finite advantage a line.
    """
    given = choose(lines)
    choice = await given if inspect.isawaitable(given) else given
    if not isinstance(choice, Choice) or not 0 <= choice.at < len(lines):
        raise ConfigError("episode.choose(), choice", choice, f"give a Choice among {len(lines)} lines, from 0")
    advantages = choice.advantages or (None,) * len(lines)
    if len(advantages) != len(lines):
        raise ConfigError("episode.choose(), advantages", len(advantages), f"give one for each of {len(lines)} lines")
    others = tuple(
        Alternative(line.token_ids, line.logprobs, line.text, line.end, advantage, line.policy_step)
        for number, (line, advantage) in enumerate(zip(lines, advantages, strict=True))
        if number != choice.at
    )
    return choice.at, replace(lines[choice.at], alternatives=others)


def agreed(lines: Sequence[Line]) -> Choice:
    """The line whose text was written most often; of several such, the one with the likeliest tokens."""
    often = Counter(line.text for line in lines)
    return Choice(max(range(len(lines)), key=lambda at: (often[lines[at].text], fmean(lines[at].logprobs), -at)))
