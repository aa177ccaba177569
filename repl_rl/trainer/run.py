"""Training from Python: from a `World` and settings of the update to a run folder with a trained policy."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from repl_rl.machine.launched import rank
from repl_rl.origin import Origin
from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout import Fleet, chosen_fleet
from repl_rl.runs.folder import RunFolder
from repl_rl.settings.same import check_same_settings
from repl_rl.settings.toml import dump
from repl_rl.tasks import Split
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.evaluations import Evaluation
from repl_rl.trainer.fleets import beside, fleet_for, fleet_status, keep_notes
from repl_rl.trainer.gpu_memory import validate_gpu_memory
from repl_rl.trainer.keeper import Keeper
from repl_rl.trainer.loop import fit
from repl_rl.trainer.pace import Saving
from repl_rl.trainer.refusal import refuse_run
from repl_rl.trainer.source import OnStep, StepRecord
from repl_rl.trainer.states import taken
from repl_rl.world import World

log = logging.getLogger(__name__)
_SAVING = Saving()


def train(
    world: World,
    config: TrainerConfig | None = None,
    *,
    out: Path,
    train_tasks: int = 4096,
    on_step: OnStep | None = None,
    evaluation: Evaluation | None = None,
    resume: bool = False,
    saving: Saving | None = _SAVING,
    fleet: str = "local",
) -> Path:
    """Train the world's policy on its training tasks, as `repl-rl train` does, but without its evaluations.

    `repl-rl view` and `replay` read the run folder. In several processes, started by `accelerate launch`, each process
    runs its share of the rollouts, and the first one writes.

    Args:
        world: policy, tasks, engine, sandbox and limits of the rollouts.
        config: settings of the update; None means the defaults.
        out: new run folder: config.toml, metrics.jsonl, summary.json, trajectories/, checkpoints/, report.html.
        train_tasks: number of tasks to draw from, >= 1.
        on_step: called in the first process after each step, with its record and trajectories.
        evaluation: evaluation that runs at its interval in the first process; the best policy is
            `out/checkpoints/best`.
        resume: resume the run in `out` exactly, from its newest state, or from the beginning if it has no state. Its
            settings must be the same, except that steps may grow.
        saving: checkpoint schedule; None disables checkpoints of the run's state.
        fleet: place of the rollouts: `local` means this process, `ray` means workers; see docs/scaling.md.

    Returns:
        The folder of the trained policy, `out/checkpoints/final`.

    Raises:
        ConfigError: settings do not fit each other or this machine (see also `validate_gpu_memory`), or `out` exists
            and `resume` is False, or `out` is a run with other settings; nothing has been written yet.
        WeightSyncError: the log probabilities of the sampler and of the trainer differ.
    """
    # Validate everything before anything is written.
    chosen, main = config or TrainerConfig(), rank() == 0
    tasks = world.drawn(Split.TRAIN, train_tasks)
    refuse_run(world, chosen, len(tasks), fleet)
    validate_gpu_memory(world, chosen, local=chosen_fleet(fleet) is None)
    world.try_workspaces(tasks)
    settings = dump(world) + dump(chosen, "trainer")
    folder = RunFolder(out, overwrite=False, resume=resume, main=main)
    if resume and folder.begun and main:
        check_same_settings(out, settings)
    # A finished run needs no engine.
    if resume and folder.begun and folder.finished(chosen.steps):
        return folder.checkpoints / "final"
    told = _Told(folder, on_step)
    with (
        fleet_for(beside(world, chosen), {task.id: task for task in tasks}, fleet, rank()) as source,
        taken(folder, settings, resume, main=main) as state,
    ):
        keep_notes(source, out)
        renderer = world.renderer()
        # Readers of the run folder show tokens without the tokenizer.
        if main:
            folder.name_tokens([renderer.decode((i,)) for i in range(len(renderer.tokenizer))])
        final = fit(
            world.model_folder,
            renderer.tokenizer,
            [task.id for task in tasks],
            source,
            chosen,
            folder.checkpoints,
            told.step,
            seed=world.seed,
            tell=told.fell_back,
            evaluation=evaluation,
            keeper=Keeper(folder.states, saving, state) if saving is not None else None,
            sampled_in=world.dtype,
        )
        if main:
            told.conclude(source, world.policy, chosen.steps)
    return final


@dataclass
class _Told:
    """Log of a training run in its folder: steps, fallbacks, and the summary at the end."""

    folder: RunFolder
    on_step: OnStep | None
    fallbacks: list[str] = field(default_factory=list)

    def step(self, record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        self.folder.step(record.step, record.metrics, trajectories, record.credit)
        if self.on_step is not None:
            self.on_step(record, trajectories)

    def fell_back(self, what: str) -> None:
        log.warning(what)
        self.fallbacks.append(what)

    def conclude(self, source: Fleet, policy: Origin, steps: int) -> None:
        facts, counts = source.facts, source.figures
        told = {"update_fallbacks": list(self.fallbacks), "sampler_fallback": facts.sampler_fallback}
        opened = {"engine": facts.engine, "engine_fallback": facts.engine_fallback, "sandbox": facts.sandbox}
        pressed = asdict(counts.pressure) if counts.pressure is not None else None
        figures = {"preemptions": pressed, "faults": dict(counts.faults), **fleet_status(source)}
        model = {"model": policy.reference, "model_fallback": policy.fallback}
        self.folder.summarise({"status": "finished", **model, "steps": steps, **figures, **opened, **told})
        self.folder.report()
