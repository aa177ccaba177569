"""Stop policy: the effect of a rollout's stop on its training, such as a mask or a penalty."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from repl_rl.errors import ConfigError
from repl_rl.trajectory.trajectory import NamedReward, Stop, Trajectory, add_outcome_part

StopName = Literal["eos", "finished", "max_lines", "max_tokens", "line_too_long", "exited", "doomed", "wall_clock"]
"""Values of `Stop`, without `answered`, which is always trained on, and `fault`, which never is."""
CUT = frozenset({Stop.MAX_LINES, Stop.MAX_TOKENS, Stop.LINE_TOO_LONG, Stop.WALL_CLOCK})
"""Stops that a budget decided, not the policy."""


@dataclass(frozen=True, slots=True)
class StopPolicy:
    """Stops that are masked or penalised. Rollouts with any other stop, except `fault`, are trained on."""

    mask: tuple[StopName, ...] = ()
    """Stops whose rollouts teach nothing: none of their tokens gets a gradient, and they are in no baseline."""
    penalise: tuple[StopName, ...] = ()
    """Stops that subtract `penalty` from a rollout's outcome. A rollout without an outcome stays without one."""
    penalty: float = 0.5
    """Cost of a penalised stop, > 0, in reward units."""

    def __post_init__(self) -> None:
        for name in (*self.mask, *self.penalise):
            if name not in get_args(StopName):
                raise ConfigError("stops.mask or stops.penalise", name, f"choose among {', '.join(get_args(StopName))}")
        for name in self.mask:
            if name in self.penalise:
                raise ConfigError("stops.mask and stops.penalise", name, "a stop has one policy; leave it out of one")
        if not (math.isfinite(self.penalty) and self.penalty > 0):
            raise ConfigError("stops.penalty", self.penalty, "give a finite number above 0")

    def apply(self, trajectory: Trajectory) -> Trajectory:
        """Return the rollout as training sees it.

        A masked rollout has no sampled tokens and no outcome. All rules for rollouts that may not be trained on, from
        masks to baselines, then hold for it, too.
        """
        # Without segments the rollout has no line, so it is not trainable. `FINISHED` is valid without a line.
        if trajectory.stop.value in self.mask:
            return replace(trajectory.without_outcome(), segments=(), stop=Stop.FINISHED)
        if trajectory.stop.value in self.penalise and trajectory.outcome is not None:
            return add_outcome_part(trajectory, NamedReward(trajectory.stop.value, -self.penalty))
        return trajectory

    def compute_rates(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return shares of the rollouts that did not fail on our side: cut by a budget, masked, penalised."""
        stops = [t.stop for t in trajectories if t.failure is None]
        count = max(len(stops), 1)
        return {
            "cut_rate": sum(stop in CUT for stop in stops) / count,
            "stop_masked_rate": sum(stop.value in self.mask for stop in stops) / count,
            "stop_penalised_rate": sum(stop.value in self.penalise for stop in stops) / count,
        }
