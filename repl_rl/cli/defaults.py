"""Defaults that depend on the model: the settings hold those of the bundled policy, and any other model has others.

The order of precedence, the later wins: defaults of the class; those of a pretrained model, or the recorded values of
a resumed run; the preset; the file; flags.
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
    """Properties of an update that defaults depend on."""

    adapters: bool = False
    """True if LoRA adapters are trained in place of the weights."""
    rows: int = 1
    """Rollouts or trajectories per optimizer step in this process, >= 1."""


NOTHING = Update()
"""Value for a command that trains nothing."""


def print_line(line: str) -> None:
    """Print a line to standard output at once."""
    print(line, flush=True)


def print_to_stderr(line: str) -> None:
    """Print a line to standard error, for commands whose standard output has another use."""
    print(line, file=sys.stderr, flush=True)


def apply_model_defaults(
    asked: Parsed[W],
    recorded: Path | None = None,
    update: Update = NOTHING,
    gpus: Gpus | None = None,
    tell: Callable[[str], None] = print_line,
) -> W:
    """Return the settings with the defaults of their model. The model is found, downloaded or converted only once.

    Args:
        asked: the settings from files and flags.
        recorded: config.toml of the resumed run. None, or a missing file, means a new run.
        update: properties of the update.
        gpus: the GPU that this process trains on. None means that of this machine.
        tell: callback for lines about defaults that differ from those of the settings classes.

    Raises:
        ConfigError: the model is not available, its tokenizer cannot be read, or the defaults conflict with the
            settings.
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
    """Apply the defaults of the policy of `world` to settings that are no `World`. See `apply_model_defaults`."""
    if world.is_bundled_kind:
        return asked.config
    folder, model = world.model_folder, world.model
    log = tell if rank() == 0 else lambda line: None
    own = gpus or OwnGpus()
    # Tokens with text after a newline do not matter here, so use the option that accepts every vocabulary.
    template = cache(lambda: Renderer.from_folder(folder, "carry").chat.there)
    context = partial(_own_context, folder)
    facts = Facts(template, context, own.there, own.bfloat16, update.adapters, update.rows)
    defaults = following(type(asked.config))
    unsaid = {name: default for name, default in defaults.items() if name not in asked.explicit_names}
    # A resumed run keeps its recorded values, even if the defaults of the model have changed since.
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
    """Return the longest sequence in config.json, tokens, or None if it is missing."""
    # An unreadable file is no error here, because the engine reports it later.
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return longest_context(config)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _values(defaults: Mapping[str, Pretrained], facts: Facts) -> dict[str, object]:
    values = {name: default.value(facts) for name, default in defaults.items()}
    return {name: value for name, value in values.items() if value is not None}


def _of_other_models(asked: Parsed[T], model: str, defaults: Mapping[str, Pretrained], facts: Facts) -> Iterator[str]:
    """Yield a line per file that names another model, with its settings that override defaults of this model."""
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
