"""Migration of the settings in `config.toml` of a run by an older version."""

import logging
import re
from collections.abc import Mapping, Sequence

from repl_rl.deprecations import rename_keys
from repl_rl.deprecations.old_names import OLD_SETTINGS, OLD_TYPES
from repl_rl.errors import ConfigError
from repl_rl.settings.component_options import can_be_table, convert_table_to_text, format_inline_table
from repl_rl.settings.component_registry import NameWithOptions
from repl_rl.settings.function_tables import (
    OptionTable,
    WeightTable,
    expand_function_tables,
    read_option_table,
    read_weight_table,
    split_names,
)

_VLLM_FIELDS = ("kv_cache_gib", "block_size", "threads", "drive", "sleep")
_MOVED = {
    "engine_options.context_tokens": "context_tokens",
    "engine_options.dtype": "dtype",
    **{f"engine_options.{name}": f"vllm.{name}" for name in _VLLM_FIELDS},
}
"""Old dotted name -> present dotted name."""
_REMOVED: Mapping[str, object] = {
    "engine_options.seed": 0,
    "engine_options.max_sessions": 256,
    "engine_options.verbose": False,
    "rollout.optimistic": False,
    "limits.open_files": 64,
    "limits.inodes": 4096,
    "docker.cpus": 2.0,
    "docker.processes": 2048,
    "trainer.max_grad_norm": 1.0,
    "trainer.clip_low": 0.2,
    "trainer.clip_high": 0.28,
    "trainer.seed": 0,
    "trainer.rewards.incomplete": 0.0,
    "trainer.rewards.exited": 0.0,
}
"""Settings that no longer exist, with their former defaults."""
ADDED: Mapping[str, object] = {"add_bos_token": False, "date": "", "prompt_space": "observed"}
"""Settings that older versions did not record, with the values that describe what those versions did."""
_OPTIMISTIC = re.compile(r"(?<=\()optimistic=(True|False)(, )?|, optimistic=(True|False)")
"""Option of `sampler = "repl(optimistic=True)"` in version 0.2. It changed only the speed, so it is dropped."""
_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "repl": {"give_up_after": "max_error_streak"},
    "refill": {"most": "max_rounds"},
    "window": {"share": "in_flight_share"},
    "within": {"seconds": "every_s", "keep": "keep_last", "share": "max_time_share"},
}
"""Old name of a component to the new names of its options, which are numbers."""
COMPONENTS = frozenset(
    {
        *("sampler", "workers", "checkpoint"),
        *("trainer.optimizer", "trainer.lr_scheduler", "trainer.loss", "trainer.kl", "trainer.importance_sampling"),
        *("trainer.group_sampling", "trainer.estimator"),
    }
)
"""Settings of a run that hold a component with options."""
_FUNCTION_TABLES: Mapping[str, object] = {
    "judges": WeightTable,
    "group_judges": WeightTable,
    "host_functions": OptionTable,
    "trainer.line_rewards": WeightTable,
    "trainer.potentials": WeightTable,
}
"""Settings of a run that name functions, with the type of their table. Older versions recorded them as texts."""
_log = logging.getLogger(__name__)


def modern(said: Mapping[str, object]) -> dict[str, object]:
    """Return the recorded settings of a run in the form of this version.

    Settings that no longer exist are left out. A warning is logged for each that was not at its default.
    """
    # Copy the tables that change, so that the input stays as it is.
    tables: dict[str, dict[str, object]] = {}
    found: dict[str, object] = {}
    for key, value in said.items():
        if isinstance(value, Mapping) and key in ("engine_options", "limits", "docker", "rollout", "trainer", "vllm"):
            tables[key] = dict(value)
        else:
            found[key] = value
    # Move settings to their present tables, or to the top level.
    for old, new in _MOVED.items():
        table, _, name = old.partition(".")
        if name in tables.get(table, {}):
            place, _, field = new.rpartition(".")
            (tables.setdefault(place, {}) if place else found)[field] = tables[table].pop(name)
    # Drop settings that no longer exist.
    for key, default in _REMOVED.items():
        value = _pop_setting(tables, key.split("."), default)
        if value != default:
            _log.warning("%s = %r was recorded, which this version cannot choose; it is left out", key, value)
    # Settings that became options of a name go into its parentheses.
    _fold_importance_options(tables.get("trainer", {}))
    give_up_after = tables.get("rollout", {}).pop("give_up_after", 0)
    if give_up_after and found.get("sampler", "repl") == "repl":
        found["sampler"] = f"repl(max_error_streak={give_up_after!r})"
    if isinstance(sampler := found.get("sampler"), str):
        found["sampler"] = _OPTIMISTIC.sub("", sampler).removesuffix("()")
    # Older versions also wrote the tables of engines and sandboxes that were not chosen. They hold defaults only.
    for seam, kind in (("engine", "vllm"), ("sandbox", "docker")):
        if found.get(seam, kind) != kind:
            tables.pop(kind, None)
    tables.pop("engine_options", None)
    return rename_recorded({**found, **{name: table for name, table in tables.items() if table}})


_FORMER_DEFAULTS = {"within(every_s=60, keep_last=2)": "within"}
"""Components that older versions recorded with the values of options that are their defaults."""


def rename_recorded(said: Mapping[str, object]) -> dict[str, object]:
    """Return recorded settings, nested or dotted, under the names of this version, without a warning.

    A component is a text in the result, whether the run recorded a text or a table. Functions with weights or options
    are tables in the result, and empty ones are left out, as this version records them.

    Raises:
        ConfigError: a setting has both its old name and its new one, or a text of an older version cannot be read.
    """
    renamed = rename_keys(said, OLD_SETTINGS, "config.toml", lambda old, new: None)
    # Older versions recorded the modules as one text.
    if isinstance(renamed.get("preload"), str):
        renamed["preload"] = [*split_names(str(renamed["preload"]))]
    is_dotted = any("." in key for key in renamed)
    return _convert_components(_convert_function_texts(renamed, is_dotted))


def get_judge_order(settings: Mapping[str, object]) -> list[str]:
    """Return the names of the judges in recorded settings, nested or dotted. The first decides if a task is solved."""
    table = settings.get("judges")
    dotted = [key.removeprefix("judges.") for key in settings if key.startswith("judges.")]
    return [str(name) for name in table] if isinstance(table, Mapping) else dotted


def format_component(name: str, value: object) -> str | None:
    """Return a recorded component with options as a TOML table on one line, or None for any other setting."""
    if name not in COMPONENTS or not isinstance(value, str):
        return None
    try:
        named = NameWithOptions.parse(name, value)
    except ConfigError:
        return None
    return format_inline_table(named) if can_be_table(named) else None


def _convert_function_texts(said: Mapping[str, object], is_dotted: bool, prefix: str = "") -> dict[str, object]:
    """Return settings, nested or dotted, with each text that names functions as a table."""
    found: dict[str, object] = {}
    for key, value in said.items():
        hint = _FUNCTION_TABLES.get(prefix + key)
        if isinstance(value, Mapping):
            # A table of functions stays as it is.
            found[key] = value if hint else _convert_function_texts(value, is_dotted, f"{prefix}{key}.")
            continue
        if hint is None:
            found[key] = value
            continue
        pairs = expand_function_tables([(key, value)], {key: hint}, silent=True)
        if is_dotted:
            found |= dict(pairs)
        elif pairs:
            read = read_weight_table if hint == WeightTable else read_option_table
            table = read(prefix + key, value, silent=True)
            # As in a file, true means a function without options.
            found[key] = {name: True if each == {} else each for name, each in table.items()}
    return found


def _convert_components(said: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return settings, nested or dotted, with each component as one text, so that equal settings compare equal."""
    found: dict[str, object] = {}
    tables: dict[str, dict[str, object]] = {}
    for key, value in said.items():
        dotted = prefix + key
        owner = next((name for name in COMPONENTS if dotted.startswith(f"{name}.")), None)
        if owner is not None:
            tables.setdefault(owner, {})[dotted.removeprefix(f"{owner}.")] = value
        elif dotted in COMPONENTS and isinstance(value, Mapping):
            tables[dotted] = dict(value)
        elif dotted in COMPONENTS and isinstance(value, str):
            found[key] = _convert_text(value)
        else:
            found[key] = _convert_components(value, f"{dotted}.") if isinstance(value, Mapping) else value
    # A table that no version writes stays as it is, so that its reader refuses it.
    return found | {name.removeprefix(prefix): convert_table_to_text(table) or table for name, table in tables.items()}


def _convert_text(text: str) -> str:
    """Return the text of a component under the present names, in the form that `NameWithOptions` writes."""
    try:
        named = NameWithOptions.parse("", text)
    except ConfigError:
        # The reader of the setting refuses it, and names it.
        return text
    new = _OPTIONS.get(named.name, {})
    options = {new.get(key, key): value for key, value in named.options.items()}
    converted = str(NameWithOptions(OLD_TYPES.get(named.name, named.name), options))
    return _FORMER_DEFAULTS.get(converted, converted)


def _pop_setting(tables: dict[str, dict[str, object]], path: Sequence[str], default: object) -> object:
    """Remove the setting at `path` from `tables` and return its value, or `default` if it is missing."""
    table, *inner, name = path
    place = tables.get(table, {})
    for part in inner:
        found = place.get(part)
        if not isinstance(found, Mapping):
            return default
        # Copy the inner table, which still belongs to the caller.
        place[part] = place = dict(found)
    return place.pop(name, default)


def _fold_importance_options(trainer: dict[str, object]) -> None:
    """Move the former settings for cap and tolerance into the options of `importance`."""
    options = {"cap": trainer.pop("importance_cap", 2.0), "tolerance": trainer.pop("logprob_tolerance", None)}
    defaults = {"cap": 2.0, "tolerance": None}
    said = ", ".join(f"{name}={value!r}" for name, value in options.items() if value != defaults[name])
    if said:
        trainer["importance"] = f"{trainer.get('importance', 'token_truncate')}({said})"
