"""Defaults that depend on the model. The settings classes hold the defaults of the bundled policy.

Later sources override earlier ones: defaults of the class; defaults of a pretrained model, or the recorded values of a
resumed run; the preset; the settings file; flags.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from repl_rl.engine.config import read_max_context
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.rollout_config import RolloutConfig
from repl_rl.settings.argument_parser import ParsedSettings, flatten, load_toml
from repl_rl.settings.migrate_run_settings import rename_recorded
from repl_rl.settings.model_defaults import (
    ModelDefaultsContext,
    PretrainedDefault,
    format_default,
    get_model_dependent_fields,
)
from repl_rl.utils.hardware import GpuInfo, LocalGpuInfo
from repl_rl.utils.processes import get_rank

T = TypeVar("T")
W = TypeVar("W", bound=RolloutConfig)


@dataclass(frozen=True, slots=True)
class UpdateInfo:
    """Properties of an update that defaults depend on."""

    trains_adapters: bool = False
    """True if LoRA adapters are trained in place of the weights."""
    rows_per_step: int = 1
    """Rollouts or trajectories per optimizer step in this process, >= 1."""
    steps: int = 1
    """Steps of the run, >= 1."""
    samples_with_vllm: bool = False
    """True if vLLM samples on this machine while the run trains."""
    samples_during_update: bool = False
    """True if rollouts run during the update."""


def describe_no_update(config: object) -> UpdateInfo:
    """Return the properties of a command that trains nothing."""
    return UpdateInfo()


def print_line(line: str) -> None:
    """Print a line to standard output at once."""
    print(line, flush=True)


def print_to_stderr(line: str) -> None:
    """Print a line to standard error, for commands whose standard output has another use."""
    print(line, file=sys.stderr, flush=True)


def apply_model_defaults(
    asked: ParsedSettings[W],
    recorded: Path | None = None,
    update: Callable[[W], UpdateInfo] = describe_no_update,
    gpus: GpuInfo | None = None,
    tell: Callable[[str], None] = print_line,
) -> W:
    """Return the settings with the defaults of their model. The model is found, downloaded or converted only once.

    Args:
        asked: the settings from files and flags.
        recorded: config.toml of the resumed run. None, or a missing file, means a new run.
        update: function from the settings to the properties of their update.
        gpus: properties of the GPU that this process trains on. None detects the GPU of this machine.
        tell: callback for messages about the applied defaults, and about files that were written for another model.

    Raises:
        ConfigError: the model is not available, its tokenizer cannot be read, or the defaults conflict with the
            settings.
    """
    return apply_defaults(asked, asked.config, recorded, update, gpus, tell).with_policy_of(asked.config)


def apply_defaults(
    asked: ParsedSettings[T],
    rollout_config: RolloutConfig,
    recorded: Path | None = None,
    update: Callable[[T], UpdateInfo] = describe_no_update,
    gpus: GpuInfo | None = None,
    tell: Callable[[str], None] = print_line,
) -> T:
    """Apply the policy's defaults to settings other than `RolloutConfig`. See `apply_model_defaults`."""
    if rollout_config.is_bundled_kind:
        return asked.config
    folder, model = rollout_config.model_folder, rollout_config.model
    log = tell if get_rank() == 0 else lambda line: None
    own = gpus or LocalGpuInfo()
    # Tokens with text after a newline do not matter here, so use the option that accepts every vocabulary.
    template = cache(lambda: Renderer.from_folder(folder, "carry").chat_template.exists)
    context = partial(_read_model_context, folder)

    def describe(config: T) -> ModelDefaultsContext:
        info = update(config)
        shares_gpu = info.samples_with_vllm and own.exists()
        sizes = (info.trains_adapters, info.rows_per_step, info.steps, shares_gpu, info.samples_during_update)
        return ModelDefaultsContext(template, context, own.exists, own.supports_bfloat16, *sizes)

    facts = describe(asked.config)
    defaults = get_model_dependent_fields(type(asked.config))
    unsaid = {name: default for name, default in defaults.items() if name not in asked.explicit_names}
    # A resumed run keeps its recorded values, even if the defaults of the model have changed since.
    if recorded is not None and recorded.is_file():
        there = rename_recorded(dict(flatten(load_toml(recorded))))
        values = {name: there[name] for name in unsaid if name in there}
        source = f"settings of {recorded}, which is resumed"
    else:
        # Sizes first: other defaults depend on them.
        sizes = {name: default for name, default in unsaid.items() if not default.depends_on_sizes}
        facts = describe(asked.with_defaults(_compute_default_values(sizes, facts)))
        values = _compute_default_values(unsaid, facts)
        source = f"defaults for a pretrained model ({model})"
    if values:
        listed = ", ".join(f"{name} {format_default(value)}" for name, value in values.items())
        log(f"{source}: {listed}; flags and files win")
    for line in _warn_about_other_models(asked, model, defaults, facts):
        log(line)
    return asked.with_defaults(values)


def _read_model_context(folder: Path) -> int | None:
    """Return the maximum context length that config.json states, tokens. None means that it is unknown."""
    # An unreadable file is no error here, because the engine reports it later.
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return read_max_context(config)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _compute_default_values(
    defaults: Mapping[str, PretrainedDefault], facts: ModelDefaultsContext
) -> dict[str, object]:
    """Return the defaults for this model. One that is None stays that of the class, and is left out."""
    values = {name: default.compute(facts) for name, default in defaults.items()}
    return {name: value for name, value in values.items() if value is not None}


def _warn_about_other_models(
    asked: ParsedSettings[T], model: str, defaults: Mapping[str, PretrainedDefault], facts: ModelDefaultsContext
) -> Iterator[str]:
    """Yield a line per file that names another model, with its settings that override defaults of this model."""
    for file, said in asked.files:
        other = said.get("model")
        if other is None or other == model:
            continue
        theirs = {name: default for name, default in defaults.items() if name in said and name not in asked.flags}
        if differing := _find_differing_settings(said, _compute_default_values(theirs, facts)):
            yield f"settings of {file}, written for model {other}, apply to {model}: {', '.join(differing)}"


def _find_differing_settings(said: Mapping[str, object], values: Mapping[str, object]) -> Sequence[str]:
    """Return a phrase per setting of a file that differs from the default for this model."""
    return [
        f"{name} {format_default(said[name])} (default {format_default(value)})"
        for name, value in values.items()
        if said[name] != value
    ]
