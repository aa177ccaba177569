"""`repl-rl train`: evaluate a policy, train it, evaluate it again, and print the difference."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from repl_rl.cli.defaults import Update, apply_model_defaults
from repl_rl.cli.onward import after, tell
from repl_rl.cli.processes import hush, led
from repl_rl.errors import ConfigError
from repl_rl.machine.assets import asset
from repl_rl.machine.launched import processes, rank
from repl_rl.machine.outputs import check_name, refuse_inputs
from repl_rl.rollout import chosen_fleet, fleet_options
from repl_rl.runs.folder import RunFolder
from repl_rl.runs.told import CONFIG, RUNS, settings_of
from repl_rl.settings.arguments import parse_with_sources
from repl_rl.settings.bounds import AtLeast, check_fields
from repl_rl.settings.optioned import Optioned
from repl_rl.settings.same import check_same_settings
from repl_rl.tasks import Split, Task
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.pace import saving
from repl_rl.world import World


@dataclass(frozen=True)
class TrainConfig(World):
    """Train a policy. Without options: the bundled policy on the bundled tasks."""

    name: str = "quickstart"
    """Name of the run, one component of a path; its folder is OUT/NAME."""
    out: Path = RUNS
    """Folder of the run folders."""
    overwrite: bool = False
    """Replace a run of the same name. A folder that is no run, or holds a file of yours, is refused."""
    resume: bool = False
    """Resume the run of the same name from its newest training state, or begin it if it does not exist. Its settings
    must be the same, except that steps may grow."""
    states: str = "within(seconds=60, keep=2)"
    """Schedule of the training states for --resume. The default loses at most 60 seconds or one step, and keeps the
    newest 2 states. "never" saves none."""
    fleet: Annotated[str, Optioned(fleet_options)] = "local"
    """Place of the rollouts: local (this process), ray (nodes of a Ray cluster that is started here) or
    ray://HOST:PORT (of a running cluster). Options are given as --fleet.KEY VALUE, such as --fleet.nodes 2."""
    train_tasks: Annotated[int, AtLeast(1)] = 4096
    """Tasks to draw from, >= 1."""
    eval_tasks: Annotated[int, AtLeast(1)] = 240
    """Held-out tasks of the evaluations, >= 1."""
    eval_every: Annotated[int, AtLeast(0)] = 0
    """Steps between evaluations during training, >= 0. 0 means only before and after. Each plays every held-out task
    twice, at temperature 1 and greedily. checkpoints/best is the policy that solved most at temperature 1."""
    validation: str = ""
    """Source of held-out tasks, as in `tasks`. Then all of `tasks` is trained on. Empty: `tasks` is split."""
    curriculum: bool = False
    """Choose each step's tasks by the solve rates so far, mostly from families that are solved sometimes."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    @property
    def models(self) -> Path:
        """Folder of converted models; see `World.models`."""
        return self.out / ".models"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        check_name(self.name)
        saving(self.states)
        chosen_fleet(self.fleet)
        if self.eval_every > self.trainer.steps:
            remedy = f"training takes {self.trainer.steps} steps, so none would be made; give at most that"
            raise ConfigError("eval_every", self.eval_every, remedy)

    def split_tasks(self) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
        """Return the tasks to train on and those to evaluate on, at most `train_tasks` and `eval_tasks`.

        No question is in both: questions of a validation file are not trained on.

        Raises:
            ConfigError: a source cannot be read, or has no tasks.
        """
        if not self.validation:
            return self.drawn(Split.TRAIN, self.train_tasks), self.drawn(Split.HELD_OUT, self.eval_tasks)
        held_out = replace(self, tasks=self.validation).drawn(Split.ALL, self.eval_tasks)
        asked = {task.question for task in held_out}
        training = tuple(task for task in self.drawn(Split.ALL, self.train_tasks) if task.question not in asked)
        if not training:
            remedy = "every question of `tasks` is in it; give another file, or leave it out: then `tasks` is split"
            raise ConfigError("validation", self.validation, remedy)
        return training, held_out


def main(argv: Sequence[str]) -> int:
    """Run the command, in all processes of its launcher, and return the exit code."""
    hush()
    # Every rank finds the same errors in the settings. Rank 0 reports them first.
    with led():
        asked = parse_with_sources(TrainConfig, "train", argv, presets=asset("presets"))
        config = asked.config
        folder = RunFolder(config.out / config.name, config.overwrite, config.resume, main=rank() == 0)
        if config.overwrite:
            read = (config.model, config.tasks, config.validation)
            refuse_inputs("run folder", folder.path, zip(("model", "tasks", "validation"), read, strict=True))
        # Defaults depend on the model, and on the recorded settings of a resumed run.
        recorded = folder.path / CONFIG if config.resume else None
        update = Update(config.trainer.lora_rank > 0, config.trainer.rows(processes()))
        config = apply_model_defaults(asked, recorded, update)
        resolved = config.resolve_prompt_settings(recorded)
        if resolved.date != config.date and processes() > 1:
            remedy = "the chat template writes it, and processes that train together must agree; give a date"
            raise ConfigError("date", config.date, remedy)
        # The import takes seconds, which a mistake in the settings need not wait for.
        from repl_rl.cli.training_run import Run

        run = Run(resolved, folder)
        config = run.config
    if config.resume and folder.begun:
        # Check the settings before the engine opens, and do nothing if no steps are left.
        if run.main:
            check_same_settings(folder.path, run.settings)
        if folder.finished(config.trainer.steps):
            run.console.print(
                f"{folder.path} is finished: nothing is left to do; more --trainer.steps would go on with it"
            )
            tell(run.console, after(folder.path, settings_of(folder.path), mine=True))
            return 0
    run.execute()
    return 0
