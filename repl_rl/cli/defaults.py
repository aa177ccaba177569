"""Defaults that follow the model: the bundled policy's stand in the settings, and any other model has its own.

The order, the later wins: defaults of the class; those of a pretrained model, or the recorded ones of a resumed run;
the preset; the file; flags.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from repl_rl.engine.options import longest_context
from repl_rl.machine.gpus import Gpus, OwnGpus
from repl_rl.machine.launched import rank
from repl_rl.rollout.renderer import Renderer
from repl_rl.settings.arguments import Parsed
from repl_rl.settings.pretrained import Facts, Pretrained, following, format_default
from repl_rl.settings.toml import flatten, load
from repl_rl.world import World

T = TypeVar("T")
W = TypeVar("W", bound=World)


@dataclass(frozen=True, slots=True)
class Update:
    """The parts of an update that defaults depend on."""

    adapters: bool = False
    """Low-rank adapters, in place of the weights."""
    rows: int = 1
    """Rollouts or trajectories of an optimizer step in this process, >= 1."""


NOTHING = Update()
"""Of a verb that trains nothing."""


def print_line(line: str) -> None:
    """Print a line for the person who started the verb."""
    print(line, flush=True)


def print_to_stderr(line: str) -> None:
    """Print it where standard output is for something else."""
    print(line, file=sys.stderr, flush=True)


def apply_model_defaults(
    asked: Parsed[W],
    recorded: Path | None = None,
    update: Update = NOTHING,
    gpus: Gpus | None = None,
    tell: Callable[[str], None] = print_line,
) -> W:
    """The settings with the defaults of their model. The model is looked for, downloaded or made once.

    Args:
        asked: what files and flags say.
        recorded: config.toml of the run that is resumed; None, or no such file: a new run.
        update: what is trained.
        gpus: the GPU that this process trains on; None: that of this machine.
        tell: given a line about the defaults, where there are other than those of the settings.

    Raises:
        ConfigError: the model cannot be had, its tokenizer cannot be read, or the defaults do not fit what is said.
    """
    return follow(asked, asked.config, recorded, update, gpus, tell).with_policy_of(asked.config)


def follow(
    asked: Parsed[T],
    world: World,
    recorded: Path | None = None,
    update: Update = NOTHING,
    gpus: Gpus | None = None,
    tell: Callable[[str], None] = print_line,
) -> T:
    """`apply_model_defaults` for settings that are no world; their policy is that of `world`."""
    if world.is_bundled_kind:
        return asked.config
    folder, model = world.model_folder, world.model
    log = tell if rank() == 0 else lambda line: None
    own = gpus or OwnGpus()
    # What to do with text after a newline does not matter here, so no vocabulary is refused.
    template = cache(lambda: Renderer.from_folder(folder, "carry").chat.there)
    context = partial(_own_context, folder)
    facts = Facts(template, context, own.there, own.bfloat16, update.adapters, update.rows)
    defaults = following(type(asked.config))
    unsaid = {name: default for name, default in defaults.items() if name not in asked.explicit_names}
    if recorded is not None and recorded.is_file():
        there = dict(flatten(load(recorded)))
        values = {name: there[name] for name in unsaid if name in there}
        source = f"settings of {recorded}, which goes on"
    else:
        values = _values(unsaid, facts)
        source = f"defaults for a pretrained model ({model})"
    if values:
        listed = ", ".join(f"{name} {format_default(value)}" for name, value in values.items())
        log(f"{source}: {listed}; flags and files win")
    for line in _of_other_models(asked, model, defaults, facts):
        log(line)
    return asked.over(values)


def _own_context(folder: Path) -> int | None:
    """Read the longest sequence from config.json, tokens. None: not stated, or unreadable, which the engine refuses."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return longest_context(config)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _values(defaults: Mapping[str, Pretrained], facts: Facts) -> dict[str, object]:
    values = {name: default.value(facts) for name, default in defaults.items()}
    return {name: value for name, value in values.items() if value is not None}


def _of_other_models(asked: Parsed[T], model: str, defaults: Mapping[str, Pretrained], facts: Facts) -> Iterator[str]:
    """A line for each file that was written for another model, with those of its settings that hold for this one."""
    for file, said in asked.files:
        other = said.get("model")
        if other is None or other == model:
            continue
        theirs = {name: default for name, default in defaults.items() if name in said and name not in asked.flags}
        if differing := _differing(said, _values(theirs, facts)):
            yield f"settings of {file}, which says model {other}, hold for {model}: {', '.join(differing)}"


def _differing(said: Mapping[str, object], values: Mapping[str, object]) -> Sequence[str]:
    return [
        f"{name} {format_default(said[name])} (default {format_default(value)})"
        for name, value in values.items()
        if said[name] != value
    ]
