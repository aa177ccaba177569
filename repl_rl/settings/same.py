"""May this command go on with that run? Its settings decide what comes next, so they must be the run's own."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.settings.legacy import ADDED
from repl_rl.settings.toml import flatten, load

FREE = frozenset({"name", "out", "overwrite", "resume", "states", "fleet", "trainer.save_every", "trainer.report_to"})
"""Settings that decide nothing about what is learned."""
STEPS = "trainer.steps"
"""May grow."""


def check_same_settings(run: Path, config_toml: str) -> None:
    """Refuse to go on with the run in `run` under other settings than its own.

    Raises:
        ConfigError: some differ; it names each.
    """
    told = _differences(run / "config.toml", config_toml)
    if told:
        remedy = "give the run's own (--config RUN/config.toml has them), or another --name; only steps may grow"
        raise ConfigError("settings", "; ".join(told), remedy)


def _differences(kept: Path, config_toml: str) -> list[str]:
    """Describe each setting that differs between the file `kept` and ours; `FREE` may differ, `STEPS` may be more."""
    ours: Mapping[str, object] = dict(flatten(tomllib.loads(config_toml)))
    theirs = {**ADDED, **dict(flatten(load(kept)))}
    theirs = {name: value for name, value in theirs.items() if name in ours or name not in ADDED}
    return [
        f"{name} is {_said(ours, name)}, the run's {_said(theirs, name)}"
        for name in sorted({*ours, *theirs} - FREE)
        if ours.get(name) != theirs.get(name) and not (name == STEPS and _grew(theirs.get(name), ours.get(name)))
    ]


def _grew(before: object, now: object) -> bool:
    return isinstance(before, int) and isinstance(now, int) and now > before


def _said(settings: Mapping[str, object], name: str) -> str:
    return repr(settings[name]) if name in settings else "left out"
