"""Several lines sampled at one position: a rollout continues from one, and the others remain in the record."""

import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from repl_rl.errors import ConfigError
from repl_rl.record.trajectory import Alternative, Line


@dataclass(frozen=True, slots=True)
class Choice:
    """Line, among several candidates, from which a rollout continues."""

    at: int
    """Index of that line, from 0. It is trained as any other line."""
    advantages: Sequence[float] = ()
    """Advantage for the tokens of each line that is not chosen, one finite number per line; () trains none of them."""


Choose = Callable[[Sequence[Line]], Choice | Awaitable[Choice]]
"""Function of the lines in the order of sampling. A plain one must not block, because other rollouts wait."""


async def chosen(choose: Choose, lines: Sequence[Line]) -> tuple[int, Line]:
    """Return the index of the chosen line, and that line with the others as its alternatives.

    Raises:
        ConfigError: the line does not exist, or the advantages are not one finite number per line.
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
    """Choose the line whose text was written most often; the one with the likeliest tokens wins a tie."""
    often = Counter(line.text for line in lines)
    # The earliest line wins if all else is equal.
    return Choice(max(range(len(lines)), key=lambda at: (often[lines[at].text], fmean(lines[at].logprobs), -at)))
