"""Migration of the settings in `config.toml` of a run by an older version."""

import logging
import re
from collections.abc import Mapping, Sequence

from repl_rl.deprecations import rename_keys
from repl_rl.old_names import OLD_SETTINGS, OLD_TYPES

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


def rename_recorded(said: Mapping[str, object]) -> dict[str, object]:
    """Return recorded settings, nested or dotted, under the names of this version, without a warning.

    Raises:
        ConfigError: a setting has both its old name and its new one.
    """
    return _rename_texts(rename_keys(said, OLD_SETTINGS, "config.toml", lambda old, new: None))


def _rename_texts(said: Mapping[str, object]) -> dict[str, object]:
    """Rename components and their options in the texts of settings, so that equal settings compare equal."""
    found: dict[str, object] = {}
    for key, value in said.items():
        if isinstance(value, Mapping):
            found[key] = _rename_texts(value)
        elif isinstance(value, str) and key.rpartition(".")[2] in ("sampler", "group_sampling", "checkpoint"):
            found[key] = _rename_text(value)
        else:
            found[key] = value
    return found


def _rename_text(text: str) -> str:
    name, opened, rest = text.partition("(")
    new = _OPTIONS.get(name, {})
    renamed = re.sub(r"\b(\w+)(?==)", lambda word: new.get(word[1], word[1]), rest) if new else rest
    return f"{OLD_TYPES.get(name, name)}{opened}{renamed}"


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
