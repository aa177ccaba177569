"""Training run of `repl-rl train`, from its first evaluation to its summary."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial

from repl_rl.cli.live_status import LiveStatus, RolloutProgress, describe_elapsed, describe_opening
from repl_rl.cli.next_steps import print_steps, print_unsolved_hint, suggest_resume
from repl_rl.cli.terminal_output import explain_rank_error, format_duration, make_terminal
from repl_rl.cli.train import TrainConfig, TrainingProgress, build_initial_summary, draw_curves, print_summary
from repl_rl.errors import ConfigError
from repl_rl.evaluation import Study, evaluate_with_tampering, run_evaluation
from repl_rl.judges import check_judges
from repl_rl.ray.config import parse_workers
from repl_rl.rollout import RolloutClient
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.runs.list_runs import read_run_info
from repl_rl.runs.run_folder import RunFolder
from repl_rl.settings.argument_parser import dump_toml
from repl_rl.tasks import Curriculum
from repl_rl.trainer.checkpoint_schedule import parse_checkpoint_schedule
from repl_rl.trainer.config_checks import validate_gpu_memory, validate_run
from repl_rl.trainer.local_or_ray_rollouts import get_workers_status
from repl_rl.trainer.plugins.checkpoint import CheckpointManager, TrainingState
from repl_rl.trainer.plugins.periodic_evaluation import Evaluation
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, open_training, run_training
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.atomic_files import Json
from repl_rl.utils.processes import get_rank
from repl_rl.utils.stop_signals import defer_signals, explain_error

log = logging.getLogger(__name__)


class Run:
    """Training run, from its first evaluation to its summary."""

    def __init__(self, config: TrainConfig, folder: RunFolder, flags: Sequence[str] = ()) -> None:
        """`flags` are repeated in the commands that are suggested after a first evaluation without solved tasks."""
        self.config = config
        self.flags = flags
        self.folder = folder
        self.main = get_rank() == 0
        """True on the rank that evaluates, prints and writes. Other ranks only play rollouts and train."""
        self.console = make_terminal(quiet=not self.main)
        self.status = LiveStatus(self.console)
        self.started = time.monotonic()
        self.spent_s: dict[str, float] = {}
        self.evaluation_s = 0.0
        """Duration of the newest evaluation."""
        self.state: TrainingState | None = None
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
        validate_run(config, config.trainer, len(self.training), config.workers)
        validate_gpu_memory(config, config.trainer, local=parse_workers(config.workers) is None)
        if self.main:
            config.try_workspaces([*self.training, *self.held_out])
        self.settings = dump_toml(replace(config, model=config.policy.reference, resume=False))

    def execute(self) -> None:
        """Train and evaluate. Once the run folder exists, a summary is written however the run ends.

        Raises:
            ReplRLError, KeyboardInterrupt: the run stopped; the summary already records how and where.
        """
        config = self.config
        trainer = config.trainer
        self.console.print(
            f"{len(self.training)} tasks to train on, {len(self.held_out)} held out; {trainer.steps} steps of "
            f"{trainer.prompts_per_step * trainer.group_size} rollouts, {trainer.group_size} per task"
        )
        if trainer.warmup_steps >= trainer.steps:
            self.console.print(
                f"warning: trainer.warmup_steps is {trainer.warmup_steps}, and the run has {trainer.steps} steps; the "
                "learning rate never reaches its peak; give fewer"
            )
        self.console.print(describe_opening(config))
        with ExitStack() as stack:
            stack.enter_context(self.status)
            opening = open_training(
                config, config.trainer, self.training, self.folder, self.settings, config.workers, config.resume
            )
            with self.status.show(describe_elapsed("opening")):
                run = stack.enter_context(opening)
            source, self.state = run.source, run.state
            self.console.print(run.renderer.findings)
            self.summary = build_initial_summary(config, source.runtime_info, config.trainer.steps, len(self.held_out))
            self._restore_summary()
            try:
                self._train(source, run.renderer)
                self.summary["status"] = "finished"
            except BaseException as error:
                # A signal, or another process that ended, may be the reason behind the error.
                reason = explain_rank_error(explain_error(error))
                self.summary["status"] = "interrupted" if isinstance(reason, KeyboardInterrupt) else "failed"
                self.summary["error"] = f"{type(reason).__name__}: {reason}"
                if reason is not error:
                    raise reason from error
                raise
            finally:
                # A second signal must not interrupt the summary.
                if self.main:
                    with defer_signals():
                        self._write_results(source)
        if self.main:
            print_summary(self.console, config.name, self.folder, self.summary)

    def _print_estimate(self) -> None:
        """Print how long sampling will take, and what helps a policy that solves nothing.

        The estimate comes from the duration of the evaluation, which plays each task twice.
        """
        if not self.summary["solve_rate_first"] and not self.summary["greedy_first"]:
            print_unsolved_hint(self.console, self.config.model, self.config.tasks, self.flags)
        trainer = self.config.trainer
        rollouts = trainer.prompts_per_step * trainer.group_size
        rollout_s = self.evaluation_s / (2 * len(self.held_out))
        # After the last step, each held-out task is played three times: twice as now, and with altered output.
        left_s = rollout_s * (trainer.steps * rollouts + 3 * len(self.held_out))
        self.console.print(
            f"a step samples {rollouts} rollouts, about {format_duration(rollout_s * rollouts)} at the speed of this "
            f"evaluation; all {trainer.steps} steps and the last evaluation sample for about {format_duration(left_s)} "
            "(--trainer.steps and --eval-tasks shorten it). The last evaluation plays each task a third time, with "
            "altered console output. Each step then updates the policy, which can take longer; the first step shows "
            "the time left with it"
        )

    def _write_results(self, source: RolloutClient) -> None:
        """Write the summary and the report of a run that ended in any way."""
        self.summary["stopped_at_step"] = len(self.folder.metric_rows)
        figures = source.stats
        self.summary["preemptions"] = asdict(figures.preemptions) if figures.preemptions is not None else None
        # The engine may have been opened again since the start, with a fallback.
        self.summary["engine_fallback"] = source.runtime_info.engine_fallback
        self.summary["faults"] = dict(figures.faults)
        self.summary |= get_workers_status(source)
        self.summary["wall_s"] = self._compute_spent_s("wall_s", self.started)
        self.folder.write_summary(self.summary)
        self.folder.write_report()
        if self.summary["status"] == "interrupted":
            self.console.print(f"interrupted after step {self.summary['stopped_at_step']}; this command resumes it:")
            print_steps(self.console, [suggest_resume(read_run_info(self.folder.path))])

    def _train(self, source: RolloutClient, renderer: Renderer) -> None:
        """Evaluate, train, and evaluate again. Only rank 0 evaluates."""
        config = self.config
        # A resumed run has its first evaluation in the saved summary.
        if self.state is None and self.main:
            self._evaluate(source, "first", 0)
            self.folder.write_summary(self.summary)
            self._print_estimate()
        begun = time.monotonic()
        # Without a schedule, no training states are saved.
        schedule, checkpoints = parse_checkpoint_schedule(config.checkpoint), None
        if schedule is not None:
            checkpoints = CheckpointManager(
                self.folder.states_folder, schedule, self.state, lambda: json.dumps(self._build_resume_record(begun))
            )
        evaluation = None
        if config.eval_steps:
            evaluation = Evaluation(config.eval_steps, partial(self._evaluate_during_training, source))
        trainer = config.trainer
        rollouts = trainer.prompts_per_step * trainer.group_size
        progress = TrainingProgress(
            self.console,
            trainer.steps,
            len(self.folder.metric_rows),
            lambda title: self._start_progress(source, title, rollouts),
        )
        with self.status.show(progress.describe):

            def on_step(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
                self.folder.write_step(record.step, record.metrics, trajectories, record.credit)
                progress.advance(record.metrics)
                self.status.postpone()

            final = run_training(
                config.model_folder,
                renderer.tokenizer,
                [task.id for task in self.training],
                source,
                config.trainer,
                self.folder.checkpoints_folder,
                TrainingOptions(
                    on_step,
                    Curriculum(self.training, config.seed) if config.curriculum else None,
                    config.seed,
                    self._record_fallback,
                    evaluation,
                    checkpoints,
                    config.dtype,
                ),
            )
        if not self.main:
            return
        self.summary["train_s"] = self._compute_spent_s("train_s", begun)
        # Evaluate the exported policy, with and without altered console output.
        source.load_weights(final, config.trainer.optimizer_steps)
        self._evaluate(source, "last", config.trainer.steps)
        self.console.print("each held-out task once more, with altered console output: does the policy read it? ...")
        tampering = self._start_progress(source, "altered output", len(self.held_out))
        with self.status.show(tampering.describe):
            self.summary["tamper_followed"] = evaluate_with_tampering(source, self.held_out)
        points = sorted(self.solved.items())
        with self.folder.catch_write_errors():
            draw_curves(self.folder.metric_rows, points, self.folder.path / "curves.png")

    def _restore_summary(self) -> None:
        """Restore the summary of the run that is resumed."""
        if self.state is not None:
            told = json.loads(self.state.metadata["run"])
            self.spent_s = told["spent_s"]
            self.solved = {int(step): rate for step, rate in told["solved"].items()}
            self.summary |= {**told["summary"], "resumed_at_steps": [*told["resumed"], self.state.step]}
            self.console.print(f"resuming {self.folder.path} after step {self.state.step}")

    def _build_resume_record(self, begun: float) -> dict[str, object]:
        """Return the parts of the summary that a resumed run needs."""
        ends = ("_first", "_best", "best_step", "_fallbacks")
        first = {key: value for key, value in self.summary.items() if key.endswith(ends)}
        spent_s = {
            "wall_s": self._compute_spent_s("wall_s", self.started),
            "train_s": self._compute_spent_s("train_s", begun),
        }
        resumed = self.summary.get("resumed_at_steps", [])
        return {"summary": first, "spent_s": spent_s, "solved": self.solved, "resumed": resumed}

    def _compute_spent_s(self, what: str, since: float) -> float:
        """Return the seconds since `since`, plus those before a resume."""
        return round(self.spent_s.get(what, 0.0) + time.monotonic() - since, 3)

    def _record_fallback(self, what: str) -> None:
        """Log a fallback of the update, and record it in the summary once."""
        log.warning(what)
        told = self.summary["update_fallbacks"]
        assert isinstance(told, list)
        if what not in told:
            told.append(what)

    def _evaluate(self, source: RolloutClient, when: str, step: int) -> None:
        """Evaluate the policy of `step`, and record the metrics under names that end in `when`."""
        # The policy of the last step may have been evaluated during training.
        if step not in self.studies:
            rollouts = 2 * len(self.held_out)
            self.console.print(
                f"evaluation: {len(self.held_out)} held-out tasks, each at temperature 1 and greedily: {rollouts} "
                "rollouts (--eval-tasks sets the number) ..."
            )
            started = time.monotonic()
            self.studies[step] = self._run_evaluation(source)
            self.evaluation_s = time.monotonic() - started
        result = self.studies[step]
        self.solved[step] = result.solve_rate.value
        self.summary |= {
            f"solve_rate_{when}": result.solve_rate.value,
            f"greedy_{when}": result.greedy.value if result.greedy else 0.0,
            f"line_error_rate_{when}": result.line_error_rate,
            f"families_{when}": {name: part.solve_rate.value for name, part in result.families.items()},
        }
        self.console.print(f"held-out tasks, {when}: {result}")

    def _run_evaluation(self, source: RolloutClient) -> Study:
        """Play the held-out tasks, and show the progress."""
        with self.status.show(self._start_progress(source, "evaluation", 2 * len(self.held_out)).describe):
            return run_evaluation(source, self.held_out)

    def _start_progress(self, source: RolloutClient, title: str, rollouts: int) -> RolloutProgress:
        """Return the progress of a number of rollouts that start now."""
        return RolloutProgress(title, rollouts, self.config.rollout.max_lines, lambda: source.stats.counts)

    def _evaluate_during_training(self, source: RolloutClient, step: int) -> Mapping[str, float]:
        """Evaluate after a training step, and return the metrics."""
        self.studies[step] = result = self._run_evaluation(source)
        self.console.print(f"held-out tasks, after step {step}: {result}")
        self.solved[step] = result.solve_rate.value
        # The policy before training is not a candidate for the best one.
        best = max((step for step in self.solved if step), key=lambda step: self.solved[step])
        self.summary |= {"best_step": best, "solve_rate_best": self.solved[best]}
        return result.metrics
