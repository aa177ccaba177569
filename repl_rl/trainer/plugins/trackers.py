"""Trackers of step metrics besides the run folder: TRL's `report_to`, with our names and a table of rollouts."""

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback, get_reporting_integration_callbacks

from repl_rl.runs.store import escape_control_characters, mark_observations
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trajectory.console_text import clip_middle
from repl_rl.trajectory.trajectory import Trajectory

PREFIX = "repl_rl/"
"""Prefix of each name of `metrics.jsonl`; TRL puts `train/` before it, as before its own names."""
TABLE = "train/repl_rl/rollouts"
"""Name of the table in a tracker."""
COLUMNS = ("step", "task", "prompt", "completion", "stop", "outcome", "reward")
TABLE_ROWS = 16
"""Number of rollouts in the table of a step, the first ones; `trajectories/` has all."""


class Trackers(TrainerCallback):
    """TRL's tracker callbacks for `report_to`.

    They are detached until `attach_callbacks` puts them behind the callbacks that add metrics.
    """

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        """TensorBoard's files go to `folder`/tensorboard, unless TENSORBOARD_LOGGING_DIR names another folder."""
        self._trainer = trainer
        self._names: list[str] = trainer.args.report_to
        # TRL has added its callbacks already: take them out of the trainer.
        self._callbacks = [trainer.pop_callback(kind) for kind in get_reporting_integration_callbacks(self._names)]
        self._boards = [callback for callback in self._callbacks if isinstance(callback, TensorBoardCallback)]
        for board in self._boards:
            board.logging_dir = board.logging_dir or str(folder / "tensorboard")
        if "wandb" in self._names:
            os.environ.setdefault("WANDB_PROJECT", trainer.args.project)
            os.environ.setdefault("WANDB_RUN_GROUP", trainer.args.run_name)

    def attach_callbacks(self) -> None:
        """Add the trackers to the trainer; they receive all logs from now on."""
        for callback in (self, *self._callbacks):
            self._trainer.add_callback(callback)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Make TensorBoard ignore the points of steps that a resumed run repeats.

        A new run writes such a purge event too, because TensorBoard's reader ignores the first one in its files.
        """
        for board in self._boards if state.is_world_process_zero else ():
            writer = import_module("torch.utils.tensorboard").SummaryWriter
            board.tb_writer = writer(log_dir=board.logging_dir, purge_step=state.global_step + 1)

    def log_table(self, record: StepRecord, trajectories: Sequence[Trajectory], policy_step: int) -> None:
        """Send the first rollouts of a step, at the optimizer step of its metrics."""
        rows = build_table_rows(record, trajectories) if self._names else []
        for board in self._boards:
            board.tb_writer.add_text(TABLE, "\n\n".join(map(_format_markdown_row, rows)), policy_step)
        for name in ("trackio", "wandb"):
            if name in self._names:
                _log_table(name, rows, policy_step)


def build_table_rows(record: StepRecord, trajectories: Sequence[Trajectory]) -> list[list[str | float | None]]:
    """Return rows of `COLUMNS`; `reward` is the sum of line rewards, or None for a rollout that is not trained on."""
    credit = record.credit or ((),) * len(trajectories)
    pairs = list(zip(trajectories, credit, strict=True))[:TABLE_ROWS]
    return [
        [
            record.step,
            escape_control_characters(t.task_id),
            clip_middle(escape_control_characters(t.prompt.text)),
            clip_middle(mark_observations(t)),
            t.stop.value,
            t.outcome,
            sum(line.reward for line in row) if row else None,
        ]
        for t, row in pairs
    ]


def _log_table(name: str, rows: list[list[str | float | None]], step: int) -> None:
    # trackio and wandb share the names `log` and `Table`.
    sink = import_module(name)
    sink.log({TABLE: sink.Table(columns=list(COLUMNS), data=rows), "train/global_step": step})


def _format_markdown_row(row: Sequence[str | float | None]) -> str:
    """Format a row for TensorBoard; texts are indented, so that nothing in them is markup."""
    cells = dict(zip(COLUMNS, row, strict=True))
    head = ", ".join(f"{name} {cells[name]}" for name in ("stop", "outcome", "reward"))
    text = f"{cells['task']}: {head}\n{cells['prompt']}{cells['completion']}"
    return "\n".join(f"    {line}" for line in text.split("\n"))
