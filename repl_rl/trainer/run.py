"""Training from Python: a world and the settings of the update in, a run folder with a trained policy out."""

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
    """Train the world's policy on its training tasks: `repl-rl train` without its evaluations.

    `repl-rl view` and `replay` read the folder. Started in several processes by `accelerate launch`, each plays its
    share of the rollouts, and the first one writes.

    Args:
        world: the policy and what it acts in.
        config: settings of the update; None: the defaults.
        out: new folder of the run: config.toml, metrics.jsonl, summary.json, trajectories/, checkpoints/, report.html.
        train_tasks: tasks to draw from, >= 1.
        on_step: called after each step, in the first process, with its record and trajectories.
        evaluation: made every so many steps, in the first process; the best policy is `out/checkpoints/best`.
        resume: go on with the run in `out` where its newest state is, exactly; begin where there is none. Its settings
            must be the same, but that steps may grow.
        saving: how often the run's state is saved, and how many are kept; None: never.
        fleet: where rollouts are played: `local`, this process, or `ray`; see docs/scaling.md.

    Returns:
        The folder of the trained policy, `out/checkpoints/final`.

    Raises:
        ConfigError: something does not fit (see also `validate_gpu_memory`), or `out` exists and `resume` is
            False, or it is a run with other settings; nothing has been written then.
        WeightSyncError: the sampler's log probabilities are not the trainer's.
    """
    chosen, main = config or TrainerConfig(), rank() == 0
    tasks = world.drawn(Split.TRAIN, train_tasks)
    refuse_run(world, chosen, len(tasks), fleet)
    validate_gpu_memory(world, chosen, local=chosen_fleet(fleet) is None)
    world.try_workspaces(tasks)
    settings = dump(world) + dump(chosen, "trainer")
    folder = RunFolder(out, overwrite=False, resume=resume, main=main)
    if resume and folder.begun and main:
        check_same_settings(out, settings)
    if resume and folder.begun and folder.finished(chosen.steps):
        return folder.checkpoints / "final"
    told = _Told(folder, on_step)
    with (
        fleet_for(beside(world, chosen), {task.id: task for task in tasks}, fleet, rank()) as source,
        taken(folder, settings, resume, main=main) as state,
    ):
        keep_notes(source, out)
        renderer = world.renderer()
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
    """What a training says, step by step and at its end, and where it is written."""

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
