"""Check that a resumed run has the settings of the saved one, which decide all later steps."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.settings.legacy import ADDED
from repl_rl.settings.toml import flatten, load

FREE = frozenset({"name", "out", "overwrite", "resume", "states", "fleet", "trainer.save_every", "trainer.report_to"})
"""Settings that may differ, because they have no influence on the trained policy."""
STEPS = "trainer.steps"
"""Setting that may grow."""


def check_same_settings(run: Path, config_toml: str) -> None:
    """Check that the run in the folder `run` can resume with these settings.

    Raises:
        ConfigError: settings differ; the message names each.
    """
    told = _differences(run / "config.toml", config_toml)
    if told:
        remedy = "give the run's own (--config RUN/config.toml has them), or another --name; only steps may grow"
        raise ConfigError("settings", "; ".join(told), remedy)


def _differences(kept: Path, config_toml: str) -> list[str]:
    """Describe each setting that differs between the file `kept` and ours. `FREE` may differ, `STEPS` may grow."""
    ours: Mapping[str, object] = dict(flatten(tomllib.loads(config_toml)))
    # A setting that the older version did not record counts with the value that describes its behaviour.
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
