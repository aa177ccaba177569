"""`repl-rl bench echo`: does it help to learn what the console prints? Equal sampled tokens at several weights."""

import gc
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from platform import python_version
from typing import Protocol

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from repl_rl.engine.forbidden import forbid
from repl_rl.errors import ConfigError
from repl_rl.lab.credit.ledger import ENDLESS_STEPS, spent
from repl_rl.lab.credit.rows import Row, RowFile, Run, Start, record
from repl_rl.lab.credit.settings import TARGET, WINDOW
from repl_rl.lab.credit.statistics import differences, mean, measures, reached
from repl_rl.lab.credit.worker import held_out
from repl_rl.machine.cores import cores
from repl_rl.machine.versions import versions
from repl_rl.record.printed import printed
from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout import RolloutThread
from repl_rl.tasks import Split, Task
from repl_rl.trainer import TrainerConfig, refuse_run
from repl_rl.trainer.fleets import beside
from repl_rl.trainer.loop import load_model
from repl_rl.world import World

BASELINE = "0"
"""The condition that learns nothing of what the console prints."""

OF_THE_PLAN = frozenset({"weights", "seeds", "out", "json"})
"""Settings that may change between calls: the runs are the same."""


@dataclass(frozen=True)
class EchoConfig(World):
    """Runs of one policy that differ in `trainer.observation_weight` alone, of equal sampled tokens."""

    weights: tuple[float, ...] = (0.0, 0.1)
    """Values of trainer.observation_weight, each >= 0; differences are to 0."""
    seeds: int = 4
    """Runs of each weight, >= 1."""
    tokens: int = 40_000
    """Tokens that a run may sample in training, >= 1; it ends with the first step beyond them."""
    train_tasks: int = 4096
    """Tasks to draw from, >= 1."""
    eval_tasks: int = 480
    """Held-out tasks of the evaluation after each run, >= 1."""
    out: Path = Path("runs/echo")
    """Folder of the runs; those that it holds are not repeated."""
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(prompts_per_step=8, learning_rate=3e-4))
    """How it is trained. Neither `steps` nor `observation_weight` is read; the learning rate stays where it is after
    its warm-up, so that the end of a run does not depend on when it comes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("seeds", "tokens", "train_tasks", "eval_tasks"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "give at least 1")
        if not self.weights or len(set(self.weights)) < len(self.weights):
            raise ConfigError("weights", self.weights, "give at least one, and none twice")
        for weight in self.weights:
            self.trained(weight)

    @property
    def models(self) -> Path:
        """See `World.models`."""
        return self.out / ".models"

    def trained(self, weight: float) -> TrainerConfig:
        """How a run of that weight is trained.

        Raises:
            ConfigError: the weight is below 0.
        """
        return replace(self.trainer, steps=ENDLESS_STEPS, observation_weight=weight)


class Plays(Protocol):
    """Who plays the runs."""

    @property
    def start(self) -> Start:
        """The policy that they begin with, on held-out tasks."""

    def run(self, weight: float, seed: int) -> Run:
        """Train from there until the tokens are spent, and evaluate."""


Open = Callable[["EchoConfig"], AbstractContextManager[Plays]]


def run_echo(config: EchoConfig, tell: Callable[[str], None] = print, player: Open | None = None) -> dict[str, object]:
    """Play what is missing and return what `bench echo --json` writes: rows, and figures that follow from them.

    Raises:
        ConfigError: a setting does not fit, or `out` holds runs of another experiment.
    """
    about = header(config)
    file = RowFile(config.out / "rows.jsonl", about)
    done = {(row.condition, row.seed) for row in file.rows if isinstance(row, Run)}
    missing = [(w, seed) for seed in range(config.seeds) for w in config.weights if (f"{w:g}", seed) not in done]
    if missing:
        with (player or opened)(config) as plays:
            if not any(isinstance(row, Start) for row in file.rows):
                file.add(plays.start)
            for number, (weight, seed) in enumerate(missing, 1):
                row = plays.run(weight, seed)
                file.add(row)
                tell(f"{number:>3}/{len(missing)}  {told(row)}")
    return report(config, about, file.rows)


@contextmanager
def opened(config: EchoConfig) -> Iterator["Player"]:
    """A player with an engine and consoles, which are gone at the end.

    Raises:
        ConfigError: a setting does not fit.
    """
    training = config.drawn(Split.TRAIN, config.train_tasks)
    refuse_run(config, config.trainer, len(training))
    config.out.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()
    with RolloutThread(beside(config, config.trainer).rollouts, {task.id: task for task in training}) as source:
        yield Player(config, source, training)


class Player:
    """One engine and its consoles, and the runs that are played with them one after the other."""

    def __init__(self, config: EchoConfig, source: RolloutThread, training: Sequence[Task]) -> None:
        self.config = config
        self.source = source
        self.task_ids = [task.id for task in training]
        self.held_out = config.drawn(Split.HELD_OUT, config.eval_tasks)
        began = time.monotonic()
        # Greedy, so that they are the same ones when an experiment is taken up again.
        self.shown = self.source.sample(self.held_out, temperature=0.0)
        """What every policy's prediction of the console is measured on: rollouts of the one that all begin as."""
        model = load_model(config.model_folder, config.trainer)
        self.start = Start("lines", self._figures(model), round(time.monotonic() - began, 1))

    def run(self, weight: float, seed: int) -> Run:
        """Train from the starting policy until the tokens are spent, and evaluate.

        Raises:
            WeightSyncError: the sampler's log probabilities are not the trainer's.
        """
        began = time.monotonic()
        self.source.rollouts = replace(self.source.rollouts, seed=seed)
        trained, tokens = self.config.trained(weight), self.config.tokens
        model, ledger = spent(self.config.model_folder, trained, self.source, self.task_ids, tokens, seed)
        after = self._figures(model)
        del model
        gc.collect()
        return ledger.run(f"{weight:g}", seed, after, began)

    def _figures(self, model: PreTrainedModel) -> dict[str, float]:
        """The policy that `model` is and the engine holds, on held-out tasks."""
        never = self.source.forbidden_ids
        nats = console_nats(model, self.shown, never)
        return {**held_out(self.source, self.held_out).figures, "console_nats": round(nats, 5)}


@torch.no_grad()
def console_nats(model: PreTrainedModel, trajectories: Sequence[Trajectory], never: frozenset[int]) -> float:
    """Mean negative log probability, nats, of the tokens that consoles printed; 0 if they printed none."""
    forbid(model, never)
    model.eval()
    total, count = 0.0, 0
    for t in trajectories:
        mask = torch.tensor(printed(t, never), dtype=torch.bool)
        if not mask.any():
            continue
        ids = torch.tensor([[*t.prompt.token_ids, *t.completion_ids]], device=model.device)
        begin = len(t.prompt.token_ids)
        logprobs = model(input_ids=ids, use_cache=False).logits[0, begin - 1 : -1].float().log_softmax(-1)
        own = logprobs.gather(1, ids[0, begin:, None])[:, 0].cpu()
        total, count = total - float(own[mask].double().sum()), count + int(mask.sum())
    return total / max(count, 1)


def header(config: EchoConfig) -> dict[str, object]:
    """What rows of one file have in common."""
    settings = {name: value for name, value in asdict(config).items() if name not in OF_THE_PLAN}
    weights = (config.model_folder / "model.safetensors").read_bytes()
    return {
        "settings": json.loads(json.dumps(settings, default=str)),
        "versions": {"python": python_version(), **versions()},
        "policy": hashlib.sha256(weights).hexdigest()[:16],
    }


def report(config: EchoConfig, about: dict[str, object], rows: Sequence[Row]) -> dict[str, object]:
    """Everything that the page is made of."""
    names = {f"{weight:g}" for weight in config.weights}
    runs = [r for r in rows if isinstance(r, Run) and r.condition in names and r.seed < config.seeds]
    by_name: dict[str, dict[int, Run]] = {f"{weight:g}": {} for weight in config.weights}
    for run in runs:
        by_name[run.condition][run.seed] = run
    baseline = by_name.get(BASELINE, {})
    starts = [row for row in rows if isinstance(row, Start)]
    kept: list[Row] = [*starts, *runs]
    return {
        **about,
        "target": TARGET,
        "window": WINDOW,
        "cores": cores(),
        "busy_s": round(sum(row.wall_s for row in kept), 1),
        "start": dict(starts[0].figures) if starts else {},
        "weights": {name: _condition(mine, baseline, config.tokens) for name, mine in by_name.items() if mine},
        "rows": [record(row) for row in kept],
    }


def _condition(mine: dict[int, Run], baseline: dict[int, Run], budget: int) -> dict[str, object]:
    found = [measures(run, budget) for run in mine.values()]
    return {
        "mean": {key: asdict(mean([figures[key] for figures in found])) for key in found[0]},
        "reached": reached(list(mine.values()), budget),
        "difference": {key: asdict(value) for key, value in differences(mine, baseline, budget).items()},
    }


def told(run: Run) -> str:
    """A run in one line."""
    after = run.after
    solved = f"solved {after['solve_rate']:.1%}, {after['greedy']:.1%} greedy, {after['line_error_rate']:.1%} in error"
    nats = f"console {after['console_nats']:.3f} nats a token"
    return f"weight {run.condition} seed {run.seed}: {solved}, {nats}, {run.wall_s:.0f} s"
