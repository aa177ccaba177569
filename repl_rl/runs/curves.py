"""Picture of a run's training curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw_curves(rows: Sequence[Mapping[str, float]], held_out: Sequence[tuple[int, float]], path: Path) -> None:
    """Draw solve rate, line error rate and seconds per step, over steps, into a PNG.

    `held_out` holds one (step, solve rate) point per evaluation.
    """
    # Slow to import, and only this function needs it. `Figure` without pyplot needs no display and no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    left.plot(steps, [row["solve_rate"] for row in rows], label="training rollouts")
    left.plot(*zip(*held_out, strict=True), "o", label="held-out tasks")
    left.set(title="solve rate", xlabel="step", ylim=(0, 1.02))
    left.legend(loc="lower right", frameon=False)
    middle.plot(steps, [row["line_error_rate"] for row in rows], color="tab:red")
    middle.set(title="line error rate", xlabel="step", ylim=(0, None))
    for name in ("rollout_s", "update_s", "sync_s"):
        right.plot(steps, [row[name] for row in rows], label=name.removesuffix("_s"))
    right.set(title="seconds a step", xlabel="step", ylim=(0, None))
    right.legend(frameon=False)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
