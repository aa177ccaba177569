"""Rollouts without what a clock says of them."""

from collections.abc import Iterable
from dataclasses import replace

from repl_rl.trajectory.trajectory import Sampled, Trajectory


def untimed(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    return [
        replace(
            t,
            wall_s=0.0,
            segments=tuple(
                replace(
                    s,
                    lines=tuple(
                        replace(line, execution=replace(line.execution, elapsed_s=0.0) if line.execution else None)
                        for line in s.lines
                    ),
                )
                if isinstance(s, Sampled)
                else s
                for s in t.segments
            ),
        )
        for t in trajectories
    ]
