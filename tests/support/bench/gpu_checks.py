"""Checks that need nothing: what the runner of `doctor --gpu` makes of each way in which one can end."""

import json
import os
import subprocess
import threading
from pathlib import Path

from repl_rl.doctor_gpu import CheckContext, Figures, NotRun


def passing(place: CheckContext, more: int = 0) -> Figures:
    seen = os.environ["CUDA_VISIBLE_DEVICES"]
    return {"device": place.device, "seen": seen, "more": more, "empty": not list(place.folder.iterdir())}


def failing(place: CheckContext) -> Figures:
    raise AssertionError("two log probabilities\nare apart")


def missing(place: CheckContext) -> Figures:
    raise NotRun("a part is not here; install it")


def dying(place: CheckContext) -> Figures:
    print("its last words", flush=True)
    os._exit(3)


def hanging(place: CheckContext, told: str) -> Figures:
    """Waits for ever, as does a process that it has started in a session of its own."""
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(told).write_text(f"{os.getpid()} {other.pid}")
    threading.Event().wait()
    return {}


def leaving(place: CheckContext, told: str) -> Figures:
    """Ends well, and leaves a process behind."""
    Path(told).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    return {}


def counting(place: CheckContext, told: str) -> Figures:
    """The checks that a file has by now."""
    return {"rows": [row["name"] for row in json.loads(Path(told).read_text())["rows"]]}
