"""Extra rows of an update: children, which were sampled for calls of host functions, and alternatives of lines.

A child gets the credit of the line that called it: each of its sampled tokens gets that line's advantage. It therefore
has no separate baseline, and the group's baseline uses the rollouts alone. A child within a child has the same
advantage.

An alternative of a line is a row if its sampler gave it an advantage. Its prompt is everything before the line.
"""

from collections.abc import Iterator, Sequence

from repl_rl.record.failure import Failure, FailureKind
from repl_rl.record.trajectory import Line, Observed, Prompt, Sampled, Stop, Trajectory

Row = tuple[Trajectory, tuple[float, ...]]
"""A trajectory, and one advantage per line."""


def trained_children(trajectory: Trajectory, advantages_L: Sequence[float]) -> Iterator[Row]:
    """Yield the trained children of a trajectory, with one advantage per line. `advantages_L` are the parent's."""
    by_id = {child.id: child for child in trajectory.children}
    for line, advantage in zip(trajectory.lines, advantages_L, strict=True):
        for call in line.execution.calls if line.execution is not None else ():
            if call.trained and call.child in by_id and by_id[call.child].trainable:
                child = by_id[call.child]
                row = (advantage,) * len(child.lines)
                yield child, row
                yield from trained_children(child, row)


def trained_alternatives(trajectory: Trajectory) -> Iterator[Row]:
    """Yield the trained alternatives of its lines, as trajectories of one line after the same ids."""
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
            # Later alternatives follow the line that the rollout kept.
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
    """Return the rows of an update, the rollouts and then the extra rows of each; and an advantage for each line."""
    rows, values = list(rollouts), list(advantages_B_L)
    for rollout, advantages_L in zip(rollouts, advantages_B_L, strict=True):
        if rollout.trainable:
            children = list(trained_children(rollout, advantages_L))
            # Lines of children may have alternatives, too.
            others = (row for t in (rollout, *(child for child, _ in children)) for row in trained_alternatives(t))
            for added, row in (*children, *others):
                rows.append(added)
                values.append(row)
    return rows, values


def filled(
    rows: Sequence[Trajectory], advantages_B_L: Sequence[Sequence[float]], count: int
) -> tuple[list[Trajectory], list[Sequence[float]]]:
    """Return both lists, padded with idle rows to `count` rows."""
    idle = count - len(rows)
    return [*rows, *[idle_row(rows[0])] * idle], [*advantages_B_L, *[()] * idle]


def idle_row(like: Trajectory) -> Trajectory:
    """Return a row that teaches nothing, to pad a batch. Its prompt is that of `like`."""
    nothing = Failure(FailureKind.OTHER, "no rollout: it fills up a batch")
    return Trajectory("idle", like.task_id, like.prompt, (), Stop.FAULT, like.policy_step, 0, 0.0, failure=nothing)
