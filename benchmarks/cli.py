"""`repl-rl bench sandbox | update | rollout | credit | faults | fleet | serve`.

Each benchmark measures our way and the usual way in the same run. `faults` tests what a run survives, and `serve` puts
a server under load.
"""

import json
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from benchmarks.console.line_latency import bench_sandbox
from benchmarks.credit.experiment import Experiment, run_experiment
from benchmarks.credit.experiment_plan import SPREAD
from benchmarks.credit.settings import REGIMES, Settings
from benchmarks.faults.fault_injection import FaultsConfig, is_log, log_file, run_faults
from benchmarks.faults.strikes import STRIKES
from benchmarks.scaling.worker_overhead import FleetConfig, run_fleet
from benchmarks.serving.load import LoadConfig, run_load
from benchmarks.update.shared_prefixes import StoredStep, bench_prefixes, bench_step
from benchmarks.update.trl_comparison import bench_update
from repl_rl.errors import ConfigError
from repl_rl.runs.run_folder import RUN
from repl_rl.runs.store import get_step_path, read_trajectories
from repl_rl.settings.argument_parser import parse
from repl_rl.utils.atomic_files import validate_replaceable_file, write_named
from repl_rl.utils.describe_os_errors import catch_os_errors
from repl_rl.utils.package_data import find_asset


@dataclass(frozen=True)
class BenchConfig:
    """Run a benchmark, print its metrics as JSON, and optionally save them."""

    json: Path | None = None
    """File for the metrics. Without it they are only printed."""


Config = TypeVar("Config", bound=BenchConfig)


@dataclass(frozen=True)
class SandboxBenchConfig(BenchConfig):
    """Compare our console with jupyter_client and stock ipykernel. Each ratio is how many times better ours is."""

    docker: bool = False
    """Also measure the docker sandbox."""


@dataclass(frozen=True)
class UpdateBenchConfig(BenchConfig):
    """Compare our update with TRL's on the same rollouts: time and peak memory, as ratios of ours to TRL's."""

    run: Path | None = None
    """Folder of a run, whose rollouts of one step are used. Default: synthetic rollouts, with random policies."""
    step: int | None = None
    """Step of that run, >= 1. Default: 1."""
    policy: Path | None = None
    """Folder of the policy. Default: checkpoints/final of the run."""

    def __post_init__(self) -> None:
        if self.step is not None and self.step < 1:
            raise ConfigError("step", self.step, "give at least 1")
        for name, value in (("policy", self.policy), ("step", self.step)):
            if self.run is None and value is not None:
                raise ConfigError(name, str(value), "it is read with --run; leave it out, or give both")


@dataclass(frozen=True)
class RolloutBenchConfig(BenchConfig):
    """Compare our rollouts with other ways to play them: sampled tokens per second of two random policies on vLLM."""

    rollouts: int = 64
    """Concurrent rollouts, >= 1."""
    lines: int = 16
    """Lines per rollout, >= 2."""
    small: int = 3
    """Repeats of each way with the policy of 1 M parameters, >= 1."""
    medium: int = 1
    """Repeats of each way with the policy of 25 M parameters, >= 0. 0 leaves this policy out."""

    def __post_init__(self) -> None:
        for name, floor in (("rollouts", 1), ("lines", 2), ("small", 1), ("medium", 0)):
            if getattr(self, name) < floor:
                raise ConfigError(name, getattr(self, name), f"give at least {floor}")


@dataclass(frozen=True)
class CreditBenchConfig(Settings, BenchConfig):
    """Compare credit per line with credit from the outcome alone: the bundled policy, at equal sampled tokens.

    The smallest difference that can be detected is printed before anything runs. To repeat one cell, give its regime,
    condition and seed, and another folder:
    --regime noise --conditions outcome/none --first-seed 3 --seeds 1 --out DIR
    """

    out: Path = Path("runs/credit")
    """Folder of the runs. Runs that it already holds are not repeated."""
    conditions: tuple[str, ...] = ()
    """Conditions to compare, such as outcome/none two_stream/gated fenced. Default: all."""
    seeds: int = 4
    """Runs per condition, >= 1."""
    first_seed: int = 0
    """First seed, >= 0."""
    spread: float = SPREAD
    """Standard deviation over seeds of a difference in solve rate, > 0. A smaller one detects smaller differences."""
    earlier: Path | None = None
    """Report of an earlier experiment, whose spread replaces --spread."""
    workers: int = 2
    """Processes with one core each, >= 1."""


@dataclass(frozen=True)
class FaultsBenchConfig(FaultsConfig, BenchConfig):
    """Test which faults a training run survives. Each fault strikes a small real run at a random moment."""


@dataclass(frozen=True)
class FleetBenchConfig(FleetConfig, BenchConfig):
    """Measure the overhead of rollout workers in the process of the trainer. The workers are nodes of a Ray cluster on
    this machine, and their engine sleeps instead of sampling."""


@dataclass(frozen=True)
class ServeBenchConfig(LoadConfig, BenchConfig):
    """Measure a server under load: conversations without pauses, clients that disconnect, and a crowd."""


FIGURES: Mapping[str, Set[str]] = {
    "sandbox": {"ratios", "checkout", "lines", "memory_mib"},
    "update": {"time_ratio", "loss_time_ratio", "memory_ratio", "token_ratio"},
    "rollout": {"bundled", "many", "plan", "load_average"},
    "credit": {"settings", "target", "window", "same_as", "rows"},
    "faults": {"seed", "steps", "faults"},
    "fleet": {"cpus", "lines", "group", "fleets"},
    "serve": {"turns_of_a_conversation", "conversations", "turns", "first_s"},
}
"""Benchmarks, each with keys that identify its JSON."""
_ROWS = ("update",)
"""Benchmarks whose metrics are a list of rows, each with the keys."""
WHAT = tuple(FIGURES)


def _run_credit_benchmark(config: CreditBenchConfig) -> object:
    settings = Settings(**{field.name: getattr(config, field.name) for field in fields(Settings)})
    names = ("out", "conditions", "seeds", "workers", "first_seed", "spread", "earlier")
    experiment = Experiment(settings=settings, **{name: getattr(config, name) for name in names})
    return run_experiment(experiment, lambda line: print(line, file=sys.stderr, flush=True))


def _run_rollout_benchmark(config: RolloutBenchConfig) -> object:
    # Imports of vLLM and TRL take seconds, and vLLM is not always installed.
    from benchmarks.rollouts.throughput import RolloutEffort, bench_rollout

    repeats = {"small": config.small} | ({"medium": config.medium} if config.medium else {})
    return bench_rollout(RolloutEffort(config.rollouts, config.lines, repeats))


def _run_update_benchmark(config: UpdateBenchConfig) -> list[dict[str, float | str]]:
    if config.run is None:
        return [*bench_update(), *bench_prefixes()]
    policy = config.policy or config.run / "checkpoints" / "final"
    if not policy.is_dir():
        raise ConfigError("policy", str(policy), "there is no such folder; give that of a policy: --policy")
    step = config.step or 1
    played = tuple(read_trajectories(get_step_path(config.run / "trajectories", step)))
    about: dict[str, float | str] = {"run": config.run.name, "step": step}
    return [{**about, **bench_step(StoredStep(policy, played))}]


def _run_faults_benchmark(config: FaultsBenchConfig) -> object:
    # Each run replaces an older one of its name. Check now that all of them may be replaced.
    for name in config.faults or STRIKES:
        RUN.validate_not_locked(config.out / name)
        RUN.validate_replaceable(config.out / name)
        validate_replaceable_file("log of a run", log_file(config.out, name), is_log)
    return run_faults(config, lambda line: print(line, file=sys.stderr, flush=True), read_trajectories)


def _run_workers_benchmark(config: FleetBenchConfig) -> object:
    return run_fleet(config, lambda line: print(line, file=sys.stderr, flush=True))


def _run_serve_benchmark(config: ServeBenchConfig) -> object:
    return run_load(config, lambda line: print(line, file=sys.stderr, flush=True))


def _validate_output(config: Config, what: str) -> Config:
    """Check before a long measurement that its file can be written and may be replaced. Return the config."""
    if config.json is not None and not config.json.absolute().parent.is_dir():
        raise ConfigError("json", str(config.json), "there is no such folder; give a file in one that exists")
    if config.json is not None:
        validate_replaceable_file("json", config.json, lambda file: is_benchmark_file(what, file))
    return config


def is_benchmark_file(what: str, file: Path) -> bool:
    """Return True if the benchmark `what` wrote the file, in this release or another."""
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    rows = said if what in _ROWS and isinstance(said, list) else [said]
    return bool(rows) and all(isinstance(row, dict) and row.keys() >= FIGURES[what] for row in rows)


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    what, rest = (argv[0], argv[1:]) if argv else ("", argv)
    # Parse the settings of the benchmark, check its output file, and run it.
    config: BenchConfig
    if what == "sandbox":
        config = _validate_output(parse(SandboxBenchConfig, "bench sandbox", rest), what)
        figures: object = bench_sandbox(docker=config.docker)
    elif what == "update":
        config = _validate_output(parse(UpdateBenchConfig, "bench update", rest), what)
        figures = _run_update_benchmark(config)
    elif what == "rollout":
        config = _validate_output(parse(RolloutBenchConfig, "bench rollout", rest), what)
        figures = _run_rollout_benchmark(config)
    elif what == "credit":
        config = _validate_output(parse(CreditBenchConfig, "bench credit", rest, find_asset(REGIMES), "regime"), what)
        figures = _run_credit_benchmark(config)
    elif what == "faults":
        config = _validate_output(parse(FaultsBenchConfig, "bench faults", rest), what)
        figures = _run_faults_benchmark(config)
    elif what == "fleet":
        config = _validate_output(parse(FleetBenchConfig, "bench fleet", rest), what)
        figures = _run_workers_benchmark(config)
    elif what == "serve":
        config = _validate_output(parse(ServeBenchConfig, "bench serve", rest), what)
        figures = _run_serve_benchmark(config)
    elif what in ("-h", "--help"):
        print(f"usage: repl-rl bench {'|'.join(WHAT)} [options]    (--help after either lists them)")
        return 0
    else:
        raise ConfigError("benchmark", what, f"choose {', '.join(WHAT[:-1])} or {WHAT[-1]}")
    # Print the metrics, and save them if a file was named.
    text = json.dumps(figures, indent=2)
    print(text)
    if config.json is not None:
        with catch_os_errors("file", config.json), write_named(config.json, "json") as place:
            place.write_text(text + "\n", encoding="utf-8")
    return 0
