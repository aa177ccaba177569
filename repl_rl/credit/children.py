"""Rows of an update beside its rollouts: what was sampled for calls of host functions, and alternatives of lines.

A child is credited as the line that asked for it: each of its sampled tokens gets that line's advantage. So it is in no
baseline of its own, and the group's is formed of the rollouts alone. A child within a child has the same advantage.

An alternative of a line is a row where its sampler gave it an advantage: its prompt is all that stood before the line.
"""

from collections.abc import Iterator, Sequence

from repl_rl.record.failure import Failure, FailureKind
from repl_rl.record.trajectory import Line, Observed, Prompt, Sampled, Stop, Trajectory

Row = tuple[Trajectory, tuple[float, ...]]
"""A trajectory, and an advantage for each of its lines."""


def trained_children(trajectory: Trajectory, advantages_L: Sequence[float]) -> Iterator[Row]:
    """The children of a trajectory that are trained, each with an advantage for its lines; `advantages_L`: its own."""
    by_id = {child.id: child for child in trajectory.children}
    for line, advantage in zip(trajectory.lines, advantages_L, strict=True):
        for call in line.execution.calls if line.execution is not None else ():
            if call.trained and call.child in by_id and by_id[call.child].trainable:
                child = by_id[call.child]
                row = (advantage,) * len(child.lines)
                yield child, row
                yield from trained_children(child, row)


def trained_alternatives(trajectory: Trajectory) -> Iterator[Row]:
    """The alternatives of its lines that are trained, each a trajectory of one line from the same ids."""
    before, number = list(trajectory.prompt.token_ids), 0
    for segment in trajectory.segments:
        for line in segment.lines if isinstance(segment, Sampled) else ():
            for place, other in enumerate(line.alternatives):
                if other.advantage is not None:
                    ids, step = other.token_ids, other.policy_step
                    written = Line(ids, other.logprobs, other.text, other.end, policy_step=step)
                    prompt = Prompt(trajectory.prompt.text, tuple(before))
                    row = _of_one_line(trajectory, f"{trajectory.id}~{number}.{place}", prompt, written)
                    yield row, (other.advantage,)
            before += line.token_ids
            number += 1
        if isinstance(segment, Observed):
            before += segment.token_ids


def _of_one_line(like: Trajectory, id: str, prompt: Prompt, line: Line) -> Trajectory:
    segments = (Sampled((line,)),)
    return Trajectory(id, like.task_id, prompt, segments, Stop.FINISHED, like.policy_step, like.seed, 0.0)


def with_children(
    rollouts: Sequence[Trajectory], advantages_B_L: Sequence[Sequence[float]]
) -> tuple[list[Trajectory], list[Sequence[float]]]:
    """The rows of an update: the rollouts, then what each adds, in order; and an advantage for each line."""
    rows, values = list(rollouts), list(advantages_B_L)
    for rollout, advantages_L in zip(rollouts, advantages_B_L, strict=True):
        if rollout.trainable:
            children = list(trained_children(rollout, advantages_L))
            others = (row for t in (rollout, *(child for child, _ in children)) for row in trained_alternatives(t))
            for added, row in (*children, *others):
                rows.append(added)
                values.append(row)
    return rows, values


def filled(
    rows: Sequence[Trajectory], advantages_B_L: Sequence[Sequence[float]], count: int
) -> tuple[list[Trajectory], list[Sequence[float]]]:
    """Both with idle rows at the end, `count` in all."""
    idle = count - len(rows)
    return [*rows, *[idle_row(rows[0])] * idle], [*advantages_B_L, *[()] * idle]


def idle_row(like: Trajectory) -> Trajectory:
    """A row that teaches nothing, where a batch needs one more: its prompt is that of `like`."""
    nothing = Failure(FailureKind.OTHER, "no rollout: it fills up a batch")
    return Trajectory("idle", like.task_id, like.prompt, (), Stop.FAULT, like.policy_step, 0, 0.0, failure=nothing)
