"""The `unsafe` sandbox: consoles are ordinary processes of this user, without isolation, for trusted code only."""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import ClassVar

from repl_rl.machine.assets import asset
from repl_rl.sandbox.base import Births, Sandbox, SandboxKind
from repl_rl.sandbox.local import ENVIRONMENT
from repl_rl.sandbox.process import ProcessLaunch
from repl_rl.sandbox.served import serve


@dataclass(frozen=True, slots=True)
class Unsafe(SandboxKind):
    """Consoles without isolation. Use them only for a policy whose every line you would run yourself."""

    kind: ClassVar[str] = "unsafe"
    about: ClassVar[str] = "isolates nothing: only for lines that you would run yourself"
    isolates: ClassVar[bool] = False
    unlimited: ClassVar[frozenset[str]] = frozenset({"processes", "inodes", "CPU time of all processes"})

    def open(self, births: Births) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxKind.open`."""
        return serve(self.kind, launch(births.preload), births)


def launch(preload: Sequence[str]) -> ProcessLaunch:
    """Return the launcher of a fork server without any isolation."""
    variables = [f"{name}={value}" for name, value in ENVIRONMENT.items() if name != "PATH"]
    options = json.dumps({"isolate": False, "preload": list(preload)})
    zygote = str(asset("sandbox/repl_kernel/zygote.py"))
    path = f"PATH={os.environ.get('PATH', os.defpath)}"
    variables.append(f"TMPDIR={tempfile.gettempdir()}")
    argv = ["/usr/bin/env", "-i", *variables, path, sys.executable, "-B", zygote, "{fd}", options]
    return ProcessLaunch(
        argv, isolated=False, own_uids=False, remedy_for=lambda _: "see why its processes cannot start"
    )
