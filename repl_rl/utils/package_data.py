"""Paths of files that are shipped with the code, and the checkout's `benchmarks/`, which are not."""

import sys
from pathlib import Path

from repl_rl.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent
_ROOTS = (_PACKAGE / "_assets", _PACKAGE.parent, _PACKAGE)
"""Folders to search. In a wheel the files are in `_assets`; in a checkout they are next to the package. The policy is
in the package in both cases."""


def find_asset(name: str) -> Path:
    """Return the path of a shipped file or folder, such as `prompts/bare.txt` or `sandbox/repl_kernel`.

    Raises:
        ConfigError: no folder has it, so the installation is damaged.
    """
    for root in _ROOTS:
        if (root / name).exists():
            return root / name
    raise ConfigError("asset", name, "reinstall repl_rl, or run from a complete checkout")


def add_checkout_to_path(checkout: Path = _PACKAGE.parent) -> None:
    """Make `benchmarks` importable, which only a checkout has.

    Args:
        checkout: folder that holds the package.

    Raises:
        ConfigError: the package does not run from a checkout.
    """
    if not (checkout / "benchmarks" / "cli.py").is_file():
        raise ConfigError(
            "benchmarks",
            str(checkout),
            "only a checkout of repl_rl has them, and this repl_rl is not one; run `pip install -e .` in a checkout",
        )
    # An editable install finds the package, but not its neighbors.
    if str(checkout) not in sys.path:
        sys.path.append(str(checkout))
