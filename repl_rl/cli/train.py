"""`repl-rl train`: evaluate a policy, train it, evaluate it again, and print the difference."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from repl_rl.cli.defaults import Update, apply_model_defaults
from repl_rl.cli.onward import after, again, tell
from repl_rl.cli.outcome import opened, show
from repl_rl.cli.processes import explained_by_others, hush, led
from repl_rl.cli.progress import Progress
from repl_rl.cli.terminal import terminal
from repl_rl.engine import ENGINES
from repl_rl.errors import ConfigError
from repl_rl.evaluation import Study, evaluate, evaluate_tampered
from repl_rl.judges import check_judges
from repl_rl.machine.assets import asset
from repl_rl.machine.files import Json
from repl_rl.machine.launched import processes, rank
from repl_rl.machine.outputs import check_name, refuse_inputs
from repl_rl.machine.stopping import explained, undisturbed
from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout import Fleet, chosen_fleet, fleet_options
from repl_rl.rollout.renderer import Renderer
from repl_rl.runs.curves import draw_curves
from repl_rl.runs.folder import RunFolder
from repl_rl.runs.listed import listed
from repl_rl.runs.told import CONFIG, RUNS, settings_of
from repl_rl.sandbox import SANDBOXES
from repl_rl.settings.arguments import parse_with_sources
from repl_rl.settings.bounds import AtLeast, check_fields
from repl_rl.settings.optioned import Optioned
from repl_rl.settings.same import check_same_settings
from repl_rl.settings.toml import dump
from repl_rl.tasks import Curriculum, Split, Task
from repl_rl.trainer import Evaluation, Keeper, State, StepRecord, TrainerConfig, fit, refuse_run, saving, taken
from repl_rl.trainer.fleets import beside, fleet_for, fleet_status, keep_notes
from repl_rl.trainer.gpu_memory import validate_gpu_memory
from repl_rl.world import World

log = logging.getLogger(__name__)


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


class Run:
    """Training run, from its first evaluation to its summary."""

    def __init__(self, config: TrainConfig, folder: RunFolder) -> None:
        self.config = config
        self.folder = folder
        self.main = rank() == 0
        """True on the rank that evaluates, prints and writes. Other ranks only play rollouts and train."""
        self.console = terminal(quiet=not self.main)
        self.started = time.monotonic()
        self.spent_s: dict[str, float] = {}
        self.state: State | None = None
        self.training, self.held_out = config.split_tasks()
        self.studies: dict[int, Study] = {}
        """Evaluations by finished steps."""
        self.solved: dict[int, float] = {}
        """Solve rates by finished steps, including those before a resume."""
        self.summary: dict[str, Json] = {}
        # Find errors before anything slow starts, and before anything is written.
        check_judges([*self.training, *self.held_out])
        if config.curriculum and len({task.family for task in self.training}) < 2:
            raise ConfigError("curriculum", True, "all tasks are of one family, so it has no effect; leave it out")
        refuse_run(config, config.trainer, len(self.training))
        validate_gpu_memory(config, config.trainer, local=chosen_fleet(config.fleet) is None)
        if self.main:
            config.try_workspaces([*self.training, *self.held_out])
        self.settings = dump(replace(config, model=config.policy.reference, resume=False))

    def execute(self) -> None:
        """Train and evaluate. Once the run folder exists, a summary is written however the run ends.

        Raises:
            ReplRLError, KeyboardInterrupt: the run stopped; the summary already records how and where.
        """
        config = self.config
        engine, sandbox = ENGINES.chosen(config.engine), SANDBOXES.chosen(config.sandbox)
        trainer = config.trainer
        self.console.print(
            f"{len(self.training)} tasks to train on, {len(self.held_out)} held out; {trainer.steps} steps of "
            f"{trainer.prompts_per_step * trainer.group_size} rollouts, {trainer.group_size} per task"
        )
        self.console.print(f"opening engine {engine.kind} and sandbox {sandbox.kind} ...")
        # Open the source of rollouts before the run folder is made, so that a failure leaves no empty folder.
        with (
            fleet_for(
                beside(config, config.trainer), {task.id: task for task in self.training}, config.fleet, rank()
            ) as source,
            taken(self.folder, self.settings, config.resume, self.main) as self.state,
        ):
            renderer = config.renderer()
            self.console.print(renderer.findings)
            if self.main:
                keep_notes(source, self.folder.path)
                self.folder.name_tokens([renderer.decode((i,)) for i in range(len(renderer.tokenizer))])
            self.summary = opened(config, source.facts, config.trainer.steps, len(self.held_out))
            self._take_up()
            try:
                self._train(source, renderer)
                self.summary["status"] = "finished"
            except BaseException as error:
                # A signal, or another process that ended, may be the reason behind the error.
                reason = explained_by_others(explained(error))
                self.summary["status"] = "interrupted" if isinstance(reason, KeyboardInterrupt) else "failed"
                self.summary["error"] = f"{type(reason).__name__}: {reason}"
                if reason is not error:
                    raise reason from error
                raise
            finally:
                # A second signal must not interrupt the summary.
                if self.main:
                    with undisturbed():
                        self._conclude(source)
        if self.main:
            show(self.console, config.name, self.folder, self.summary)

    def _conclude(self, source: Fleet) -> None:
        """Write the summary and the report of a run that ended in any way."""
        self.summary["stopped_at_step"] = len(self.folder.rows)
        figures = source.figures
        self.summary["preemptions"] = asdict(figures.pressure) if figures.pressure is not None else None
        # The engine may have been opened again since the start, with a fallback.
        self.summary["engine_fallback"] = source.facts.engine_fallback
        self.summary["faults"] = dict(figures.faults)
        self.summary |= fleet_status(source)
        self.summary["wall_s"] = self._spent("wall_s", self.started)
        self.folder.summarise(self.summary)
        self.folder.report()
        if self.summary["status"] == "interrupted":
            tell(self.console, [again(listed(self.folder.path))])

    def _train(self, source: Fleet, renderer: Renderer) -> None:
        config = self.config
        # A resumed run has its first evaluation in the saved summary.
        if self.state is None and self.main:
            self._evaluate(source, "first", 0)
        begun = time.monotonic()
        # Without a schedule, no training states are saved.
        kept = saving(config.states)
        keeper = None
        if kept is not None:
            keeper = Keeper(self.folder.states, kept, self.state, lambda: json.dumps(self._lasting(begun)))
        with Progress(self.console, config.trainer.steps, len(self.folder.rows)) as progress:

            def on_step(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
                self.folder.step(record.step, record.metrics, trajectories, record.credit)
                progress.advance(record.metrics)

            final = fit(
                config.model_folder,
                renderer.tokenizer,
                [task.id for task in self.training],
                source,
                config.trainer,
                self.folder.checkpoints,
                on_step,
                Curriculum(self.training, config.seed) if config.curriculum else None,
                config.seed,
                self._fell_back,
                Evaluation(config.eval_every, partial(self._during, source)) if config.eval_every else None,
                keeper,
                config.dtype,
            )
        if not self.main:
            return
        self.summary["train_s"] = self._spent("train_s", begun)
        # Evaluate the exported policy, with and without altered console output.
        source.load_weights(final, config.trainer.optimizer_steps)
        self._evaluate(source, "last", config.trainer.steps)
        self.summary["tamper_followed"] = evaluate_tampered(source, self.held_out)
        points = sorted(self.solved.items())
        with self.folder.writing():
            draw_curves(self.folder.rows, points, self.folder.path / "curves.png")

    def _take_up(self) -> None:
        """Restore the summary of the run that is resumed."""
        if self.state is not None:
            told = json.loads(self.state.said["run"])
            self.spent_s = told["spent_s"]
            self.solved = {int(step): rate for step, rate in told["solved"].items()}
            self.summary |= {**told["summary"], "resumed_at_steps": [*told["resumed"], self.state.step]}
            self.console.print(f"going on with {self.folder.path} after step {self.state.step}")

    def _lasting(self, begun: float) -> dict[str, object]:
        """Return the parts of the summary that a resumed run needs."""
        ends = ("_first", "_best", "best_step", "_fallbacks")
        first = {key: value for key, value in self.summary.items() if key.endswith(ends)}
        spent_s = {"wall_s": self._spent("wall_s", self.started), "train_s": self._spent("train_s", begun)}
        resumed = self.summary.get("resumed_at_steps", [])
        return {"summary": first, "spent_s": spent_s, "solved": self.solved, "resumed": resumed}

    def _spent(self, what: str, since: float) -> float:
        """Return the seconds since `since`, plus those before a resume."""
        return round(self.spent_s.get(what, 0.0) + time.monotonic() - since, 3)

    def _fell_back(self, what: str) -> None:
        log.warning(what)
        told = self.summary["update_fallbacks"]
        assert isinstance(told, list)
        if what not in told:
            told.append(what)

    def _evaluate(self, source: Fleet, when: str, step: int) -> None:
        # The policy of the last step may have been evaluated during training.
        if step not in self.studies:
            self.console.print(f"playing {len(self.held_out)} held-out tasks, at temperature 1 and greedily ...")
            self.studies[step] = evaluate(source, self.held_out)
        result = self.studies[step]
        self.solved[step] = result.solve_rate.value
        self.summary |= {
            f"solve_rate_{when}": result.solve_rate.value,
            f"greedy_{when}": result.greedy.value if result.greedy else 0.0,
            f"line_error_rate_{when}": result.line_error_rate,
            f"families_{when}": {name: part.solve_rate.value for name, part in result.families.items()},
        }
        self.console.print(f"held-out tasks, {when}: {result}")

    def _during(self, source: Fleet, step: int) -> Mapping[str, float]:
        """Evaluate after a training step, and return the metrics."""
        self.studies[step] = result = evaluate(source, self.held_out)
        self.console.print(f"held-out tasks, after step {step}: {result}")
        self.solved[step] = result.solve_rate.value
        # The policy before training is not a candidate for the best one.
        best = max((step for step in self.solved if step), key=lambda step: self.solved[step])
        self.summary |= {"best_step": best, "solve_rate_best": self.solved[best]}
        return result.figures
