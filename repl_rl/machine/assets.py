"""Where the files live that are shipped beside the code: `sandbox/`, `prompts/` and the bundled policy."""

from pathlib import Path

from repl_rl.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent
_ROOTS = (_PACKAGE / "_assets", _PACKAGE.parent, _PACKAGE)
"""In a wheel the files are in `_assets`; in a checkout they are beside the package; the policy is in it in both."""


def asset(name: str) -> Path:
    """The file or folder `name`, such as `prompts/bare.txt` or `sandbox/repl_kernel`.

    Raises:
        ConfigError: it is in neither place, so the installation is damaged.
    """
    for root in _ROOTS:
        if (root / name).exists():
            return root / name
    raise ConfigError("asset", name, "reinstall repl_rl, or run from a complete checkout")
