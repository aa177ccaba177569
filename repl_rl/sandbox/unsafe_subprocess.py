"""The `unsafe` sandbox: consoles are ordinary processes of this user, without isolation, for trusted code only."""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import ClassVar

from repl_rl.sandbox.base import Sandbox, SandboxConfig, SandboxOptions
from repl_rl.sandbox.console_pool import open_fork_server_sandbox
from repl_rl.sandbox.fork_server_client import ProcessLauncher
from repl_rl.sandbox.isolated_subprocess import ENVIRONMENT
from repl_rl.utils.package_data import find_asset


@dataclass(frozen=True, slots=True)
class Unsafe(SandboxConfig):
    """Consoles without isolation. Use them only for a policy whose every line you would run yourself."""

    kind: ClassVar[str] = "unsafe"
    about: ClassVar[str] = "isolates nothing: only for lines that you would run yourself"
    isolates: ClassVar[bool] = False
    unenforced_limits: ClassVar[frozenset[str]] = frozenset({"processes", "inodes", "CPU time of all processes"})

    def open(self, options: SandboxOptions) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxConfig.open`."""
        return open_fork_server_sandbox(self.kind, make_unsafe_launcher(options.preload), options)


def make_unsafe_launcher(preload: Sequence[str]) -> ProcessLauncher:
    """Return the launcher of a fork server without any isolation."""
    variables = [f"{name}={value}" for name, value in ENVIRONMENT.items() if name != "PATH"]
    options = json.dumps({"isolate": False, "preload": list(preload)})
    script = str(find_asset("sandbox/repl_kernel/fork_server_main.py"))
    path = f"PATH={os.environ.get('PATH', os.defpath)}"
    variables.append(f"TMPDIR={tempfile.gettempdir()}")
    argv = ["/usr/bin/env", "-i", *variables, path, sys.executable, "-B", script, "{fd}", options]
    return ProcessLauncher(
        argv, isolates_consoles=False, uses_own_uids=False, find_remedy=lambda _: "see why its processes cannot start"
    )
