"""Paths of files that are shipped with the code: `sandbox/`, `prompts/` and the bundled policy."""

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
