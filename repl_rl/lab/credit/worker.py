"""One worker's engine and consoles, and the runs that are played with them one after the other."""

import gc
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from repl_rl.engine import EngineKind, Transformers, Vllm, open_engine
from repl_rl.lab.credit.conditions import Condition, Way
from repl_rl.lab.credit.jobs import Job
from repl_rl.lab.credit.ledger import ENDLESS_STEPS, spent
from repl_rl.lab.credit.rows import Row, Run, Start
from repl_rl.lab.credit.settings import FENCED_LIMITS, LINE_LIMITS, TASKS, TRAIN_TASKS, Settings, header, policy_folder
from repl_rl.record.metrics import describe
from repl_rl.rollout import ReplSampler, Rollouts, RolloutThread
from repl_rl.rollout.renderer import Renderer
from repl_rl.samplers.fenced import FencedCodeSampler
from repl_rl.sandbox import Births, Local, SandboxKind
from repl_rl.sandbox.inprocess import InProcess
from repl_rl.tasks import Split, Task, load_tasks
from repl_rl.trainer import TrainerConfig

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
        self.task_ids = [task.id for task in tasks]
        self.held_out = load_tasks(TASKS, split=Split.HELD_OUT, count=settings.held_out, seed=0)
        self.out = out

    def play(self, job: Job) -> Row:
        """Play a job; see `start` and `run`."""
        if job.condition is None:
            return self.start(job.way)
        return self.run(job.condition, job.seed)

    def start(self, way: Way) -> Start:
        """The policy that the runs of a way start from; the fenced one is made here, if it is not there yet."""
        began = time.monotonic()
        if way == "fenced" and not self.policy(way).exists():
            # imported here: of two workers only one needs it, and it takes seconds
            from repl_rl.lab.credit.fenced import teach

            teach(policy_folder(), self.policy(way), self.settings.fenced_steps)
        self.use(way, seed=0)
        self.source.load_weights(self.policy(way), 0)
        return Start(way, held_out_figures(self.source, self.held_out), round(time.monotonic() - began, 1))

    def run(self, condition: Condition, seed: int) -> Run:
        """Train from the starting policy until the tokens are spent, and evaluate.

        Raises:
            WeightSyncError: the sampler's log probabilities are not the trainer's.
        """
        began = time.monotonic()
        self.use(condition.way, seed)
        config = trainer_config(condition, self.settings)
        model, ledger = spent(
            self.policy(condition.way), config, self.source, self.task_ids, self.settings.tokens, seed
        )
        after = held_out_figures(self.source, self.held_out)
        del model
        gc.collect()
        return ledger.run(condition.name, seed, after, began)

    def policy(self, way: Way) -> Path:
        """The policy that the runs of a way start from."""
        if way == "lines":
            return policy_folder()
        return self.out / f"fenced-{header(self.settings)['fingerprint']}"

    def use(self, way: Way, seed: int) -> None:
        """Play rollouts of a way from now on."""
        sampler = FencedCodeSampler() if way == "fenced" else ReplSampler()
        limits = FENCED_LIMITS if way == "fenced" else LINE_LIMITS
        self.source.rollouts = replace(self.source.rollouts, sampler=sampler, limits=limits, seed=seed)


def trainer_config(condition: Condition, settings: Settings) -> TrainerConfig:
    """How a condition is trained: the defaults, apart from what the experiment fixes."""
    return TrainerConfig(
        steps=ENDLESS_STEPS,
        prompts_per_step=settings.prompts_per_step,
        group_size=settings.group_size,
        learning_rate=settings.learning_rate,
        warmup_steps=WARMUP_STEPS,
        estimator=condition.estimator,
        rewards=condition.rewards,
    )


@contextmanager
def opened(settings: Settings, out: Path) -> Iterator[Worker]:
    """A worker on one core; its engine and consoles are gone at the end."""
    torch.set_num_threads(1)
    disable_progress_bar()
    training = load_tasks(TASKS, split=Split.TRAIN, count=TRAIN_TASKS, seed=0)
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
