"""Trainings whose rollouts run ahead of the update."""

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors.torch import load_file
from transformers import PreTrainedModel

from repl_rl.runs.run_folder import RunFolder
from repl_rl.tasks import Curriculum, Task
from repl_rl.trainer.checkpoint_schedule import CheckpointSchedule
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.plugins.checkpoint import CheckpointManager, open_run
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trainer.weight_sync import WEIGHTS
from repl_rl.trajectory.trajectory import Sampled, Segment, Trajectory
from tests.support.trainer.tiny_policies import (
    NEWLINE,
    VOCAB,
    Skeleton,
    logprobs_of,
    prompt_of,
    tiny_model,
    tiny_tokenizer,
    trajectory_of,
)

CONFIG = TrainerConfig(
    steps=8,
    prompts_per_step=2,
    group_size=3,
    warmup_steps=0,
    learning_rate=0.02,
    estimator="outcome",
    max_staleness_steps=2,
)
IDS = [f"task {i}" for i in range(6)]
TASKS = [Task(id, f"{id}?", "1", family=f"odd/{n % 2}") for n, id in enumerate(IDS)]


@dataclass
class Begun:
    """Rollouts of a step to come, and what they have written."""

    task_ids: list[str]
    finished: Mapping[int, Trajectory]
    weights: int
    lines: list[list[tuple[Skeleton, list[float], int]]] = field(default_factory=list)
    """Of each rollout: a line, its log probabilities, and the weights that wrote it."""


class EarlySource:
    """Writes a line of each rollout that is under way before it takes new weights, and the rest when it is asked.

    So which weights write which line is known beforehand. `quick`: a rollout is done before weights come. `deaf`: new
    weights are taken for loaded, and are not; `late`: they are not, and are not taken for it.
    """

    forbidden_ids = frozenset[int]()
    rollout_busy_s = 0.0

    def __init__(
        self, model: PreTrainedModel, lines: int = 3, quick: bool = False, deaf: bool = False, late: bool = False
    ) -> None:
        self.model, self.most, self.quick, self.deaf, self.late = copy.deepcopy(model), lines, quick, deaf, late
        self.weights = 0
        self.under_way: dict[int, Begun] = {}
        self.began: dict[int, Begun] = {}
        self.probes: list[int] = []
        self.folders: list[Path] = []
        self.steps: list[list[Trajectory]] = []

    def load_weights(self, folder: Path, policy_step: int) -> None:
        self._write()
        assert all((before / WEIGHTS).exists() for before in self.folders[-1:])
        self.folders.append(folder)
        if not self.deaf or not policy_step:
            self.model.load_state_dict(load_file(folder / "model.safetensors"))
        if not self.late:
            self.weights = policy_step

    def start_rollouts(self, task_ids: Sequence[str], policy_step: int, finished: Mapping[int, Trajectory]) -> None:
        begun = Begun(list(task_ids), finished, self.weights, [[] for _ in task_ids])
        self.began[policy_step] = self.under_way[policy_step] = begun
        if self.quick:
            self._write(self.most)

    def get_finished_rollouts(self, policy_step: int) -> Mapping[int, Trajectory]:
        begun = self.under_way[policy_step]
        done = {n: t for n, t in self._told(policy_step).items() if len(begun.lines[n]) == self.most}
        return {**done, **begun.finished}

    def get_ended_groups(self, policy_step: int) -> Mapping[int, Trajectory]:
        return self.get_finished_rollouts(policy_step)

    def wait_for_first_group(self, groups: Sequence[tuple[int, Sequence[int]]]) -> int:
        self._write(self.most)
        return next(
            n for n, (step, places) in enumerate(groups) if set(places) <= set(self.get_finished_rollouts(step))
        )

    def collect(self, task_ids: Sequence[str], policy_step: int) -> list[Trajectory]:
        if policy_step not in self.under_way:
            self.start_rollouts(task_ids, policy_step, {})
        self._write(self.most, policy_step)
        told = {**self._told(policy_step), **self.under_way.pop(policy_step).finished}
        self.steps.append([told[n] for n in range(len(task_ids))])
        return self.steps[-1]

    def sample_probe_lines(self, task_id: str) -> list[Trajectory]:
        self.probes.append(self.weights)
        ((written, _),) = line_of(random.Random(task_id))
        skeleton: Skeleton = [(written, ())]
        prompt = prompt_of(task_id)
        return [trajectory_of(prompt, skeleton, logprobs_of(self.model, prompt, skeleton), 0, self.weights)]

    def _write(self, most: int = 1, step: int | None = None) -> None:
        for number, begun in self.under_way.items():
            for place, lines in enumerate(begun.lines if step in (None, number) else []):
                for _ in range(min(most, self.most - len(lines))):
                    before = [piece for skeleton, _, _ in lines for piece in skeleton]
                    new = line_of(random.Random(f"{begun.task_ids[place]} {number} {place} {len(lines)}"))
                    logprobs = logprobs_of(self.model, prompt_of(begun.task_ids[place]), [*before, *new])
                    lines.append((new, logprobs[-len([i for s, o in new for i in (*s, *(o or ()))]) :], self.weights))

    def _told(self, policy_step: int) -> dict[int, Trajectory]:
        begun = self.under_way[policy_step]
        told: dict[int, Trajectory] = {}
        for place, lines in enumerate(begun.lines):
            if place in begun.finished or not lines:
                continue
            skeleton = [piece for new, _, _ in lines for piece in new]
            logprobs = [p for _, values, _ in lines for p in values]
            t = trajectory_of(prompt_of(begun.task_ids[place]), skeleton, logprobs, place, policy_step)
            wrote = iter([weights for _, _, weights in lines])
            told[place] = replace(t, id=f"{policy_step}-{t.id}", segments=written_by(t, wrote))
        return told


def written_by(t: Trajectory, policy_steps: Iterator[int]) -> tuple[Segment, ...]:
    """The segments of `t`, of one line each, whose lines those policies wrote."""
    return tuple(
        Sampled((replace(s.lines[0], policy_step=next(policy_steps)),)) if isinstance(s, Sampled) else s
        for s in t.segments
    )


def line_of(rng: random.Random) -> Skeleton:
    sampled = (*(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 4))), NEWLINE)
    return [(sampled, tuple(rng.randrange(3, VOCAB) for _ in range(2)))]


class Stopped(BaseException):
    """Stands for whatever ends a run."""


def play(
    run: Path,
    source: EarlySource,
    stop_after: int | None = None,
    curriculum: bool = True,
    config: TrainerConfig = CONFIG,
) -> None:
    """Train in `run`, from where it is; stop when a step is told of."""
    folder = RunFolder(run, overwrite=False, resume=True)
    with open_run(folder, "seed = 0\n", True) as state:

        def on_step(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
            folder.write_step(record.step, record.metrics, trajectories, record.credit)
            if record.step == stop_after:
                raise Stopped

        keeper = CheckpointManager(folder.states_folder, CheckpointSchedule(every_s=0, max_time_share=1.0), state)
        chosen = Curriculum(TASKS, 7) if curriculum else None
        run_training(
            tiny_model(),
            tiny_tokenizer(),
            IDS,
            source,
            config,
            folder.checkpoints_folder,
            TrainingOptions(on_step, chosen, checkpoints=keeper),
        )
