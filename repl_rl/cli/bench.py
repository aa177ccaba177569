"""`repl-rl bench sandbox | update`: our figures beside the usual way's, measured in the same run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repl_rl.cli.arguments import parse
from repl_rl.errors import ConfigError
from repl_rl.sandbox.bench import run_bench
from repl_rl.trainer.bench import bench_update


@dataclass(frozen=True)
class BenchConfig:
    """Measure, print the figures as JSON, and optionally keep them."""

    json: Path | None = None
    """File for the figures; none: they are only printed."""


@dataclass(frozen=True)
class SandboxBenchConfig(BenchConfig):
    """Our console against jupyter_client with stock ipykernel; ratios say how many times better ours is."""

    docker: bool = False
    """Measure the docker sandbox beside the local one."""


@dataclass(frozen=True)
class UpdateBenchConfig(BenchConfig):
    """Our update against TRL's on the same rollouts: time and peak memory, ours over TRL's."""


def main(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit code."""
    what, rest = (argv[0], argv[1:]) if argv else ("", argv)
    config: BenchConfig
    if what == "sandbox":
        config = parse(SandboxBenchConfig, "bench sandbox", rest)
        figures: object = run_bench(docker=config.docker)
    elif what == "update":
        config = parse(UpdateBenchConfig, "bench update", rest)
        figures = bench_update()
    elif what in ("-h", "--help"):
        print("usage: repl-rl bench sandbox|update [options]    (--help after either lists them)")
        return 0
    else:
        raise ConfigError("benchmark", what, "choose sandbox or update")
    text = json.dumps(figures, indent=2)
    print(text)
    if config.json is not None:
        config.json.write_text(text + "\n")
    return 0
