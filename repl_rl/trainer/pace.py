"""How often a run is saved: as seldom as the promise allows, and never so often that it costs more than it may."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from repl_rl.errors import ConfigError
from repl_rl.settings.bounds import Above, AtLeast
from repl_rl.settings.named import Named


@dataclass(frozen=True, slots=True)
class Saving:
    """How often the state of a run is saved, and how many states are kept."""

    seconds: float = 60.0
    """At most so much work is lost, or one step where that takes longer; 0: no step is ever lost."""
    share: float = 0.01
    """Largest share of the wall clock that saving may take, in (0, 1]; where that is too little, more is lost."""
    keep: int = 2
    """Newest states that are kept: a second one, in case the newest is damaged."""


def within(
    *,
    seconds: Annotated[float, AtLeast(0)] = 60.0,
    share: Annotated[float, Above(0, at_most=1)] = 0.01,
    keep: Annotated[int, AtLeast(1)] = 2,
) -> Saving:
    """So that at most `seconds` or one step are lost, as far as `share` allows; `keep` states are kept."""
    return Saving(seconds, share, keep)


def saving(text: str) -> Saving | None:
    """What a person writes: "within(seconds=60, keep=2)"; None for "never".

    Raises:
        ConfigError: it is something else.
    """
    chosen = Named.read("states", text)
    if chosen.name == "never" and not chosen.options:
        return None
    if chosen.name != "within":
        raise ConfigError("states", text, 'give "within(seconds=60, keep=2)" or "never"')
    return chosen.bound("states", within)()


class Pace:
    """Says at the end of each step whether to save now.

    Late enough: not before the next step would go past `seconds`. Seldom enough: not before what the last time cost has
    become a `share` of the time that passed.
    """

    def __init__(self, saving: Saving, clock: Callable[[], float] = time.monotonic) -> None:
        self._saving = saving
        self._clock = clock
        self._saved_s = self._stepped_s = clock()
        self._cost_s = 0.0

    def due(self) -> bool:
        """A step has ended: is it to be saved?"""
        now_s = self._clock()
        step_s, self._stepped_s = now_s - self._stepped_s, now_s
        since_s = now_s - self._saved_s
        return since_s + step_s >= self._saving.seconds and since_s * self._saving.share >= self._cost_s

    def saved(self) -> None:
        """It was saved now."""
        self._saved_s = self._clock()

    def cost(self, seconds: float) -> None:
        """What that cost in processor time, copies and writing together."""
        self._cost_s = seconds
