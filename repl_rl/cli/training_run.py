"""Training run of `repl-rl train`, from its first evaluation to its summary."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

from repl_rl.cli.onward import again, tell
from repl_rl.cli.outcome import opened, show
from repl_rl.cli.processes import explained_by_others
from repl_rl.cli.progress import Progress
from repl_rl.cli.terminal import terminal
from repl_rl.cli.train import TrainConfig
from repl_rl.engine import ENGINES
from repl_rl.errors import ConfigError
from repl_rl.evaluation import Study, evaluate, evaluate_tampered
from repl_rl.judges import check_judges
from repl_rl.machine.files import Json
from repl_rl.machine.launched import rank
from repl_rl.machine.stopping import explained, undisturbed
from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout import Fleet, chosen_fleet
from repl_rl.rollout.renderer import Renderer
from repl_rl.runs.curves import draw_curves
from repl_rl.runs.folder import RunFolder
from repl_rl.runs.listed import listed
from repl_rl.sandbox import SANDBOXES
from repl_rl.settings.toml import dump
from repl_rl.tasks import Curriculum
from repl_rl.trainer.evaluations import Evaluation
from repl_rl.trainer.fleets import beside, fleet_for, fleet_status, keep_notes
from repl_rl.trainer.gpu_memory import validate_gpu_memory
from repl_rl.trainer.keeper import Keeper
from repl_rl.trainer.loop import fit
from repl_rl.trainer.pace import saving
from repl_rl.trainer.refusal import refuse_run
from repl_rl.trainer.source import StepRecord
from repl_rl.trainer.states import State, taken

log = logging.getLogger(__name__)


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
