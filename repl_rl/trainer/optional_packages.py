"""Optional packages that training settings need, checked without an import."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from repl_rl.errors import ConfigError

SINKS = ("tensorboard", "trackio", "wandb")


def require_peft(rank: int, find_package: Callable[[str], object] = find_spec) -> None:
    """Check that PEFT, which adapters need, is installed.

    Raises:
        ConfigError: PEFT is not installed.
    """
    if find_package("peft") is None:
        raise ConfigError("lora_rank", rank, "it needs the package peft: pip install 'repl_rl[lora]', or set it to 0")


def require_sinks(names: Sequence[str], find_package: Callable[[str], object] = find_spec) -> None:
    """Check that trackers are available; `find_package` looks up a package, and returns None if it is not installed.

    Raises:
        ConfigError: a tracker is not known or not installed.
    """
    for name in names:
        if name not in SINKS:
            raise ConfigError("report_to", name, f"choose among {', '.join(SINKS)}")
        if find_package(name) is None:
            raise ConfigError("report_to", name, f"it is not installed: pip install {name}")
