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

from repl_rl.cli.apply_model_defaults import apply_defaults
from repl_rl.cli.terminal_output import make_terminal
from repl_rl.cli.unused_options import refuse_unread
from repl_rl.errors import ConfigError
from repl_rl.rollout.chat_template import parse_date
from repl_rl.rollout.prompts import load_template
from repl_rl.rollout.token_renderer import Overshoot, PromptSpace, Renderer
from repl_rl.rollout_config import QUICKSTART, RolloutConfig, resolve_date, resolve_prompt_space
from repl_rl.runs.store import append_records
from repl_rl.sandbox import SANDBOXES, Limits, Sandbox, SandboxConfig, SandboxOptions
from repl_rl.sandbox.inprocess import InProcess
from repl_rl.settings.argument_parser import ParsedSettings, dump_toml, parse_with_sources
from repl_rl.settings.component_registry import Registry
from repl_rl.settings.help_pages import COMMON
from repl_rl.settings.model_defaults import CONTEXT, PROMPT
from repl_rl.settings.toml_values import Scalar
from repl_rl.settings.value_bounds import AtLeast, check_fields
from repl_rl.sft.demonstrations import MIXES, DemonstrationSpec, generate_demonstrations
from repl_rl.sft.demonstrations_from_doctests import (
    STDLIB,
    DemonstrationCounts,
    DocstringTest,
    DoctestRecipe,
    generate_verified_doctests,
    iterate_doctests,
)
from repl_rl.tasks import get_families
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.atomic_files import OutputFolder, open_output_folder
from repl_rl.utils.describe_os_errors import catch_os_errors

_PROGRESS_EVERY = 250
"""Number of kept doctests between two lines of progress."""
_TASK_SETTINGS = ("mix", "protocol", "count", "seed")
"""Settings that only demonstrations of built-in tasks read."""
_DOCTEST_SETTINGS = ("max_lines", "preload")
"""Settings that only doctests read."""
_CONFIG_FILE, _COUNTS_FILE = "config.toml", "transcripts.json"
TRANSCRIPTS = OutputFolder(
    "transcripts",
    "output folder",
    ("trajectories", _COUNTS_FILE, _CONFIG_FILE),
    lambda folder: all((folder / name).exists() for name in ("trajectories", _COUNTS_FILE, _CONFIG_FILE)),
)
"""Output type of a transcripts folder: its file names, and the test that recognizes one of version 0.2."""
PLACES: Registry[SandboxConfig] = Registry("sandbox", {**SANDBOXES.entries, InProcess.kind: InProcess})
"""Sandboxes that this command accepts: all registered ones, and inprocess (consoles in this process)."""


@dataclass(frozen=True)
class TranscriptsConfig:
    """Make and execute trajectories to learn from: doctests of installed packages, or plans of built-in tasks."""

    from_doctests: Annotated[tuple[str, ...], COMMON] = ()
    """Packages, or parts of one such as sympy.core. stdlib is the standard library. Examples with the documented output
    are kept."""
    from_tasks: Annotated[tuple[str, ...], COMMON] = ()
    """Built-in tasks, such as builtin:quickstart. Only questions of their training part are demonstrated."""
    mix: Annotated[Literal["clean", "warm", "cold"], COMMON] = "clean"
    """Mix of demonstrations of built-in tasks. clean: all are correct. warm: 45 % are guesses, mistakes (followed by a
    recovery or by giving up), or unexpected results. cold: 81 % are of these three kinds."""
    protocol: Annotated[Literal["line", "fenced"], COMMON] = "line"
    """Sampler that built-in tasks demonstrate: line (repl, line by line) or fenced (blocks of code)."""
    count: Annotated[int, AtLeast(1), COMMON] = 1000
    """Demonstrations of built-in tasks, >= 1. Families alternate."""
    seed: Annotated[int, AtLeast(0), COMMON] = 0
    """Seed of the built-in tasks and their demonstrations, >= 0."""
    model: Annotated[str, COMMON] = QUICKSTART
    """Policy that will learn from them, as in `train`. Its tokenizer is used."""
    out: Annotated[Path, COMMON] = Path("transcripts")
    """New folder to write: trajectories/ (one file per package), transcripts.json (counts and reasons), config.toml."""
    overwrite: Annotated[bool, COMMON] = False
    """Replace older transcripts that this command made. Anything else is refused."""
    prompt: Annotated[str, PROMPT, COMMON] = "bare"
    """Prompt template that the policy is trained with: bare, base, few_shot, chat, chat_few_shot, or a text file."""
    chat_template_kwargs: Mapping[str, Scalar] = field(default_factory=dict)
    """Arguments of the model's chat template, such as enable_thinking. One that it does not read is refused."""
    add_bos_token: bool = True
    """Begin plain prompts with the first token that the model's own tokenizer writes (BOS), if it writes one."""
    prompt_space: PromptSpace = "auto"
    """Source of the space after a console prompt, as in `train`: observed (the console writes it), sampled (the policy
    samples it), or auto (by the vocabulary)."""
    date: str = ""
    """Date and time that the model's chat template writes, as in `train`. "" means the start of this command."""
    newline_tokens: Overshoot = "forbid"
    """Treatment of tokens with text after a newline: forbid (probability 0 in sampler and trainer alike), carry that
    text into the next line, or refuse a vocabulary that has them."""
    max_tokens: Annotated[int, AtLeast(64), CONTEXT, COMMON] = 1024
    """Longest trajectory, prompt included, tokens, >= 64. A longer doctest is cut between two statements, and a longer
    demonstration of a built-in task is dropped."""
    max_lines: Annotated[int, AtLeast(1), COMMON] = 32
    """Maximum number of lines of one doctest's trajectory, >= 1."""
    sandbox: Annotated[SandboxConfig | str, PLACES, COMMON] = "local"
    """Sandbox that executes them. inprocess is only for built-in tasks, whose lines are our own."""
    concurrency: Annotated[int, AtLeast(1), COMMON] = 8
    """Concurrent consoles, >= 1."""
    preload: bool = True
    """Import each package once before its consoles start, instead of in every one of them."""
    limits: Limits = field(default_factory=lambda: Limits(memory_mb=1024))

    def __post_init__(self) -> None:
        if not self.from_doctests and not self.from_tasks:
            remedy = f"name packages, such as --from-doctests sympy {STDLIB}, or --from-tasks {QUICKSTART}"
            raise ConfigError("from_doctests", (), remedy)
        if self.from_doctests and isinstance(PLACES.resolve(self.sandbox), InProcess):
            raise ConfigError("sandbox", InProcess.kind, "a doctest is foreign code; use local, or docker")
        for source in self.from_tasks:
            get_families(source)
        check_fields(self)
        if self.date:
            parse_date(self.date)
        object.__setattr__(self, "prompt", load_template(self.prompt))


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    asked = parse_with_sources(TranscriptsConfig, "transcripts", argv)
    refuse_without_effect(asked)
    rollout_config = RolloutConfig(model=asked.config.model)
    folder = rollout_config.model_folder
    config = apply_defaults(asked, rollout_config)
    # Resolve what depends on the model or the clock, so that the recorded settings reproduce the transcripts.
    date = resolve_date(config.date, folder, None)
    space = resolve_prompt_space(config.prompt_space, folder, None)
    config = replace(config, date=date, prompt_space=space)
    now = parse_date(config.date) if config.date else None
    renderer = Renderer.from_folder(
        folder,
        config.newline_tokens,
        config.chat_template_kwargs,
        bos=config.add_bos_token,
        prompt_space=config.prompt_space,
        now=now,
    )
    recipe = DoctestRecipe(renderer, config.prompt, config.max_tokens, config.max_lines, config.concurrency)
    # Write a prompt now, so that a template that does not fit is found before anything runs.
    renderer.build_prompt("", config.prompt)
    if config.chat_template_kwargs and not renderer.chat_template.was_applied:
        raise ConfigError(
            "chat_template_kwargs",
            dict(config.chat_template_kwargs),
            f"no chat template is in --prompt {config.prompt}; leave it out",
        )
    # transformers warns of texts beyond the policy's context. Such texts are cut or dropped here.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    harvests = {package: list(iterate_doctests(package)) for package in config.from_doctests}
    tallies: dict[str, DemonstrationCounts] = {}
    with open_output_folder(config.out, TRANSCRIPTS, config.overwrite) as made:
        for package, specimens in harvests.items():
            print(f"{package}: {len(specimens)} doctests to execute ...", flush=True)
            asyncio.run(_execute_package(config, recipe, package, specimens, tallies, made))
        if config.from_tasks:
            print(f"{' '.join(config.from_tasks)}: {config.count} demonstrations to execute ...", flush=True)
            asyncio.run(_execute_demonstrations(config, renderer, tallies, made))
        with catch_os_errors("output folder", config.out, then=", then give the command again"):
            (made / _CONFIG_FILE).write_text(dump_toml(config), encoding="utf-8")
            _write_counts(made / _COUNTS_FILE, tallies)
    make_terminal().print(_build_table(tallies))
    return 0


def refuse_without_effect(asked: ParsedSettings[TranscriptsConfig]) -> None:
    """Reject options that are given but have no effect.

    Raises:
        ConfigError: there is one.
    """
    usual = TranscriptsConfig(from_tasks=(QUICKSTART,))
    if not asked.config.from_tasks:
        refuse_unread(asked, usual, _TASK_SETTINGS, "it has no effect without --from-tasks; leave it out")
    if not asked.config.from_doctests:
        refuse_unread(asked, usual, _DOCTEST_SETTINGS, "it has no effect without --from-doctests; leave it out")


async def _execute_package(
    config: TranscriptsConfig,
    recipe: DoctestRecipe,
    package: str,
    specimens: Sequence[DocstringTest],
    tallies: dict[str, DemonstrationCounts],
    out: Path,
) -> None:
    # The top-level package is imported once before its consoles start. The standard library is no single package.
    imported = (package.replace("-", "_").partition(".")[0],) if config.preload and package != STDLIB else ()
    tally = DemonstrationCounts()
    async with _open_chosen_sandbox(config, imported) as sandbox:
        made = await _collect(generate_verified_doctests(specimens, sandbox, recipe, tally), tally, _PROGRESS_EVERY)
    _write_trajectories(config, out, len(tallies), made)
    tallies[package] = tally


async def _execute_demonstrations(
    config: TranscriptsConfig, renderer: Renderer, tallies: dict[str, DemonstrationCounts], out: Path
) -> None:
    families = tuple(family for source in config.from_tasks for family in get_families(source))
    course = DemonstrationSpec(families, MIXES[config.mix], config.count, config.seed, config.protocol, config.prompt)
    tally = DemonstrationCounts()
    async with _open_chosen_sandbox(config) as sandbox:
        demonstrated = generate_demonstrations(course, sandbox, renderer, tally, config.concurrency)
        made = await _collect(demonstrated, tally, config.count // 10 or 1)
    # A demonstration of a task cannot be cut, so one that is too long is dropped.
    fitting = [t for t in made if len(t.prompt.token_ids) + len(t.completion_ids) <= config.max_tokens]
    tally.complete = len(fitting)
    if len(fitting) < len(made):
        tally.rejected["is too long"] = len(made) - len(fitting)
    _write_trajectories(config, out, len(tallies), fitting)
    tallies[" ".join(config.from_tasks)] = tally


async def _collect(
    made: AsyncIterator[Trajectory], tally: DemonstrationCounts, told_every: int
) -> Sequence[Trajectory]:
    """Collect the trajectories of a source, and print the progress."""
    kept: list[Trajectory] = []
    async for trajectory in made:
        kept.append(trajectory)
        if len(kept) % told_every == 0:
            print(f"  {len(kept)} kept, {tally.rejected.total()} dropped", flush=True)
    return kept


def _open_chosen_sandbox(
    config: TranscriptsConfig, preload: Sequence[str] = ()
) -> AbstractAsyncContextManager[Sandbox]:
    return PLACES.resolve(config.sandbox).open(SandboxOptions(config.limits, preload, config.concurrency))


def _write_trajectories(config: TranscriptsConfig, out: Path, number: int, made: Sequence[Trajectory]) -> None:
    with catch_os_errors("output folder", config.out, then=", then give the command again"):
        (out / "trajectories").mkdir(exist_ok=True)
        append_records(out / "trajectories" / f"{number:06d}.jsonl.gz", made)


def _write_counts(path: Path, tallies: dict[str, DemonstrationCounts]) -> None:
    total = sum(tally.accepted_count for tally in tallies.values())
    record = {"kept": total, "packages": {name: tally.to_json() for name, tally in tallies.items()}}
    path.write_text(json.dumps(record, indent=2) + "\n")


def _build_table(tallies: dict[str, DemonstrationCounts]) -> Table:
    table = Table("source", "what became of it", "trajectories", title="executed and checked")
    for package, tally in tallies.items():
        table.add_row(package, "kept whole", str(tally.complete))
        for reason, count in tally.truncated.most_common():
            table.add_row("", f"kept up to where it {reason}", str(count))
        for reason, count in tally.rejected.most_common():
            table.add_row("", f"dropped: {reason}", str(count))
    table.add_section()
    table.add_row("all", "kept", str(sum(tally.accepted_count for tally in tallies.values())))
    return table
