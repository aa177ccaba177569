"""Effect of a rollout's stop on training: one policy, applied once, before the rollout is used."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from repl_rl.errors import ConfigError
from repl_rl.record.outcome import increased
from repl_rl.record.trajectory import NamedReward, Stop, Trajectory

Name = Literal["eos", "finished", "max_lines", "max_tokens", "line_too_long", "exited", "doomed", "wall_clock"]
"""Values of `Stop`, without `answered`, which is always trained on, and `fault`, which never is."""

CUT = frozenset({Stop.MAX_LINES, Stop.MAX_TOKENS, Stop.LINE_TOO_LONG, Stop.WALL_CLOCK})
"""Stops that a budget decided, not the policy."""


@dataclass(frozen=True, slots=True)
class StopPolicy:
    """Stops that are masked or penalised. A rollout with any other stop is trained on."""

    mask: tuple[Name, ...] = ()
    """Stops whose rollouts teach nothing: none of their tokens gets a gradient, and they are in no baseline."""
    penalise: tuple[Name, ...] = ()
    """Stops that subtract `penalty` from a rollout's outcome. A rollout without an outcome stays without one."""
    penalty: float = 0.5
    """Cost of a penalised stop, > 0, in reward units."""

    def __post_init__(self) -> None:
        for name in (*self.mask, *self.penalise):
            if name not in get_args(Name):
                raise ConfigError("stops.mask or stops.penalise", name, f"choose among {', '.join(get_args(Name))}")
        for name in self.mask:
            if name in self.penalise:
                raise ConfigError("stops.mask and stops.penalise", name, "a stop has one policy; leave it out of one")
        if not (math.isfinite(self.penalty) and self.penalty > 0):
            raise ConfigError("stops.penalty", self.penalty, "give a finite number above 0")

    def learned(self, trajectory: Trajectory) -> Trajectory:
        """Return the rollout as training sees it.

        A masked rollout has no sampled tokens and no outcome. All rules for rollouts that may not be trained on, from
        masks to baselines, then hold for it, too.
        """
        if trajectory.stop.value in self.mask:
            return replace(trajectory.ungraded(), segments=(), stop=Stop.FINISHED)
        if trajectory.stop.value in self.penalise and trajectory.outcome is not None:
            return increased(trajectory, NamedReward(trajectory.stop.value, -self.penalty))
        return trajectory

    def rates(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return shares of the rollouts that did not fail on our side: cut by a budget, masked, penalised."""
        stops = [t.stop for t in trajectories if t.failure is None]
        count = max(len(stops), 1)
        return {
            "cut_rate": sum(stop in CUT for stop in stops) / count,
            "stop_masked_rate": sum(stop.value in self.mask for stop in stops) / count,
            "stop_penalised_rate": sum(stop.value in self.penalise for stop in stops) / count,
        }


def ends_of(trajectories: Sequence[Trajectory]) -> list[tuple[bool, int]]:
    """Return (was it cut, sampled tokens) for each rollout that is trained on."""
    return [(t.stop in CUT, t.sampled_tokens) for t in trajectories if t.trainable]


def told_of_ends(ends: Sequence[tuple[bool, int]]) -> dict[str, float]:
    """Return the share of rollouts that were cut, and the lengths of the others, under TRL's names."""
    whole = [length for cut, length in ends if not cut] or [0]
    return {
        "clipped_ratio": sum(cut for cut, _ in ends) / max(len(ends), 1),
        "mean_terminated_length": sum(whole) / len(whole),
        "min_terminated_length": float(min(whole)),
        "max_terminated_length": float(max(whole)),
    }
