"""Code of the user by name: one way to find it, and to say why it cannot be had, whatever it is for."""

from collections.abc import Callable
from pathlib import Path

import pytest

from repl_rl.credit.advantage_estimators import load_estimator
from repl_rl.credit.rewards import load_line_reward
from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.samplers import load_sampler

USERS: dict[str, Callable[[str], object]] = {
    "sampler": load_sampler,
    "estimator": load_estimator,
    "line reward": load_line_reward,
}


@pytest.mark.parametrize("thing", USERS)
@pytest.mark.parametrize("name", ["nowhere:f", "json:nothing", "json:", ":f"])
def test_what_is_not_there_is_named_with_a_remedy(thing: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{thing} is '{name}'; it cannot be imported: .*; give module:name"):
        USERS[thing](name)


@pytest.mark.parametrize("thing", USERS)
def test_what_a_module_raises_while_it_is_imported_is_its_users(
    thing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_broken_module.py").write_text("1/0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserCodeError, match=f"{thing} their_broken_module:f: importing .* raised ZeroDivisionError"):
        USERS[thing]("their_broken_module:f")


@pytest.mark.parametrize("thing", ["estimator", "line reward"])
def test_what_cannot_be_called_is_no_function(thing: str) -> None:
    with pytest.raises(ConfigError, match=f"{thing} is 'math:pi'; it is not a function"):
        USERS[thing]("math:pi")
