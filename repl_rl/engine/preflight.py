"""Check for companions of torch that are installed but cannot be imported.

If no build for this machine exists, pip installs a torchvision, torchaudio or torchcodec built for another torch.
`import transformers` and vLLM then fail deep inside an optional feature. Run `python -m repl_rl.engine.preflight --fix`
to uninstall exactly the broken ones.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence

from repl_rl.machine.versions import installed

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def importable(package: str) -> bool:
    """Return True if a fresh interpreter can import `package`. A failed import would leave half of it in this one."""
    probe = [sys.executable, "-P", "-c", f"import {package}"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def broken_companions(packages: Sequence[str] = COMPANIONS) -> list[str]:
    """Return the names of those `packages` that are installed but cannot be imported, in order."""
    return [package for package in packages if installed(package) and not importable(package)]


def main(argv: Sequence[str] | None = None) -> int:
    """Report broken companions; with `--fix` uninstall them. Exit code 1 when some are left."""
    parser = argparse.ArgumentParser(prog="python -m repl_rl.engine.preflight", description=main.__doc__)
    parser.add_argument("--fix", action="store_true", help="uninstall what cannot be imported")
    arguments = parser.parse_args(argv)
    broken = broken_companions()
    if not broken:
        print("every installed companion of torch can be imported")
        return 0
    print(f"installed but cannot be imported: {', '.join(broken)}")
    if not arguments.fix:
        print("run `python -m repl_rl.engine.preflight --fix` to uninstall them")
        return 1
    uninstall = [sys.executable, "-P", "-m", "pip", "uninstall", "--yes", "--quiet", *broken]
    return subprocess.run(uninstall, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
