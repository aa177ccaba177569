"""One worker's engine and consoles, and the runs that are played with them one after the other."""

import gc
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from repl_rl.engine import EngineKind, Transformers, Vllm, open_engine
from repl_rl.lab.credit import long
from repl_rl.lab.credit.agreement import Agreement, measured
from repl_rl.lab.credit.conditions import Condition, Way
from repl_rl.lab.credit.jobs import Job
from repl_rl.lab.credit.ledger import ENDLESS_STEPS, Ledger, spent
from repl_rl.lab.credit.rows import POINTS, Row, Run, Start
from repl_rl.lab.credit.settings import (
    FENCED_LIMITS,
    LINE_LIMITS,
    LONG_LIMITS,
    TASKS,
    TRAIN_TASKS,
    Settings,
    header,
    policy_folder,
)
from repl_rl.record.metrics import describe
from repl_rl.rollout import ReplSampler, Rollouts, RolloutThread
from repl_rl.rollout.renderer import Renderer
from repl_rl.samplers.fenced import FencedCodeSampler
from repl_rl.sandbox import Births, Local, SandboxKind
from repl_rl.sandbox.inprocess import InProcess
from repl_rl.tasks import Split, Task, load_tasks
from repl_rl.trainer import TrainerConfig, credit_of
from repl_rl.trainer.loop import load_model
from repl_rl.trainer.weights import save_weights, size_of, weights_folder

WARMUP_STEPS = 5
FIGURES = (
    *("solve_rate", "line_error_rate", "answered_rate", "lines_per_rollout", "void_line_rate", "print_rate"),
    *("try_rate", "repeat_rate"),
)
"""Of `repl_rl.record.metrics.describe`, on held-out tasks at temperature 1."""


def held_out_figures(source: RolloutThread, tasks: Sequence[Task]) -> dict[str, float]:
    """What the engine's policy does on held-out tasks, with `greedy` solve rate and tokens of a rollout."""
    sampled = source.sample(tasks)
    found = describe(sampled)
    greedy = describe(source.sample(tasks, temperature=0.0))["solve_rate"]
    rates = {name: round(found[name], 5) for name in FIGURES}
    return {**rates, "greedy": round(greedy, 5), "rollout_tokens": round(found["sampled_tokens"] / len(sampled), 2)}


class Worker:
    """An engine, consoles, and the policies that runs start from. Open it with `opened`."""

    def __init__(self, source: RolloutThread, settings: Settings, tasks: Sequence[Task], out: Path) -> None:
        self.source = source
        self.settings = settings
        self.tasks = tasks
        self.task_ids = [task.id for task in tasks]
        self.held_out = tasks_of(settings, Split.HELD_OUT, settings.held_out)
        self.out = out

    def play(self, job: Job) -> Row:
        """Play a job; see `start` and `run`."""
        if job.condition is None:
            return self.start(job.way)
        return self.run(job.condition, job)

    def start(self, way: Way) -> Start:
        """The policy that the runs of a way start from; one that has to be taught is, if it is not there yet."""
        began = time.monotonic()
        if not self.policy(way).exists():
            # imported here: of two workers only one needs it, and it takes seconds
            from repl_rl.lab.credit.taught import teach_failing, teach_fenced, teach_slipping

            if way == "fenced":
                teach_fenced(policy_folder(), self.policy(way), self.settings.fenced_steps)
            elif self.settings.start == "failing":
                teach_failing(policy_folder(), self.policy(way), self.settings.failing_steps)
            else:
                teach_slipping(policy_folder(), self.policy(way), self.settings.slipping_steps)
        self.use(way, seed=0)
        self.source.load_weights(self.policy(way), 0)
        return Start(way, held_out_figures(self.source, self.held_out), round(time.monotonic() - began, 1))

    def run(self, condition: Condition, job: Job) -> Run:
        """Train from the starting policy until the tokens are spent, and evaluate; not what only chooses a rate.

        Raises:
            WeightSyncError: the sampler's log probabilities are not the trainer's.
        """
        began, seed = time.monotonic(), job.seed
        self.use(condition.way, seed)
        config = trainer_config(condition, self.settings, job.learning_rate)
        begin, asked = self.policy(condition.way), self.settings.agreement_tokens > 0 and not job.tuning
        model, ledger = spent(begin, config, self.source, self.task_ids, self.settings.tokens, seed, asked)
        after = {} if job.tuning else held_out_figures(self.source, self.held_out)
        agreed = self.agreed(model, ledger, config, begin, seed) if asked else {}
        del model
        gc.collect()
        return ledger.run(condition.name, seed, after, began, config.learning_rate, agreed)

    def agreed(
        self, model: PreTrainedModel, ledger: Ledger, config: TrainerConfig, begin: Path, seed: int
    ) -> dict[str, dict[str, float]]:
        """How far gradients of this condition agree under the policy it ended with, that of the middle, and the first.

        The engine has the last one's weights when this begins, and the first one's when it ends.
        """
        found = {"end": self._agreement(model, config, seed)}
        assert ledger.middle is not None
        model.load_state_dict(ledger.middle)
        with weights_folder(size_of(model)) as weights:
            save_weights(model, model.state_dict(), weights)
            self.source.load_weights(weights, len(ledger.tokens))
        found["middle"] = self._agreement(model, config, seed)
        self.source.load_weights(begin, 0)
        found["start"] = self._agreement(load_model(begin, config), config, seed)
        return {point: asdict(found[point]) for point in POINTS}

    def _agreement(self, model: PreTrainedModel, config: TrainerConfig, seed: int) -> Agreement:
        never, tokens = self.source.forbidden_ids, self.settings.agreement_tokens
        size, play = config.group_size, self.source.sample
        return measured(model, play, self.tasks, credit_of(config), size, tokens, never, seed)

    def policy(self, way: Way) -> Path:
        """The policy that the runs of a way start from."""
        if way == "lines" and self.settings.start == "bundled":
            return policy_folder()
        kind = "fenced" if way == "fenced" else self.settings.start
        return self.out / f"{kind}-{header(self.settings)['fingerprint']}"

    def use(self, way: Way, seed: int) -> None:
        """Play rollouts of a way from now on."""
        sampler = FencedCodeSampler() if way == "fenced" else ReplSampler()
        lines = LONG_LIMITS if self.settings.start == "slipping" else LINE_LIMITS
        limits = FENCED_LIMITS if way == "fenced" else lines
        self.source.rollouts = replace(self.source.rollouts, sampler=sampler, limits=limits, seed=seed)


def tasks_of(settings: Settings, split: Split, count: int) -> tuple[Task, ...]:
    """The tasks of an experiment, so many of a split."""
    if settings.start == "slipping":
        return long.tasks(split, count, seed=0)
    return load_tasks(TASKS, split=split, count=count, seed=0)


def trainer_config(condition: Condition, settings: Settings, learning_rate: float | None = None) -> TrainerConfig:
    """How a condition is trained: the defaults, apart from what the experiment fixes.

    `learning_rate` None: that of the settings.
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
        potential=condition.potential,
    )


@contextmanager
def opened(settings: Settings, out: Path) -> Iterator[Worker]:
    """A worker on one core; its engine and consoles are gone at the end."""
    torch.set_num_threads(1)
    disable_progress_bar()
    training = tasks_of(settings, Split.TRAIN, TRAIN_TASKS)
    at_once = max(settings.prompts_per_step * settings.group_size, 64)
    folder = policy_folder()

    @asynccontextmanager
    async def opener() -> AsyncIterator[Rollouts]:
        place: SandboxKind = Local() if settings.sandbox == Local.kind else InProcess()
        kind: EngineKind = Vllm(threads=1) if settings.engine == Vllm.kind else Transformers()
        renderer = Renderer.from_folder(folder)
        opening = open_engine(kind, model=folder, max_sessions=at_once, forbidden_ids=renderer.forbidden_ids)
        async with place.open(Births(warm=at_once)) as sandbox, opening as engine:
            yield Rollouts(engine, sandbox, renderer, ReplSampler(), LINE_LIMITS, "bare", concurrency=at_once)

    with RolloutThread(opener, {task.id: task for task in training}) as source:
        yield Worker(source, settings, training, out)
