"""Train the bundled policy for three steps with a custom advantage estimator.

    python examples/custom_estimator.py
    python examples/custom_estimator.py --sandbox unsafe    # without bubblewrap; isolates nothing

An estimator is a plain function from the rewards of a group to one advantage per line. This one takes the outcome
minus the group's mean, and subtracts a fixed penalty from each line that ended in an error.

The script prints one row per step: solve rate, share of lines in error, and the mean advantage of lines with an error
and without. The last line is the folder's setting that names the estimator.
"""

import argparse
import logging
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from repl_rl import GroupRewards, RolloutConfig, StepRecord, TrainerConfig, Trajectory, component, train


def blame_errors(group: GroupRewards, *, penalty: float = 0.5) -> tuple[tuple[float, ...], ...]:
    """Return A(i, l) = R(i) - mean R - penalty * [line l of rollout i ended in an error].

    Keyword-only arguments are options of the estimator, such as --trainer.estimator.penalty 0.5.
    """
    # The baseline: mean outcome of the rollouts that were graded. An ungraded rollout has outcome None.
    graded = [rollout.outcome for rollout in group.rollouts if rollout.outcome is not None]
    mean = fmean(graded) if graded else 0.0
    rows: list[tuple[float, ...]] = []
    for rollout in group.rollouts:
        outcome = 0.0 if rollout.outcome is None else rollout.outcome - mean
        # `shaping` is the part of a line's reward that comes from its status; the default table is negative for errors.
        rows.append(tuple(outcome - penalty * (line.shaping < 0) for line in rollout.lines))
    # One row per rollout and one finite number per line; the trainer refuses anything else.
    return tuple(rows)


def print_step(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
    """Print what one step did; `train` calls this after each step."""
    # `record.credit` has one entry per trajectory, with one entry per line.
    advantages: dict[bool, list[float]] = {True: [], False: []}
    for trajectory, credit_L in zip(trajectories, record.credit, strict=True):
        for line, credit in zip(trajectory.lines, credit_L, strict=False):
            failed = line.execution is not None and line.execution.status.is_error
            advantages[failed].append(credit.advantage)
    mean = {failed: f"{fmean(values):+.3f}" if values else "none" for failed, values in advantages.items()}
    print(
        f"step {record.step}  solved {record.metrics['solve_rate']:.1%}  "
        f"lines in error {record.metrics['line_error_rate']:.1%}  "
        f"advantage with an error {mean[True]}  without {mean[False]}",
        flush=True,
    )


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sandbox", default="local", help="local (bubblewrap), docker, or unsafe (no isolation)")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    world = RolloutConfig(engine="transformers", sandbox=options.sandbox, concurrency=16)
    config = TrainerConfig(
        steps=3,
        prompts_per_step=4,  # tasks per step
        group_size=4,  # rollouts per task, which the baseline compares
        warmup_steps=1,
        # module:function, found because Python puts this file's folder on its path.
        estimator=component("custom_estimator:blame_errors", penalty=0.5),
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(world, config, out=run, train_tasks=64, on_step=print_step)
        # The run folder records the estimator by its name: keep the module next to the run.
        settings = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
        print(f"recorded: {settings['trainer']['estimator']}")


if __name__ == "__main__":
    main()
