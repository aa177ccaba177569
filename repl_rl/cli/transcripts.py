"""`repl-rl transcripts`: make demonstrations for fine-tuning, executed and checked."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from rich.table import Table

from repl_rl.cli.defaults import follow
from repl_rl.cli.terminal import terminal
from repl_rl.cli.unread import refuse_unread
from repl_rl.coldstart.demonstrations import MIXES
from repl_rl.coldstart.doctests import STDLIB, Specimen, harvest
from repl_rl.coldstart.played import Course, demonstrations
from repl_rl.coldstart.verified import Recipe, Tally, verified
from repl_rl.errors import ConfigError
from repl_rl.machine.folders import open_output_folder
from repl_rl.machine.outputs import Output
from repl_rl.machine.refused import writing
from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout.chat_template import instant
from repl_rl.rollout.prompt_space import PromptSpace
from repl_rl.rollout.prompts import template
from repl_rl.rollout.renderer import Overshoot, Renderer
from repl_rl.runs.store import append
from repl_rl.sandbox import SANDBOXES, Births, Limits, Sandbox, SandboxKind
from repl_rl.sandbox.inprocess import InProcess
from repl_rl.settings.arguments import Parsed, parse_with_sources
from repl_rl.settings.bounds import AtLeast, check_fields
from repl_rl.settings.pretrained import CONTEXT, PROMPT
from repl_rl.settings.scalars import Scalar
from repl_rl.settings.seams import Seam
from repl_rl.settings.toml import dump
from repl_rl.tasks import families_of
from repl_rl.world import QUICKSTART, World, date_of, prompt_space_of

_TOLD_EVERY = 250
_OF_TASKS = ("mix", "protocol", "count", "seed")
"""Settings that only demonstrations of built-in tasks read."""
_OF_DOCTESTS = ("max_lines", "preload")
"""Settings that only doctests read."""
_SETTINGS, _COUNTS = "config.toml", "transcripts.json"
TRANSCRIPTS = Output(
    "transcripts",
    "output folder",
    ("trajectories", _COUNTS, _SETTINGS),
    lambda folder: all((folder / name).exists() for name in ("trajectories", _COUNTS, _SETTINGS)),
)
"""Output type of a transcripts folder: its file names, and the test that recognizes one of version 0.2."""
PLACES: Seam[SandboxKind] = Seam("sandbox", {**SANDBOXES.kinds, InProcess.kind: InProcess})


@dataclass(frozen=True)
class TranscriptsConfig:
    """Make and execute trajectories to learn from: doctests of installed packages, or plans of built-in tasks."""

    from_doctests: tuple[str, ...] = ()
    """Packages, or parts of one such as sympy.core. stdlib is the standard library. Examples with the documented output
    are kept."""
    from_tasks: tuple[str, ...] = ()
    """Built-in tasks, such as builtin:quickstart. Only questions of their training part are demonstrated."""
    mix: Literal["clean", "warm", "cold"] = "clean"
    """Kinds of demonstrations of built-in tasks. clean: all good. warm: 45 % are guesses, mistakes with what follows,
    and surprises. cold: 81 % are."""
    protocol: Literal["line", "fenced"] = "line"
    """Sampler that built-in tasks demonstrate: line (repl, line by line) or fenced (blocks of code)."""
    count: Annotated[int, AtLeast(1)] = 1000
    """Demonstrations of built-in tasks, >= 1. Families alternate."""
    seed: Annotated[int, AtLeast(0)] = 0
    """Seed of the built-in tasks and their demonstrations, >= 0."""
    model: str = QUICKSTART
    """Policy that will learn from them, as in `train`. Its tokenizer is used."""
    out: Path = Path("transcripts")
    """New folder to write: trajectories/ (one file per package), transcripts.json (counts and reasons), config.toml."""
    overwrite: bool = False
    """Replace older transcripts that this command made. Anything else is refused."""
    prompt: Annotated[str, PROMPT] = "bare"
    """Prompt template that the policy is trained with: bare, base, few_shot, chat, chat_few_shot, or a text file."""
    chat: Mapping[str, Scalar] = field(default_factory=dict)
    """Arguments of the model's chat template, such as enable_thinking. One that it does not read is refused."""
    bos: bool = True
    """Begin plain prompts with the first token that the model's own tokenizer writes (BOS), if it writes one."""
    prompt_space: PromptSpace = "auto"
    """The writer of the space after a prompt, as in `train`: auto, observed, sampled."""
    date: str = ""
    """Date and time that the model's chat template writes, as in `train`. "" means the start of this command."""
    overshoot: Overshoot = "forbid"
    """Treatment of tokens with text after a newline: forbid (probability 0 in sampler and trainer alike), carry that
    text into the next line, or refuse a vocabulary that has them."""
    max_tokens: Annotated[int, AtLeast(64), CONTEXT] = 1024
    """Longest trajectory, prompt included, tokens, >= 64. A longer doctest is cut between two statements, and a longer
    demonstration of a built-in task is dropped."""
    max_lines: Annotated[int, AtLeast(1)] = 32
    """Most lines of one doctest's trajectory, >= 1."""
    sandbox: Annotated[SandboxKind | str, PLACES] = "local"
    """Sandbox that executes them. inprocess is only for built-in tasks, whose lines are our own."""
    concurrency: Annotated[int, AtLeast(1)] = 8
    """Concurrent consoles, >= 1."""
    preload: bool = True
    """Import each package once before its consoles start, instead of in every one of them."""
    limits: Limits = field(default_factory=lambda: Limits(memory_mb=1024))

    def __post_init__(self) -> None:
        if not self.from_doctests and not self.from_tasks:
            remedy = f"name packages, such as --from-doctests sympy {STDLIB}, or --from-tasks {QUICKSTART}"
            raise ConfigError("from_doctests", (), remedy)
        if self.from_doctests and isinstance(PLACES.chosen(self.sandbox), InProcess):
            raise ConfigError("sandbox", InProcess.kind, "a doctest is foreign code; use local, or docker")
        for source in self.from_tasks:
            families_of(source)
        check_fields(self)
        if self.date:
            instant(self.date)
        object.__setattr__(self, "prompt", template(self.prompt))


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    asked = parse_with_sources(TranscriptsConfig, "transcripts", argv)
    refuse_without_effect(asked)
    world = World(model=asked.config.model)
    folder = world.model_folder
    config = follow(asked, world)
    # Resolve what depends on the model or the clock, so that the recorded settings reproduce the transcripts.
    date = date_of(config.date, folder, None)
    space = prompt_space_of(config.prompt_space, folder, None)
    config = replace(config, date=date, prompt_space=space)
    now = instant(config.date) if config.date else None
    renderer = Renderer.from_folder(
        folder, config.overshoot, config.chat, bos=config.bos, prompt_space=config.prompt_space, now=now
    )
    recipe = Recipe(renderer, config.prompt, config.max_tokens, config.max_lines, config.concurrency)
    # Write a prompt now, so that a template that does not fit is found before anything runs.
    renderer.prompt("", config.prompt)
    if config.chat and not renderer.chat.applied:
        raise ConfigError("chat", dict(config.chat), f"no chat template is in --prompt {config.prompt}; leave it out")
    # transformers warns of texts beyond the policy's context. Such texts are cut or dropped here.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    harvests = {package: list(harvest(package)) for package in config.from_doctests}
    tallies: dict[str, Tally] = {}
    with open_output_folder(config.out, TRANSCRIPTS, config.overwrite) as made:
        for package, specimens in harvests.items():
            print(f"{package}: {len(specimens)} doctests to execute ...", flush=True)
            asyncio.run(_package(config, recipe, package, specimens, tallies, made))
        if config.from_tasks:
            print(f"{' '.join(config.from_tasks)}: {config.count} demonstrations to execute ...", flush=True)
            asyncio.run(_demonstrations(config, renderer, tallies, made))
        with writing("output folder", config.out, then=", then give the command again"):
            (made / _SETTINGS).write_text(dump(config), encoding="utf-8")
            _keep_counts(made / _COUNTS, tallies)
    terminal().print(_table(tallies))
    return 0


def refuse_without_effect(asked: Parsed[TranscriptsConfig]) -> None:
    """Reject options that are given but have no effect.

    Raises:
        ConfigError: there is one.
    """
    usual = TranscriptsConfig(from_tasks=(QUICKSTART,))
    if not asked.config.from_tasks:
        refuse_unread(asked, usual, _OF_TASKS, "it has no effect without --from-tasks; leave it out")
    if not asked.config.from_doctests:
        refuse_unread(asked, usual, _OF_DOCTESTS, "it has no effect without --from-doctests; leave it out")


async def _package(
    config: TranscriptsConfig,
    recipe: Recipe,
    package: str,
    specimens: Sequence[Specimen],
    tallies: dict[str, Tally],
    out: Path,
) -> None:
    # The top-level package is imported once before its consoles start. The standard library is no single package.
    imported = (package.replace("-", "_").partition(".")[0],) if config.preload and package != STDLIB else ()
    tally = Tally()
    async with _sandbox(config, imported) as sandbox:
        made = await _collect(verified(specimens, sandbox, recipe, tally), tally, _TOLD_EVERY)
    _write(config, out, len(tallies), made)
    tallies[package] = tally


async def _demonstrations(config: TranscriptsConfig, renderer: Renderer, tallies: dict[str, Tally], out: Path) -> None:
    families = tuple(family for source in config.from_tasks for family in families_of(source))
    course = Course(families, MIXES[config.mix], config.count, config.seed, config.protocol, config.prompt)
    tally = Tally()
    async with _sandbox(config) as sandbox:
        demonstrated = demonstrations(course, sandbox, renderer, tally, config.concurrency)
        made = await _collect(demonstrated, tally, config.count // 10 or 1)
    # A demonstration of a task cannot be cut, so one that is too long is dropped.
    fitting = [t for t in made if len(t.prompt.token_ids) + len(t.completion_ids) <= config.max_tokens]
    tally.whole = len(fitting)
    if len(fitting) < len(made):
        tally.dropped["is too long"] = len(made) - len(fitting)
    _write(config, out, len(tallies), fitting)
    tallies[" ".join(config.from_tasks)] = tally


async def _collect(made: AsyncIterator[Trajectory], tally: Tally, told_every: int) -> Sequence[Trajectory]:
    """Collect the trajectories of a source, and print the progress."""
    kept: list[Trajectory] = []
    async for trajectory in made:
        kept.append(trajectory)
        if len(kept) % told_every == 0:
            print(f"  {len(kept)} kept, {tally.dropped.total()} dropped", flush=True)
    return kept


def _sandbox(config: TranscriptsConfig, preload: Sequence[str] = ()) -> AbstractAsyncContextManager[Sandbox]:
    return PLACES.chosen(config.sandbox).open(Births(config.limits, preload, config.concurrency))


def _write(config: TranscriptsConfig, out: Path, number: int, made: Sequence[Trajectory]) -> None:
    with writing("output folder", config.out, then=", then give the command again"):
        (out / "trajectories").mkdir(exist_ok=True)
        append(out / "trajectories" / f"{number:06d}.jsonl.gz", made)


def _keep_counts(path: Path, tallies: dict[str, Tally]) -> None:
    total = sum(tally.kept for tally in tallies.values())
    record = {"kept": total, "packages": {name: tally.as_record() for name, tally in tallies.items()}}
    path.write_text(json.dumps(record, indent=2) + "\n")


def _table(tallies: dict[str, Tally]) -> Table:
    table = Table("source", "what became of it", "trajectories", title="executed and checked")
    for package, tally in tallies.items():
        table.add_row(package, "kept whole", str(tally.whole))
        for reason, count in tally.cut.most_common():
            table.add_row("", f"kept up to where it {reason}", str(count))
        for reason, count in tally.dropped.most_common():
            table.add_row("", f"dropped: {reason}", str(count))
    table.add_section()
    table.add_row("all", "kept", str(sum(tally.kept for tally in tallies.values())))
    return table
