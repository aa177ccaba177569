"""`repl-rl doctor --gpu`: what only a GPU can show, tried on one, each check in a process of its own.

A check is a function of `gpu_checks` that is given a `Place`: the device is an argument, and nothing else differs
between a GPU and the CPU on which the tests run the same functions. It returns figures, or raises. One that hangs is
ended with all that it has started.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from repl_rl.machine.files import Json
from repl_rl.machine.launched import VARIABLES
from repl_rl.machine.processes import descendants, end_now

BUDGET_S = 870.0
"""All checks together: within 15 minutes, with what lies between them."""
CHILD = "repl_rl.lab.gpu_child"
Figures = Mapping[str, Json]
Tell = Callable[[str], None]


class Verdict(StrEnum):
    """What came of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


class NotRun(Exception):
    """What a check cannot be tried without is not here; the message names it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a check runs."""

    device: str
    """`cpu`, or `cuda`: the only one that the check's process sees."""
    folder: Path
    """An empty one, removed afterwards."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something to try."""

    name: str
    function: str
    """module:function, from a `Place` and `options` to figures. "": there is nothing to call."""
    options: Figures = field(default_factory=dict)
    limit_s: float = 60.0
    """After that it has failed."""
    unbuilt: str = ""
    """Why there is nothing to call."""


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one check."""

    name: str
    verdict: Verdict
    why: str
    """Of one that failed or was not run; "": of one that passed."""
    figures: Figures
    seconds: float


def _own(function: str) -> str:
    return f"repl_rl.lab.gpu_checks:{function}"


def _engines(name: str, function: str, limits_s: Mapping[str, float], **options: Json) -> list[Check]:
    """A check of each engine; `limits_s`: by engine."""
    return [
        Check(f"{name}, {engine}", _own(function), {"engine": engine, **options}, limit_s)
        for engine, limit_s in limits_s.items()
    ]


CHECKS: Sequence[Check] = (
    Check("this GPU", _own("machine"), {}, 60.0),
    *_engines("promises of an engine", "conformance", {"transformers": 90.0, "vllm": 180.0}),
    *_engines("weights by file", "weights", {"transformers": 60.0, "vllm": 120.0}),
    Check("weights by vLLM's own transfer", "", unbuilt="not built: weights go by file to every engine"),
    *_engines("sampler and trainer, float32", "gap", {"transformers": 60.0, "vllm": 120.0}, dtype="float32"),
    *_engines("sampler and trainer, bfloat16", "gap", {"transformers": 60.0, "vllm": 120.0}, dtype="bfloat16"),
    Check("vLLM asleep and awake", _own("sleeping"), {}, 150.0),
    Check(
        "adapters (LoRA)", _own("training"), {"engine": "transformers", "steps": 2, "prompts": 2, "lora_rank": 4}, 120.0
    ),
    Check("rows laid end to end (FlashAttention)", _own("packing"), {}, 60.0),
    Check("one model on two GPUs", "", unbuilt="not built: the engine vllm samples on one GPU"),
    Check("20 steps of the quickstart", _own("training"), {"engine": "vllm", "steps": 20}, 240.0),
)
"""In this order: what says most for least time first."""


def run_checks(device: str, checks: Sequence[Check], tell: Tell, budget_s: float = BUDGET_S) -> list[Row]:
    """Try each check on `device` (`cpu` or `cuda:N`), one after the other.

    Args:
        device: where.
        checks: what.
        tell: given a line about each that is done.
        budget_s: for all of them; what has no time left is not run.
    """
    ends_s = time.monotonic() + budget_s
    rows = []
    for check in checks:
        left_s = ends_s - time.monotonic()
        if check.unbuilt:
            row = Row(check.name, Verdict.NOT_RUN, check.unbuilt, {}, 0.0)
        elif left_s <= 0:
            row = Row(check.name, Verdict.NOT_RUN, f"the {budget_s:.0f} s for all checks were over", {}, 0.0)
        else:
            row = _tried(device, check, min(check.limit_s, left_s))
        rows.append(row)
        tell(f"{row.name}: {row.verdict}{f': {row.why}' if row.why else ''} ({row.seconds:.0f} s)")
    return rows


def report(device: str, rows: Iterable[Row]) -> dict[str, Json]:
    """What `doctor --gpu --json` writes."""
    return {"device": device, "rows": [asdict(row) for row in rows]}


def _tried(device: str, check: Check, limit_s: float) -> Row:
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="repl-rl-gpu-") as name:
        folder = Path(name)
        (folder / "place").mkdir()
        command = [sys.executable, "-m", CHILD, check.function, device.partition(":")[0], json.dumps(check.options)]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, str(folder)], env=_environment(device), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                why = f"it was not done after {limit_s:.0f} s and was ended; {_last_words(folder)}"
                return Row(check.name, Verdict.FAILED, why, {}, time.monotonic() - began_s)
            finally:
                _end(process)
        seconds = time.monotonic() - began_s
        told = folder / "told.json"
        if not told.is_file():
            why = f"its process ended with {process.returncode}; {_last_words(folder)}"
            return Row(check.name, Verdict.FAILED, why, {}, seconds)
        said = json.loads(told.read_text(encoding="utf-8"))
    return Row(check.name, Verdict(said["verdict"]), said["why"], said["figures"], seconds)


def _environment(device: str) -> dict[str, str]:
    """That of a process that sees `device` and no other, and is none of several."""
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    kind, _, number = device.partition(":")
    index = int(number or 0)
    mine = "" if kind == "cpu" else seen[index] if seen else str(index)
    return {**kept, "CUDA_VISIBLE_DEVICES": mine}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of a check: neither its process nor what that has started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGSTOP)  # so that it starts no more while they are counted
        end_now(descendants(process.pid))
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it has left behind, too
    process.wait()


def _last_words(folder: Path) -> str:
    said = [line.strip() for line in (folder / "log").read_text(errors="replace").splitlines() if line.strip()]
    return f"its last line: {said[-1][:300]}" if said else "it said nothing"
