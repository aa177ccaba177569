"""docs/options.md gives a reason for each option of `repl-rl train`, and for each shipped component of a setting."""

import re
from dataclasses import fields, is_dataclass

import pytest

from repl_rl.cli.train import TrainConfig
from repl_rl.credit.advantage_estimators import ESTIMATORS
from repl_rl.deprecations.removed_settings import REMOVED_TYPES
from repl_rl.trainer.config import GROUP_SAMPLING_TYPES, IMPORTANCES, KLS, LOSSES, OPTIMIZERS, TrainerConfig
from tests.support.documents import PAGES

NAMED = set(re.findall(r"`\"?([\w.*]+)\"?`", PAGES["docs/options.md"]))
"""Words that the page sets as code."""


def names(table: type, prefix: str = "") -> list[str]:
    """Return the settings of a table; those of a table within it as `table.*`."""
    assert is_dataclass(table)
    return [prefix + field.name for field in fields(table)]


def explained(name: str) -> bool:
    return name in NAMED or f"{name}.*" in NAMED


@pytest.mark.parametrize(
    "name", [*(name for name in names(TrainConfig) if name != "trainer"), *names(TrainerConfig), "vllm", "docker"]
)
def test_each_setting_has_a_reason(name: str) -> None:
    stops = {"stops": "stops.mask"}
    assert explained(stops.get(name, name)), f"docs/options.md gives no reason for {name}"


@pytest.mark.parametrize("name", [*ESTIMATORS, *LOSSES, *KLS, *GROUP_SAMPLING_TYPES, *OPTIMIZERS, *IMPORTANCES])
def test_each_component_has_a_reason(name: str) -> None:
    default = "adamw_torch"  # every optimizer of this name is the same
    assert explained(name) or name.startswith(default), f"docs/options.md gives no reason for {name}"


def test_a_removed_component_is_not_in_the_page() -> None:
    assert NAMED.isdisjoint(REMOVED_TYPES)
