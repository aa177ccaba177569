"""The `unsafe` sandbox: consoles are ordinary processes of this user. It isolates nothing; for trusted code only."""

import json
import os
import sys
import tempfile
from collections.abc import Sequence

from repl_rl.machine.assets import asset
from repl_rl.sandbox.local import ENVIRONMENT
from repl_rl.sandbox.process import ProcessLaunch


def launch(preload: Sequence[str]) -> ProcessLaunch:
    """How to start a fork server without any isolation."""
    variables = [f"{name}={value}" for name, value in ENVIRONMENT.items() if name != "PATH"]
    options = json.dumps({"isolate": False, "preload": list(preload)})
    zygote = str(asset("sandbox/repl_kernel/zygote.py"))
    path = f"PATH={os.environ.get('PATH', os.defpath)}"
    variables.append(f"TMPDIR={tempfile.gettempdir()}")
    argv = ["/usr/bin/env", "-i", *variables, path, sys.executable, "-B", zygote, "{fd}", options]
    return ProcessLaunch(
        argv, isolated=False, own_uids=False, remedy_for=lambda _: "see why its processes cannot start"
    )
