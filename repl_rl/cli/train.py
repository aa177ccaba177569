"""`repl-rl train`: evaluate a policy, train it, evaluate it again, and print the difference.

`TrainConfig` has the settings and `main` checks them. The run itself is in `repl_rl.cli.train_and_evaluate`. The output
is here, too: the progress, the summary, and a picture of the curves.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table

from repl_rl.cli.apply_model_defaults import UpdateInfo, apply_model_defaults
from repl_rl.cli.live_status import RolloutProgress
from repl_rl.cli.next_steps import print_steps, select_flags, suggest_next_steps
from repl_rl.cli.terminal_output import format_duration, report_errors_on_rank_zero, silence_other_ranks
from repl_rl.engine import ENGINES, Vllm
from repl_rl.errors import ConfigError
from repl_rl.ray.config import get_worker_options, parse_workers
from repl_rl.rollout import RuntimeInfo
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.run_folder import BEST, RunFolder, check_same_settings
from repl_rl.runs.run_metadata import CONFIG, RUNS, read_settings
from repl_rl.settings.argument_parser import parse_with_sources
from repl_rl.settings.component_options import HasOptions
from repl_rl.settings.help_pages import COMMON
from repl_rl.settings.model_defaults import PretrainedDefault
from repl_rl.settings.value_bounds import AtLeast, check_fields
from repl_rl.tasks import Split, Task
from repl_rl.trainer.checkpoint_schedule import get_checkpoint_options, parse_checkpoint_schedule
from repl_rl.trainer.config import TrainerConfig
from repl_rl.utils.atomic_files import Json, check_name, validate_no_inputs_inside
from repl_rl.utils.hardware import count_cores
from repl_rl.utils.package_data import find_asset
from repl_rl.utils.processes import get_rank, get_world_size


@dataclass(frozen=True)
class TrainConfig(RolloutConfig):
    """Train a policy. Without options: the bundled policy on the bundled tasks."""

    name: Annotated[str, COMMON] = "quickstart"
    """Name of the run, one component of a path; its folder is OUT/NAME."""
    out: Annotated[Path, COMMON] = RUNS
    """Folder of the run folders."""
    overwrite: Annotated[bool, COMMON] = False
    """Replace a run of the same name. A folder that is no run, or holds a file of yours, is refused."""
    resume: Annotated[bool, COMMON] = False
    """Resume the run of the same name from its newest training state, or begin it if it does not exist. Its settings
    must be the same, except for steps, which may end the run earlier or later."""
    checkpoint: Annotated[str, HasOptions(get_checkpoint_options), COMMON] = "within"
    """Schedule of the training states for --resume: within or never. within loses at most every_s = 60 seconds or one
    step, takes at most max_time_share = 0.01 of the time, and keeps the newest keep_last = 2 states."""
    workers: Annotated[str, HasOptions(get_worker_options), COMMON] = "local"
    """Place of the rollouts: local (this process), ray (nodes of a Ray cluster that is started here) or
    ray://HOST:PORT (of a running cluster). Its options are given as --workers.KEY VALUE, such as
    --workers.max-workers 2."""
    train_tasks: Annotated[int, AtLeast(1)] = 4096
    """Maximum number of training tasks, from which each step draws, >= 1."""
    eval_tasks: Annotated[int, AtLeast(1), PretrainedDefault.on_cpu(32), COMMON] = 240
    """Maximum number of held-out tasks per evaluation, >= 1."""
    eval_steps: Annotated[int, AtLeast(0), COMMON] = 0
    """Steps between evaluations during training, >= 0. 0 evaluates only before and after training. Each
    evaluation plays every held-out task twice, at temperature 1 and greedily. checkpoints/best is the policy with the
    highest solve rate at temperature 1."""
    validation: str = ""
    """Source of held-out tasks, as in `tasks`. Training then uses all other questions of `tasks`.
    Empty: `tasks` is split."""
    curriculum: bool = False
    """Choose each step's tasks by the solve rates so far, mostly from families that are solved sometimes."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    @property
    def converted_models_folder(self) -> Path:
        """Folder of converted models; see `RolloutConfig.converted_models_folder`."""
        return self.out / ".models"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        check_name(self.name)
        parse_checkpoint_schedule(self.checkpoint)
        parse_workers(self.workers)
        if self.eval_steps > self.trainer.steps:
            remedy = f"training takes {self.trainer.steps} steps, so none would run; give at most that, or 0"
            raise ConfigError("eval_steps", self.eval_steps, remedy)

    def split_tasks(self) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
        """Return the tasks to train on and those to evaluate on, at most `train_tasks` and `eval_tasks`.

        No question is in both: questions of a validation file are not trained on.

        Raises:
            ConfigError: a source cannot be read, or has no tasks.
        """
        if not self.validation:
            return self.draw_tasks(Split.TRAIN, self.train_tasks), self.draw_tasks(Split.HELD_OUT, self.eval_tasks)
        held_out = replace(self, tasks=self.validation).draw_tasks(Split.ALL, self.eval_tasks)
        asked = {task.question for task in held_out}
        training = tuple(task for task in self.draw_tasks(Split.ALL, self.train_tasks) if task.question not in asked)
        if not training:
            remedy = "every question of `tasks` is in it; give another file, or leave it out: then `tasks` is split"
            raise ConfigError("validation", self.validation, remedy)
        return training, held_out


def describe_update(config: TrainConfig) -> UpdateInfo:
    """Return the properties of the update that defaults depend on."""
    trainer = config.trainer
    is_vllm_local = parse_workers(config.workers) is None and isinstance(ENGINES.resolve(config.engine), Vllm)
    return UpdateInfo(
        trainer.lora_rank > 0,
        trainer.count_rows_per_step(get_world_size()),
        trainer.steps,
        is_vllm_local,
        trainer.max_staleness_steps > 0,
    )


def main(argv: Sequence[str]) -> int:
    """Run the command, in all processes of its launcher, and return the exit code."""
    silence_other_ranks()
    # Every rank finds the same errors in the settings. Rank 0 reports them first.
    with report_errors_on_rank_zero():
        asked = parse_with_sources(TrainConfig, "train", argv, presets=find_asset("presets"))
        config = asked.config
        folder = RunFolder(config.out / config.name, config.overwrite, config.resume, main=get_rank() == 0)
        if config.overwrite:
            read = (config.model, config.tasks, config.validation)
            validate_no_inputs_inside(
                "run folder", folder.path, zip(("model", "tasks", "validation"), read, strict=True)
            )
        # Defaults depend on the model, and on the recorded settings of a resumed run.
        recorded = folder.path / CONFIG if config.resume else None
        config = apply_model_defaults(asked, recorded, describe_update)
        resolved = config.resolve_prompt_settings(recorded)
        if resolved.date != config.date and get_world_size() > 1:
            remedy = "the chat template writes it, and processes that train together must agree; give a date"
            raise ConfigError("date", config.date, remedy)
        # The import takes seconds, which a mistake in the settings need not wait for.
        from repl_rl.cli.train_and_evaluate import Run

        run = Run(resolved, folder, select_flags(argv))
        config = run.config
    if config.resume and folder.exists:
        # Check the settings before the engine opens, and do nothing if no steps are left.
        if run.main:
            check_same_settings(folder.path, run.settings)
        if folder.is_finished(config.trainer.steps):
            run.console.print(
                f"{folder.path} is finished: nothing is left to do; a larger --trainer.steps would continue it"
            )
            print_steps(run.console, suggest_next_steps(folder.path, read_settings(folder.path), mine=True))
            return 0
    run.execute()
    return 0


class TrainingProgress:
    """Progress of training: a row per finished step, and the status of the step that runs."""

    def __init__(
        self,
        console: Console,
        steps: int,
        done: int,
        start_rollouts: Callable[[str], RolloutProgress],
    ) -> None:
        """Start at `done` steps, which a resumed run has made before.

        `start_rollouts` returns the progress of the rollouts of the next step, under a title.
        """
        self._console = console
        self._steps = steps
        self._done = self._before = done
        self._update_s = 0.0
        self._started = time.monotonic()
        self._start_rollouts = start_rollouts
        self._rollouts = start_rollouts(self._title)

    @property
    def _title(self) -> str:
        return f"step {self._done + 1}/{self._steps}"

    def describe(self) -> str:
        """Return the status of the step that runs, as one line."""
        text, update_s = self._rollouts.describe(), self._rollouts.get_since_completion_s()
        if update_s is None:
            return text
        before = f", the one before took {format_duration(self._update_s)}" if self._update_s else ""
        return f"{text}; updating the policy, {format_duration(update_s)} so far{before}"

    def advance(self, metrics: Mapping[str, float]) -> None:
        """Print one finished step."""
        self._done += 1
        self._update_s = metrics["update_s"]
        # Estimate the time left from the steps of this process alone.
        left_s = (time.monotonic() - self._started) / (self._done - self._before) * (self._steps - self._done)
        rate = metrics["sampled_tokens"] / max(metrics["rollout_s"], 1e-9)
        self._console.print(
            f"step {self._done:>4}/{self._steps}  solved {metrics['solve_rate']:6.1%}  "
            f"lines in error {metrics['line_error_rate']:6.1%}  {rate:7.0f} tokens/s  "
            f"rollout {metrics['rollout_s']:5.2f} s  update {metrics['update_s']:5.2f} s"
            + (f"  {format_duration(left_s)} of steps left" if self._done < self._steps else "")
        )
        self._rollouts = self._start_rollouts(self._title)


def build_initial_summary(
    rollout_config: RolloutConfig, facts: RuntimeInfo, steps: int, held_out: int
) -> dict[str, Json]:
    """Return the summary of a run before its first step. `held_out` is the number of its evaluation tasks."""
    return {
        "status": "running",
        "model": rollout_config.policy.reference,
        "model_folder": str(rollout_config.model_folder),
        "model_fallback": rollout_config.policy.fallback,
        "engine": facts.engine,
        "engine_fallback": facts.engine_fallback,
        "update_fallbacks": [],
        "sampler_fallback": facts.sampler_fallback,
        "sandbox": facts.sandbox,
        "steps": steps,
        "held_out_tasks": held_out,
        "cores": count_cores(),
        "processes": get_world_size(),
    }


def print_summary(console: Console, name: str, folder: RunFolder, summary: Mapping[str, Json]) -> None:
    """Print the solve rates before and after training, the paths of the results, and the next commands."""
    table = Table("held-out tasks", "before", "after", title=f"{name}: what training changed")
    for key, label in (("solve_rate", "solved, temperature 1"), ("greedy", "solved, greedy"),
                       ("line_error_rate", "lines in error")):  # fmt: skip
        table.add_row(label, *(f"{_get_number(summary, f'{key}_{when}'):.1%}" for when in ("first", "last")))
    console.print(table)
    followed = summary["tamper_followed"]
    if isinstance(followed, float):
        console.print(f"answers that follow an altered console output: {followed:.1%}")
    console.print(f"run folder {folder.path}: report.html, metrics.jsonl, summary.json, trajectories/")
    console.print(f"trained policy {folder.checkpoints_folder / 'final'}")
    if "best_step" in summary:
        best = f"step {summary['best_step']}, {_get_number(summary, 'solve_rate_best'):.1%} at temperature 1"
        console.print(f"best policy {folder.checkpoints_folder / BEST} ({best})")
    print_steps(console, suggest_next_steps(folder.path, read_settings(folder.path), mine=True))


def draw_curves(rows: Sequence[Mapping[str, float]], held_out: Sequence[tuple[int, float]], path: Path) -> None:
    """Draw solve rate, line error rate and seconds per step, over steps, into a PNG.

    `held_out` holds one (step, solve rate) point per evaluation.
    """
    # Slow to import, and only this function needs it. `Figure` without pyplot needs no display and no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Three plots next to each other.
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


def _get_number(summary: Mapping[str, Json], key: str) -> float:
    value = summary[key]
    assert isinstance(value, int | float)
    return float(value)
