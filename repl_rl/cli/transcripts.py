"""`repl-rl transcripts`: demonstrations to fine-tune on, executed and checked."""

import asyncio
import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from repl_rl.cli.arguments import dump, parse
from repl_rl.cli.setup import QUICKSTART, Setup
from repl_rl.coldstart.doctests import STDLIB, Specimen, harvest
from repl_rl.coldstart.verified import Recipe, Tally, verified
from repl_rl.errors import ConfigError
from repl_rl.renderer import Renderer
from repl_rl.sandbox import Limits, open_sandbox
from repl_rl.store import write_step
from repl_rl.trajectory import Trajectory

_TOLD_EVERY = 250


@dataclass(frozen=True)
class TranscriptsConfig:
    """Turn the doctests of installed packages into trajectories, each executed and compared with what it says."""

    from_doctests: tuple[str, ...] = ()
    """Packages, or parts of one such as sympy.core; stdlib is the standard library."""
    model: str = QUICKSTART
    """Folder of the policy that will learn from them: its tokenizer is used; builtin:quickstart is the bundled one."""
    out: Path = Path("transcripts")
    """New folder to write: trajectories/ (a file a package), transcripts.json (counts and reasons), config.toml."""
    overwrite: bool = False
    """Replace an older folder of that name."""
    prompt: str = "bare"
    """Prompt template, the one that the policy is trained with: bare, base, or chat."""
    overshoot: Literal["refuse", "carry"] = "refuse"
    """What to do with a vocabulary whose tokens have text after a newline."""
    max_tokens: int = 1024
    """Longest trajectory, prompt included, tokens, >= 64; what is longer is cut between two statements."""
    max_lines: int = 32
    """Most lines of one trajectory, >= 1."""
    sandbox: Literal["local", "docker", "gateway", "unsafe"] = "local"
    """Where they are executed."""
    concurrency: int = 8
    """Consoles at once, >= 1."""
    preload: bool = True
    """Import each package once, before its consoles are started, and not in every one of them."""
    limits: Limits = field(default_factory=lambda: Limits(memory_mb=1024))

    def __post_init__(self) -> None:
        if not self.from_doctests:
            raise ConfigError("from_doctests", (), f"name packages, such as --from-doctests sympy {STDLIB}")
        for name, floor in (("max_tokens", 64), ("max_lines", 1), ("concurrency", 1)):
            if getattr(self, name) < floor:
                raise ConfigError(name, getattr(self, name), f"give at least {floor}")


def main(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit code."""
    config = parse(TranscriptsConfig, "transcripts", argv)
    if config.out.exists() and not config.overwrite:
        raise ConfigError("output folder", str(config.out), "it exists; name a new --out, or --overwrite to replace it")
    renderer = Renderer.from_folder(Setup(model=config.model).model_folder, config.overshoot)
    recipe = Recipe(renderer, config.prompt, config.max_tokens, config.max_lines, config.concurrency)
    renderer.prompt("", config.prompt)
    # It warns of texts beyond the policy's context; ours are measured and cut.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    harvests = {package: list(harvest(package)) for package in config.from_doctests}
    shutil.rmtree(config.out, ignore_errors=True)
    config.out.mkdir(parents=True)
    (config.out / "config.toml").write_text(dump(config))
    tallies: dict[str, Tally] = {}
    for number, (package, specimens) in enumerate(harvests.items()):
        print(f"{package}: {len(specimens)} doctests to execute ...", flush=True)
        tallies[package] = asyncio.run(_package(config, recipe, number, package, specimens))
    _keep_counts(config.out / "transcripts.json", tallies)
    Console(highlight=False).print(_table(tallies))
    return 0


async def _package(
    config: TranscriptsConfig, recipe: Recipe, number: int, package: str, specimens: Sequence[Specimen]
) -> Tally:
    tally = Tally()
    imported = (package.replace("-", "_").partition(".")[0],) if config.preload and package != STDLIB else ()
    opening = open_sandbox(config.sandbox, limits=config.limits, preload=imported, warm=config.concurrency)
    kept: list[Trajectory] = []
    async with opening as sandbox:
        async for trajectory in verified(specimens, sandbox, recipe, tally):
            kept.append(trajectory)
            if len(kept) % _TOLD_EVERY == 0:
                print(f"  {len(kept)} kept, {tally.dropped.total()} dropped", flush=True)
    folder = config.out / "trajectories"
    folder.mkdir(exist_ok=True)
    # Whole or not at all.
    torn = write_step(config.out / "unfinished", number, kept)
    os.replace(torn, folder / torn.name)
    torn.parent.rmdir()
    return tally


def _keep_counts(path: Path, tallies: dict[str, Tally]) -> None:
    total = sum(tally.kept for tally in tallies.values())
    record = {"kept": total, "packages": {package: tally.as_record() for package, tally in tallies.items()}}
    path.write_text(json.dumps(record, indent=2) + "\n")


def _table(tallies: dict[str, Tally]) -> Table:
    table = Table("package", "what became of its doctests", "trajectories", title="executed and checked")
    for package, tally in tallies.items():
        table.add_row(package, "kept whole", str(tally.whole))
        for reason, count in tally.cut.most_common():
            table.add_row("", f"kept up to where it {reason}", str(count))
        for reason, count in tally.dropped.most_common():
            table.add_row("", f"dropped: {reason}", str(count))
    table.add_section()
    table.add_row("all", "kept", str(sum(tally.kept for tally in tallies.values())))
    return table
