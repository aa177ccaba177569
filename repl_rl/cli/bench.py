"""`repl-rl bench sandbox | update | rollout | credit | faults | fleet | serve`.

What is measured is measured beside the usual way, in the same run; `faults` says what a run survives, `serve` what a
server bears.
"""

import json
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from repl_rl.errors import ConfigError
from repl_rl.lab.credit.experiment import Experiment, run_experiment
from repl_rl.lab.credit.plan import SPREAD
from repl_rl.lab.credit.settings import REGIMES, Settings
from repl_rl.lab.faults import FaultsConfig, is_log, log_file, run_faults
from repl_rl.lab.fleet import FleetConfig, run_fleet
from repl_rl.lab.load import LoadConfig, run_load
from repl_rl.lab.prefixes import StoredStep, bench_prefixes, bench_step
from repl_rl.lab.sandbox import bench_sandbox
from repl_rl.lab.strikes import STRIKES
from repl_rl.lab.update import bench_update
from repl_rl.machine.assets import asset
from repl_rl.machine.outputs import refuse_other_file
from repl_rl.machine.refused import writing
from repl_rl.runs.folder import RUN
from repl_rl.runs.store import read, step_file
from repl_rl.settings.arguments import parse


@dataclass(frozen=True)
class BenchConfig:
    """Measure, print the figures as JSON, and optionally keep them."""

    json: Path | None = None
    """File for the figures; none: they are only printed."""


Config = TypeVar("Config", bound=BenchConfig)


@dataclass(frozen=True)
class SandboxBenchConfig(BenchConfig):
    """Our console against jupyter_client with stock ipykernel; ratios say how many times better ours is."""

    docker: bool = False
    """Measure the docker sandbox beside the local one."""


@dataclass(frozen=True)
class UpdateBenchConfig(BenchConfig):
    """Our update against TRL's on the same rollouts: time and peak memory, ours over TRL's."""

    run: Path | None = None
    """Folder of a run: its own rollouts of a step, with a policy; none: made-up ones, with random policies."""
    step: int = 1
    """Which step of it, >= 1."""
    policy: Path | None = None
    """Folder of the policy; none: the run's checkpoints/final."""

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ConfigError("step", self.step, "give at least 1")
        for name, value, unread in (("policy", self.policy, None), ("step", self.step, 1)):
            if self.run is None and value != unread:
                raise ConfigError(name, str(value), "it is read with --run; leave it out, or give both")


@dataclass(frozen=True)
class RolloutBenchConfig(BenchConfig):
    """Our rollouts against other ways to play them: sampled tokens a second with two random policies, on vLLM."""

    rollouts: int = 64
    """Rollouts at once, >= 1."""
    lines: int = 16
    """Lines of each rollout, >= 2."""
    small: int = 3
    """Times that each way is played with the policy of 1 M parameters, >= 1."""
    medium: int = 1
    """Times that each way is played with the policy of 25 M parameters, >= 0; 0 leaves it out."""

    def __post_init__(self) -> None:
        for name, floor in (("rollouts", 1), ("lines", 2), ("small", 1), ("medium", 0)):
            if getattr(self, name) < floor:
                raise ConfigError(name, getattr(self, name), f"give at least {floor}")


@dataclass(frozen=True)
class CreditBenchConfig(Settings, BenchConfig):
    """Does credit a line learn faster than the outcome alone? The bundled policy, at equal sampled tokens.

    How small a difference can be detected is said before anything runs. One cell is repeated with its regime, its
    condition, its seed and another folder: --regime noise --conditions outcome/none --first-seed 3 --seeds 1 --out DIR
    """

    out: Path = Path("runs/credit")
    """Folder of the runs; those that it holds are not repeated."""
    conditions: tuple[str, ...] = ()
    """What is compared, such as outcome/none two_stream/gated fenced; none: everything."""
    seeds: int = 4
    """Runs of each condition, >= 1."""
    first_seed: int = 0
    """The first of the seeds, >= 0."""
    spread: float = SPREAD
    """Deviation over seeds of a difference between solve rates, > 0: says how small a one these seeds detect."""
    earlier: Path | None = None
    """Report of an earlier experiment, whose spread is taken instead."""
    workers: int = 2
    """Processes of one core each, >= 1."""


@dataclass(frozen=True)
class FaultsBenchConfig(FaultsConfig, BenchConfig):
    """What does a training survive? Each fault strikes a small real run at a random moment."""


@dataclass(frozen=True)
class FleetBenchConfig(FleetConfig, BenchConfig):
    """What does a fleet cost its owner? Nodes of a Ray cluster on this machine whose engine sleeps."""


@dataclass(frozen=True)
class ServeBenchConfig(LoadConfig, BenchConfig):
    """What does a server bear? Conversations that ask without a pause, clients that go away, and a crowd."""


FIGURES: Mapping[str, Set[str]] = {
    "sandbox": {"ratios", "checkout", "lines", "memory_mib"},
    "update": {"time_ratio", "loss_time_ratio", "memory_ratio", "token_ratio"},
    "rollout": {"bundled", "many", "plan", "load_average"},
    "credit": {"settings", "target", "window", "same_as", "rows"},
    "faults": {"seed", "steps", "faults"},
    "fleet": {"cpus", "lines", "group", "fleets"},
    "serve": {"turns_of_a_conversation", "conversations", "turns", "first_s"},
}
"""Benchmarks, each with keys by which its JSON is recognised."""
_ROWS = ("update",)
"""Those whose figures are a list of rows, each with the names."""
WHAT = tuple(FIGURES)


def _bench_credit(config: CreditBenchConfig) -> object:
    settings = Settings(**{field.name: getattr(config, field.name) for field in fields(Settings)})
    names = ("out", "conditions", "seeds", "workers", "first_seed", "spread", "earlier")
    experiment = Experiment(settings=settings, **{name: getattr(config, name) for name in names})
    return run_experiment(experiment, lambda line: print(line, file=sys.stderr, flush=True))


def _bench_rollout(config: RolloutBenchConfig) -> object:
    # imported here: vllm and trl take seconds, and vllm is not always installed
    from repl_rl.lab.rollout import RolloutEffort, bench_rollout

    repeats = {"small": config.small} | ({"medium": config.medium} if config.medium else {})
    return bench_rollout(RolloutEffort(config.rollouts, config.lines, repeats))


def _bench_update(config: UpdateBenchConfig) -> list[dict[str, float | str]]:
    if config.run is None:
        return [*bench_update(), *bench_prefixes()]
    policy = config.policy or config.run / "checkpoints" / "final"
    if not policy.is_dir():
        raise ConfigError("policy", str(policy), "there is no such folder; give that of a policy: --policy")
    played = tuple(read(step_file(config.run / "trajectories", config.step)))
    about: dict[str, float | str] = {"run": config.run.name, "step": config.step}
    return [{**about, **bench_step(StoredStep(policy, played))}]


def _bench_faults(config: FaultsBenchConfig) -> object:
    for name in config.faults or STRIKES:  # each run takes the place of an older one of its name
        RUN.refuse_owned(config.out / name)
        RUN.refuse_other(config.out / name)
        refuse_other_file("log of a run", log_file(config.out, name), is_log)
    return run_faults(config, lambda line: print(line, file=sys.stderr, flush=True), read)


def _bench_fleet(config: FleetBenchConfig) -> object:
    return run_fleet(config, lambda line: print(line, file=sys.stderr, flush=True))


def _bench_serve(config: ServeBenchConfig) -> object:
    return run_load(config, lambda line: print(line, file=sys.stderr, flush=True))


def _writable(config: Config, what: str) -> Config:
    """Refuse now what could not be written after a measurement of many minutes, or is not to be replaced."""
    if config.json is not None and not config.json.absolute().parent.is_dir():
        raise ConfigError("json", str(config.json), "there is no such folder; give a file in one that exists")
    if config.json is not None:
        refuse_other_file("json", config.json, lambda file: are_figures(what, file))
    return config


def are_figures(what: str, file: Path) -> bool:
    """True for a file of figures that the benchmark `what` wrote, of this release or another."""
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    rows = said if what in _ROWS and isinstance(said, list) else [said]
    return bool(rows) and all(isinstance(row, dict) and row.keys() >= FIGURES[what] for row in rows)


def main(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit code."""
    what, rest = (argv[0], argv[1:]) if argv else ("", argv)
    config: BenchConfig
    if what == "sandbox":
        config = _writable(parse(SandboxBenchConfig, "bench sandbox", rest), what)
        figures: object = bench_sandbox(docker=config.docker)
    elif what == "update":
        config = _writable(parse(UpdateBenchConfig, "bench update", rest), what)
        figures = _bench_update(config)
    elif what == "rollout":
        config = _writable(parse(RolloutBenchConfig, "bench rollout", rest), what)
        figures = _bench_rollout(config)
    elif what == "credit":
        config = _writable(parse(CreditBenchConfig, "bench credit", rest, asset(REGIMES), "regime"), what)
        figures = _bench_credit(config)
    elif what == "faults":
        config = _writable(parse(FaultsBenchConfig, "bench faults", rest), what)
        figures = _bench_faults(config)
    elif what == "fleet":
        config = _writable(parse(FleetBenchConfig, "bench fleet", rest), what)
        figures = _bench_fleet(config)
    elif what == "serve":
        config = _writable(parse(ServeBenchConfig, "bench serve", rest), what)
        figures = _bench_serve(config)
    elif what in ("-h", "--help"):
        print(f"usage: repl-rl bench {'|'.join(WHAT)} [options]    (--help after either lists them)")
        return 0
    else:
        raise ConfigError("benchmark", what, f"choose {', '.join(WHAT[:-1])} or {WHAT[-1]}")
    text = json.dumps(figures, indent=2)
    print(text)
    if config.json is not None:
        with writing("file", config.json):
            config.json.write_text(text + "\n")
    return 0
