"""Training from Python: from a `RolloutConfig` and settings of the update to a run folder with a trained policy.

- `train` validates everything, opens the run and trains. `repl-rl train` adds evaluations and a summary to the same
  parts.
- `open_training` opens the rollout client and the run folder.
- `run_training` loads the policy, builds the trainer with its weight sync, reporter and checkpoints, trains, and saves
  the final model.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from transformers.utils.logging import disable_progress_bar

from repl_rl.deprecations import deprecated_keywords
from repl_rl.engine.config import Dtype
from repl_rl.models.parameter_names import complete_checkpoint
from repl_rl.models.resolve_model import ResolvedModel
from repl_rl.ray.config import parse_workers
from repl_rl.rollout import RolloutClient
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.run_folder import RunFolder, check_same_settings
from repl_rl.settings.argument_parser import dump_toml
from repl_rl.tasks import Curriculum, Split, Task
from repl_rl.trainer.checkpoint_schedule import CheckpointSchedule
from repl_rl.trainer.collect_groups import GroupSampler
from repl_rl.trainer.config import DynamicSamplingOptions, FifoWindowOptions, TrainerConfig, parse_group_sampling
from repl_rl.trainer.config_checks import validate_gpu_memory, validate_run
from repl_rl.trainer.grpo import MakeScorerFn, ReplGRPOTrainer, TrainerComponents
from repl_rl.trainer.load_policy import load_model, prepare_trainable_model
from repl_rl.trainer.local_or_ray_rollouts import (
    adapt_to_trainer,
    get_workers_status,
    open_rollout_client,
    write_worker_notes,
)
from repl_rl.trainer.logprobs import LogprobScorer
from repl_rl.trainer.plugins.async_rollouts import AsyncGroups, StalenessSchedule, UpcomingTasks
from repl_rl.trainer.plugins.checkpoint import CheckpointManager, TrainingState, open_run
from repl_rl.trainer.plugins.dynamic_sampling import DynamicGroupSampler, TaskPool
from repl_rl.trainer.plugins.fsdp import load_on_every_process
from repl_rl.trainer.plugins.lora import merge_adapters
from repl_rl.trainer.plugins.periodic_evaluation import Evaluation, PeriodicEvaluator
from repl_rl.trainer.plugins.prefix_sharing import PrefixSharing, PrefixSharingScorer
from repl_rl.trainer.plugins.trackers import Trackers
from repl_rl.trainer.rollout_source import HasTasks, OnStep, RolloutSource, StepRecord
from repl_rl.trainer.step_metrics import StepReporter
from repl_rl.trainer.trl_arguments import build_credit_config, grpo_args
from repl_rl.trainer.weight_sync import WarnFn, compute_weight_bytes, open_fallback_folder, open_weights_folder
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.processes import get_rank, get_world_size

log = logging.getLogger(__name__)

_SAVING = CheckpointSchedule()
"""Default checkpoint schedule of `train`."""


def ignore_step(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
    """Do nothing with a finished step."""


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Optional parts of `run_training`."""

    on_step: OnStep = ignore_step
    """Called after each step with its record and trajectories. Its errors end training and propagate."""
    curriculum: Curriculum | None = None
    """Chooses the tasks of each step by the outcomes so far. None means TRL's random order, drawn from `seed`."""
    seed: int = 0
    """Seed of the task order and of new adapters, >= 0."""
    warn: WarnFn = log.warning
    """Receives one line per fallback."""
    evaluation: Evaluation | None = None
    """Evaluation that runs at its interval, and whose metrics join those of the step. `out/best` is then the best
    policy so far (with `lora_rank`, its adapters)."""
    checkpoints: CheckpointManager | None = None
    """Saves the training state, and holds the state from which the run resumes. None disables both."""
    sampler_dtype: Dtype = "auto"
    """Number format of the rollout source; "auto" means that of the trainer. It decides the tolerance for the logprob
    mismatch."""


_NO_OPTIONS = TrainingOptions()
"""Default of `run_training`."""


@deprecated_keywords(world="rollout_config", fleet="workers", saving="checkpoint")
def train(
    rollout_config: RolloutConfig,
    config: TrainerConfig | None = None,
    *,
    out: Path,
    train_tasks: int = 4096,
    on_step: OnStep | None = None,
    evaluation: Evaluation | None = None,
    resume: bool = False,
    checkpoint: CheckpointSchedule | None = _SAVING,
    workers: str = "local",
) -> Path:
    """Train the policy of `rollout_config` on its training tasks, as `repl-rl train` does, but without its evaluations.

    `repl-rl view` and `replay` read the run folder. In several processes, started by `accelerate launch`, each process
    runs its share of the rollouts, and the first one writes.

    Args:
        rollout_config: policy, tasks, engine, sandbox and limits of the rollouts.
        config: settings of the update; None means the defaults.
        out: new run folder: config.toml, metrics.jsonl, summary.json, trajectories/, checkpoints/, report.html.
        train_tasks: number of tasks to draw from, >= 1.
        on_step: called in the first process after each step, with its record and trajectories.
        evaluation: evaluation that runs at its interval in the first process; the best policy is
            `out/checkpoints/best`.
        resume: resume the run in `out` exactly, from its newest state, or from the beginning if it has no state. Its
            settings must be the same, except for steps, which may end the run earlier or later.
        checkpoint: checkpoint schedule; None disables checkpoints of the run's state.
        workers: place of the rollouts: `local` means this process, `ray` means workers; see docs/scaling.md.

    Returns:
        The folder of the trained policy, `out/checkpoints/final`.

    Raises:
        ConfigError: settings do not fit each other or this machine (see also `validate_gpu_memory`), or `out` exists
            and `resume` is False, or `out` is a run with other settings; nothing has been written yet.
        WeightSyncError: the log probabilities of the sampler and of the trainer differ.
    """
    # Validate everything before anything is written.
    trainer_config, main = config or TrainerConfig(), get_rank() == 0
    tasks = rollout_config.draw_tasks(Split.TRAIN, train_tasks)
    validate_run(rollout_config, trainer_config, len(tasks), workers)
    validate_gpu_memory(rollout_config, trainer_config, local=parse_workers(workers) is None)
    rollout_config.try_workspaces(tasks)
    if main:
        warn_about_learning_rate(rollout_config, trainer_config)
    settings = dump_toml(rollout_config) + dump_toml(trainer_config, "trainer")
    folder = RunFolder(out, overwrite=False, resume=resume, main=main)
    if resume and folder.exists and main:
        check_same_settings(out, settings)
    # A finished run needs no engine.
    if resume and folder.exists and folder.is_finished(trainer_config.steps):
        return folder.checkpoints_folder / "final"
    run_log = _RunLogger(folder, on_step)
    with open_training(rollout_config, trainer_config, tasks, folder, settings, workers, resume) as run:
        checkpoints = None
        if checkpoint is not None:
            checkpoints = CheckpointManager(folder.states_folder, checkpoint, run.state)
        final = run_training(
            rollout_config.model_folder,
            run.renderer.tokenizer,
            [task.id for task in tasks],
            run.source,
            trainer_config,
            folder.checkpoints_folder,
            TrainingOptions(
                run_log.log_step,
                seed=rollout_config.seed,
                warn=run_log.log_fallback,
                evaluation=evaluation,
                checkpoints=checkpoints,
                sampler_dtype=rollout_config.dtype,
            ),
        )
        if main:
            run_log.write_summary(run.source, rollout_config.policy, trainer_config.steps)
    return final


def warn_about_learning_rate(rollout_config: RolloutConfig, config: TrainerConfig) -> None:
    """Log a warning if another model than the bundled policy gets the learning rate of the bundled policy.

    The command chooses the rate by the model. Python code has the defaults of the class.
    """
    if config.learning_rate == TrainerConfig().learning_rate and not rollout_config.is_bundled_kind:
        log.warning(
            "learning_rate is %g, the default for the bundled policy, and it ruins most pretrained models; for %s set "
            "TrainerConfig(learning_rate=...) to about 1e-6, or to 1e-5 with lora_rank",
            config.learning_rate,
            rollout_config.model,
        )


@dataclass
class _RunLogger:
    """Log of a training run in its folder: steps, fallbacks, and the summary at the end."""

    folder: RunFolder
    on_step: OnStep | None
    fallback_notes: list[str] = field(default_factory=list)

    def log_step(self, record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        self.folder.write_step(record.step, record.metrics, trajectories, record.credit)
        if self.on_step is not None:
            self.on_step(record, trajectories)

    def log_fallback(self, message: str) -> None:
        log.warning(message)
        self.fallback_notes.append(message)

    def write_summary(self, source: RolloutClient, policy: ResolvedModel, steps: int) -> None:
        info, stats = source.runtime_info, source.stats
        fallbacks = {"update_fallbacks": list(self.fallback_notes), "sampler_fallback": info.sampler_fallback}
        components = {"engine": info.engine, "engine_fallback": info.engine_fallback, "sandbox": info.sandbox}
        preemptions = asdict(stats.preemptions) if stats.preemptions is not None else None
        status = {"preemptions": preemptions, "faults": dict(stats.faults), **get_workers_status(source)}
        model = {"model": policy.reference, "model_fallback": policy.fallback}
        self.folder.write_summary({"status": "finished", **model, "steps": steps, **status, **components, **fallbacks})
        self.folder.write_report()


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """Opened parts of a training run."""

    source: RolloutClient
    renderer: Renderer
    state: TrainingState | None
    """Newest saved state of the run that is resumed, or None if the run begins."""


@contextmanager
def open_training(
    rollout_config: RolloutConfig,
    config: TrainerConfig,
    tasks: Sequence[Task],
    folder: RunFolder,
    settings: str,
    workers: str,
    resume: bool,
) -> Iterator[OpenedRun]:
    """Open the rollout client of a run, then its folder, in every process of the training.

    Args:
        rollout_config: policy, tasks, engine, sandbox and limits of the rollouts.
        config: settings of the update.
        tasks: training tasks.
        folder: run folder, which is made here, or cut back to the newest saved state.
        settings: TOML that the run records.
        workers: place of the rollouts; see `open_rollout_client`.
        resume: resume the run in `folder` if it exists.

    Raises:
        ConfigError: `workers` is unknown, or the folder may not be replaced or resumed.
    """
    rank = get_rank()
    tasks_by_id = {task.id: task for task in tasks}
    with (
        # The rollout client opens first, so that its failure leaves no empty run folder.
        open_rollout_client(adapt_to_trainer(rollout_config, config), tasks_by_id, workers, rank) as source,
        open_run(folder, settings, resume, main=rank == 0) as state,
    ):
        write_worker_notes(source, folder.path)
        renderer = rollout_config.load_renderer()
        # Readers of the run folder show tokens without the tokenizer.
        if rank == 0:
            folder.write_tokens([renderer.decode((i,)) for i in range(len(renderer.tokenizer))])
        yield OpenedRun(source, renderer, state)


def run_training(
    model: Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task_ids: Sequence[str],
    source: RolloutSource,
    config: TrainerConfig,
    out: Path,
    options: TrainingOptions = _NO_OPTIONS,
) -> Path:
    """Train for `config.steps` steps; return `out/final`, the folder of the trained model with its tokenizer.

    `model` is a folder, or a loaded model that is trained in place. Without adapters its weights become float32,
    because bfloat16 is too coarse for the small steps of an optimizer. The text part of a composite model is trained;
    `out/final` is the whole model again if `model` is its folder.

    Checkpoints are `out/checkpoint-<optimizer steps>`, written every `config.save_steps` steps and at the last one.
    With `config.lora_rank`, `out/final` has the adapters merged into its weights. `out/adapter` and the checkpoints
    hold the adapters alone.

    Raises:
        ConfigError: a setting, the model folder or the number of tasks is unusable; nothing has been written yet.
        WeightSyncError: the log probabilities of the sampler and of the trainer differ.
    """
    # Credit settings are validated before a model is loaded.
    credit = build_credit_config(config, source.tasks if isinstance(source, HasTasks) else {})
    _silence_warnings()
    load_on_every_process()
    if get_world_size() > 1 and not torch.accelerator.is_available():
        # Without this, accelerate takes each process for the only one.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    args = grpo_args(config, out, get_world_size(), options.seed)
    policy = load_model(model, config) if isinstance(model, Path) else model
    policy = prepare_trainable_model(policy, config, options.seed, options.warn)
    # Async rollouts alternate between two folders of weights.
    size = compute_weight_bytes(policy) * (2 if config.max_staleness_steps else 1)
    with open_weights_folder(size, options.warn) as weights, open_fallback_folder(weights, options.warn) as fallback:
        sharing: PrefixSharing | None = None
        make_scorer: MakeScorerFn | None = LogprobScorer if config.fast_logprobs else None
        if config.prefix_sharing == "auto" and config.fast_logprobs:
            sharing = PrefixSharing(options.warn)
            # Before the trainer copies or wraps the policy, so that a reference model has the same attention.
            sharing.install_attention(policy.get_base_model() if is_peft_model(policy) else policy)
            make_scorer = partial(PrefixSharingScorer, sharing=sharing)
        components = TrainerComponents(
            weights,
            config.compute_logprob_tolerance(options.sampler_dtype),
            config.importance_sampling,
            make_scorer,
            partial(make_group_sampler, config, options.curriculum),
        )
        trainer = ReplGRPOTrainer(policy, tokenizer, task_ids, source, args, credit, components)
        trainer.vllm_generation.fallback = fallback
        # Without a folder, there is no checkpoint that could complete a saved model.
        base = model if isinstance(model, Path) else None
        checkpoints, evaluator = options.checkpoints, None
        if options.evaluation is not None:
            states = checkpoints.folder if checkpoints is not None else None
            evaluator = PeriodicEvaluator(trainer, options.evaluation, out, base, states)
        reporter = _attach_reporter(trainer, options.on_step, out.parent, evaluator)
        # Every part with state is saved and restored with the run.
        if checkpoints is not None:
            trainer_parts = {"groups": trainer.group_sampler, "evaluator": evaluator, "reporter": reporter}
            run_parts = {"source": source, "curriculum": options.curriculum, "sharing": sharing}
            trainer.attach_checkpoints(checkpoints, {**run_parts, **trainer_parts}, options.warn)
        trainer.train_or_resume()
        if evaluator is not None:
            evaluator.remove_superseded()
    return _save_final_model(trainer, out, config.lora_rank > 0, base)


def make_group_sampler(config: TrainerConfig, curriculum: Curriculum | None, trainer: ReplGRPOTrainer) -> GroupSampler:
    """Return the group sampler of these settings; a `curriculum` chooses its tasks.

    Raises:
        ConfigError: the rollout source cannot do what the settings need.
    """
    source, size, accelerator = trainer.source, trainer.num_generations, trainer.accelerator
    options = parse_group_sampling(config.group_sampling)
    # Rollouts of later steps run during the update.
    if config.max_staleness_steps:
        schedule = StalenessSchedule(config.max_staleness_steps, config.steps)
        tasks = UpcomingTasks(trainer.optimizer_steps_per_step, trainer.iterate_upcoming_task_ids)
        window = options if isinstance(options, FifoWindowOptions) else None
        return AsyncGroups(source, size, accelerator, schedule, tasks, curriculum, window)
    # Each step waits for its own rollouts.
    if isinstance(options, DynamicSamplingOptions):
        pool = TaskPool([row["prompt"] for row in trainer.train_dataset], trainer.args.seed)
        stops = trainer.credit.stop_policy
        return DynamicGroupSampler(source, size, accelerator, options, pool, curriculum, stops)
    return GroupSampler(source, size, accelerator, curriculum)


def _attach_reporter(
    trainer: ReplGRPOTrainer, on_step: OnStep, run: Path, evaluator: PeriodicEvaluator | None
) -> StepReporter:
    """Replace transformers' printer by the reporter and the trackers."""
    trainer.remove_callback(PrinterCallback)
    trackers = Trackers(trainer, run)
    reporter = StepReporter(trainer, on_step, trackers, evaluator)
    trainer.add_callback(reporter)
    # Trackers come last, so that they receive the metrics that the reporter adds to TRL's log.
    trackers.attach_callbacks()
    return reporter


def _save_final_model(trainer: ReplGRPOTrainer, out: Path, adapters: bool, base: Path | None) -> Path:
    """Save the trained model to `out/final`; all processes call this together."""
    accelerator = trainer.accelerator
    # Save adapters alone, and merge them into the model.
    if adapters:
        trainer.model = merge_adapters(
            accelerator.unwrap_model(trainer.model), out / "adapter", accelerator.is_main_process
        )
    trainer.save_model(str(out / "final"))
    # Add the parts of the base model that were not trained, such as a vision tower.
    if base is not None and accelerator.is_main_process:
        complete_checkpoint(out / "final", base)
    # Barrier: wait until the main process has written the whole model. A process that exits while gloo's threads work
    # can hang.
    accelerator.wait_for_everyone()
    return out / "final"


def _silence_warnings() -> None:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    # TRL warns about each rollout without a reward and prints it whole. A failed rollout has no reward on purpose.
    logging.getLogger("trl.trainer.grpo_trainer").setLevel(logging.ERROR)
    disable_progress_bar()
