"""Worker of the experiment: an engine, consoles, and the runs that use them one after the other."""

import gc
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from benchmarks.credit.agreement import Agreement, measured
from benchmarks.credit.conditions import Condition, Way
from benchmarks.credit.jobs import Job
from benchmarks.credit.rows import POINTS, Row, Run, Start
from benchmarks.credit.settings import Settings, base_of, header
from benchmarks.credit.worker_rows import ENDLESS_STEPS, Ledger, spent
from repl_rl.engine import EngineConfig, Transformers, Vllm, open_engine
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSettings, SyncRollouts
from repl_rl.rollout.retry import FaultRetries
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.samplers.fenced_code_sampler import FencedCodeSampler
from repl_rl.sandbox import Local, SandboxConfig, SandboxOptions
from repl_rl.sandbox.inprocess import InProcess
from repl_rl.tasks import Split, Task
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.load_policy import load_model
from repl_rl.trainer.trl_arguments import build_credit_config
from repl_rl.trainer.weight_sync import compute_weight_bytes, open_weights_folder, save_weights
from repl_rl.trajectory.trajectory import Observed, Trajectory
from repl_rl.trajectory.trajectory_metrics import compute_trajectory_metrics

WARMUP_STEPS = 5
FIGURES = (
    *("solve_rate", "line_error_rate", "answered_rate", "lines_per_rollout", "void_line_rate", "print_rate"),
    *("try_rate", "repeat_rate"),
)
"""Metrics of `repl_rl.trajectory.trajectory_metrics.compute_trajectory_metrics`, on held-out tasks at temperature 1."""


class HeldOut(NamedTuple):
    """Results of the engine's policy on held-out tasks."""

    figures: Mapping[str, float]
    transcripts: Sequence[str]
    """Texts of the first tasks' greedy rollouts."""


def play_held_out(source: SyncRollouts, tasks: Sequence[Task], transcripts: int) -> HeldOut:
    """Play held-out tasks at temperature 1 and greedily; keep the texts of the first `transcripts` greedy rollouts."""
    sampled, greedy = source.sample(tasks), source.sample(tasks, temperature=0.0)
    found = compute_trajectory_metrics(sampled)
    figures = (
        {name: found[name] for name in FIGURES}
        | repaired(sampled)
        | {"greedy": compute_trajectory_metrics(greedy)["solve_rate"]}
    )
    tokens = round(found["sampled_tokens"] / len(sampled), 2)
    rates = {name: round(rate, 5) for name, rate in figures.items()}
    return HeldOut({**rates, "rollout_tokens": tokens}, [told(rollout) for rollout in greedy[:transcripts]])


def repaired(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the share of rollouts with an error (`with_error`), and the share of those that solved (`repaired`)."""
    failed = [t for t in trajectories if any(e.status.is_error for line in t.lines if (e := line.execution))]
    solved = sum(t.solved for t in failed)
    return {"with_error": len(failed) / len(trajectories), "repaired": solved / max(len(failed), 1)}


def told(trajectory: Trajectory) -> str:
    """Return the text of a rollout from its prompt on, with observations."""
    parts = [trajectory.prompt.text]
    for segment in trajectory.segments:
        parts += [segment.text] if isinstance(segment, Observed) else [line.text for line in segment.lines]
    return "".join(parts)


class Worker:
    """Engine, consoles, and the policies that runs start from. Open it with `opened`."""

    def __init__(self, source: SyncRollouts, settings: Settings, base: Path, tasks: Sequence[Task], out: Path) -> None:
        self.source = source
        self.settings = settings
        self.base = base
        self.tasks = tasks
        self.task_ids = [task.id for task in tasks]
        self.held_out = settings.beginning.tasks(settings.families, Split.HELD_OUT, settings.held_out)
        self.out = out

    def play(self, job: Job) -> Row:
        """Play a job; see `start` and `run`."""
        if job.condition is None:
            return self.start(job.way)
        return self.run(job.condition, job)

    def start(self, way: Way) -> Start:
        """Evaluate the policy that the runs of a way start from.

        Fine-tune it first if it needs that and does not exist yet.
        """
        began = time.monotonic()
        if not self.policy(way).exists():
            # Import here, because it takes seconds and only one of two workers needs it.
            from benchmarks.credit.starting_policies import teach

            teach(self.settings, way, self.base, self.policy(way))
        self.use(way, seed=0)
        self.source.load_weights(self.policy(way), 0)
        found = play_held_out(self.source, self.held_out, self.settings.transcripts)
        return Start(way, found.figures, round(time.monotonic() - began, 1), found.transcripts)

    def run(self, condition: Condition, job: Job) -> Run:
        """Train the starting policy until the token budget is spent, and evaluate it unless the run tunes a rate.

        Raises:
            WeightSyncError: the sampler's log probabilities are not the trainer's.
        """
        began, seed = time.monotonic(), job.seed
        self.use(condition.way, seed)
        config = trainer_config(condition, self.settings, job.learning_rate)
        begin, asked = self.policy(condition.way), self.settings.agreement_tokens > 0 and not job.tuning
        model, ledger = spent(begin, config, self.source, self.task_ids, self.settings.tokens, seed, asked)
        after = HeldOut({}, []) if job.tuning else play_held_out(self.source, self.held_out, self.settings.transcripts)
        agreed = self.agreed(model, ledger, config, begin, seed) if asked else {}
        # Free the model and its gradients before the next run.
        del model
        gc.collect()
        rate = config.learning_rate
        return ledger.run(condition.name, seed, after.figures, began, rate, agreed, after.transcripts)

    def agreed(
        self, model: PreTrainedModel, ledger: Ledger, config: TrainerConfig, begin: Path, seed: int
    ) -> dict[str, dict[str, float]]:
        """Measure the agreement of this condition's gradients at the end, in the middle and at the start of the run.

        The engine has the last weights when this begins, and the first ones when it ends.
        """
        found = {"end": self._agreement(model, config, seed)}
        assert ledger.middle is not None
        # The engine needs the same weights as the model, so load those of the middle into both.
        model.load_state_dict(ledger.middle)
        with open_weights_folder(compute_weight_bytes(model)) as weights:
            save_weights(model, model.state_dict(), weights)
            self.source.load_weights(weights, len(ledger.tokens))
        found["middle"] = self._agreement(model, config, seed)
        self.source.load_weights(begin, 0)
        found["start"] = self._agreement(load_model(begin, config), config, seed)
        return {point: asdict(found[point]) for point in POINTS}

    def _agreement(self, model: PreTrainedModel, config: TrainerConfig, seed: int) -> Agreement:
        never, tokens = self.source.forbidden_ids, self.settings.agreement_tokens
        size, play = config.group_size, self.source.sample
        return measured(model, play, self.tasks, build_credit_config(config), size, tokens, never, seed)

    def policy(self, way: Way) -> Path:
        """Return the folder of the policy that the runs of a way start from."""
        if way not in self.settings.beginning.taught:
            return self.base
        # The fingerprint keeps policies of other settings apart.
        return self.out / f"{self.settings.start}-{way}-{header(self.settings, self.base)['fingerprint']}"

    def use(self, way: Way, seed: int) -> None:
        """Switch to the sampler and limits of a way."""
        sampler = FencedCodeSampler() if way == "fenced" else ReplSampler()
        limits = self.settings.beginning.limits[way]
        opened = self.source.rollouts
        settings = replace(opened.settings, seed=seed)
        self.source.rollouts = replace(opened, sampler=sampler, limits=limits, settings=settings)


def trainer_config(condition: Condition, settings: Settings, learning_rate: float | None = None) -> TrainerConfig:
    """Return the trainer config of a condition: the defaults, apart from what the experiment fixes.

    `learning_rate` None takes that of the settings.
    """
    return TrainerConfig(
        steps=ENDLESS_STEPS,
        prompts_per_step=settings.prompts_per_step,
        group_size=settings.group_size,
        learning_rate=settings.learning_rate if learning_rate is None else learning_rate,
        warmup_steps=WARMUP_STEPS,
        estimator=condition.estimator,
        rewards=condition.rewards,
        line_rewards=condition.line_rewards,
        potentials=condition.potentials,
        max_staleness_steps=condition.ahead,
        importance_sampling=condition.importance,
    )


@contextmanager
def opened(settings: Settings, out: Path) -> Iterator[Worker]:
    """Open a worker on one core; close its engine and consoles at the end."""
    torch.set_num_threads(1)
    disable_progress_bar()
    beginning, folder = settings.beginning, base_of(settings)
    training = beginning.tasks(settings.families, Split.TRAIN, beginning.train_tasks)
    # Evaluation plays many tasks at once, even if a training step has few rollouts.
    at_once = max(settings.prompts_per_step * settings.group_size, 64)

    @asynccontextmanager
    async def opener() -> AsyncIterator[Rollouts]:
        place: SandboxConfig = Local() if settings.sandbox == Local.kind else InProcess()
        kind: EngineConfig = Vllm(cpu_threads=1) if settings.engine == Vllm.kind else Transformers()
        renderer = Renderer.from_folder(folder)
        never, room = renderer.forbidden_ids, beginning.context_tokens
        opening = open_engine(
            kind, model=folder, context_tokens=room, dtype="float32", max_sessions=at_once, forbidden_ids=never
        )
        async with place.open(SandboxOptions(pool_size=at_once)) as sandbox, opening as engine:
            playing, hooks = RolloutSettings("bare", concurrency=at_once), (FaultRetries(),)
            yield Rollouts(engine, sandbox, renderer, ReplSampler(), beginning.limits["lines"], playing, hooks)

    with SyncRollouts(opener, {task.id: task for task in training}) as source:
        yield Worker(source, settings, folder, training, out)
