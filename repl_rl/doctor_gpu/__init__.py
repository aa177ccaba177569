"""`repl-rl doctor --gpu`: checks that need a GPU, in separate processes.

Processes start early and wait for their turn, because with a GPU the imports take longer than most checks.

A check is a function of `checks` that takes a `CheckContext`. It returns figures, or raises. The tests run the same
functions with the CPU as the device. A check that hangs is killed with all processes that it started.

`run_check` is the process of one check.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from types import TracebackType

from repl_rl.utils.atomic_files import Json
from repl_rl.utils.processes import VARIABLES, kill_processes, list_descendants

BUDGET_S = 870.0
"""Time budget of all checks together, seconds; with the time between them it is within 15 minutes."""
LOG_CHARS = 20_000
"""Characters of a check's log that are kept: the traceback, and vLLM's output before it."""
MAX_PRESTARTED = 3
"""Number of processes that import in advance while one check runs; the imports take 20 s each."""
GO = b"go"
"""Message that starts a waiting process."""
CHILD = "repl_rl.doctor_gpu.run_check"
Figures = Mapping[str, Json]
Tell = Callable[[Sequence["Row"]], None]


class Verdict(StrEnum):
    """Result of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


class NotRun(Exception):
    """Missing requirement of a check; the message names it."""


@dataclass(frozen=True, slots=True)
class CheckContext:
    """Device and folder of a check."""

    device: str
    """`cpu`, or `cuda`, the only GPU that the check's process sees."""
    folder: Path
    """Empty folder, removed afterwards."""


@dataclass(frozen=True, slots=True)
class Check:
    """Check to run."""

    name: str
    function: str
    """Function as module:function, from a `CheckContext` and `options` to figures; "" if the feature does not exist."""
    options: Figures = field(default_factory=dict)
    limit_s: float = 60.0
    """Timeout, seconds; after it the check has failed."""
    unbuilt: str = ""
    """Reason why there is no function."""


@dataclass(frozen=True, slots=True)
class Row:
    """Result of one check."""

    name: str
    verdict: Verdict
    why: str
    """Reason of a failure, or for not running; "" if it passed."""
    figures: Figures
    seconds: float
    log: str = ""
    """End of its process's log, if it failed."""
    made: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """Time of the result, UTC."""


def _get_check_path(function: str) -> str:
    return f"repl_rl.doctor_gpu.checks:{function}"


def _make_engine_checks(name: str, function: str, limits_s: Mapping[str, float], **options: Json) -> list[Check]:
    """Return one check per engine; `limits_s` maps engines to timeouts."""
    return [
        Check(f"{name}, {engine}", _get_check_path(function), {"engine": engine, **options}, limit_s)
        for engine, limit_s in limits_s.items()
    ]


CHECKS: Sequence[Check] = (
    Check("this GPU", _get_check_path("describe_machine"), {}, 60.0),
    *_make_engine_checks("promises of an engine", "check_conformance", {"transformers": 90.0, "vllm": 180.0}),
    *_make_engine_checks("weights by file", "check_weight_loading", {"transformers": 60.0, "vllm": 180.0}),
    Check("weights by vLLM's own transfer", "", unbuilt="not built: weights go by file to every engine"),
    *_make_engine_checks(
        "sampler and trainer, float32", "measure_logprob_gap", {"transformers": 60.0, "vllm": 180.0}, dtype="float32"
    ),
    *_make_engine_checks(
        "sampler and trainer, bfloat16", "measure_logprob_gap", {"transformers": 60.0, "vllm": 180.0}, dtype="bfloat16"
    ),
    Check(
        "running states, transformers",
        _get_check_path("check_recurrent_states"),
        {"engine": "transformers", "models": ["qwen3_5_text", "falcon_h1", "mamba2", "lfm2"]},
        90.0,
    ),
    Check("vLLM asleep and awake", _get_check_path("check_sleep"), {}, 180.0),
    Check(
        "adapters (LoRA)",
        _get_check_path("check_training"),
        {"engine": "transformers", "steps": 2, "prompts": 2, "lora_rank": 4},
        120.0,
    ),
    *(
        Check(f"shared prefixes, {dtype}", _get_check_path("check_prefix_sharing"), {"dtype": dtype})
        for dtype in ("float32", "bfloat16")
    ),
    Check(
        "an update, with shared prefixes and without",
        _get_check_path("measure_update"),
        {"hidden": 1024, "layers": 16},
        120.0,
    ),
    Check("rows laid end to end (FlashAttention)", _get_check_path("check_packing"), {}, 60.0),
    Check("one model on two GPUs", "", unbuilt="not built: the engine vllm samples on one GPU"),
    Check("20 steps of the quickstart", _get_check_path("check_training"), {"engine": "vllm", "steps": 20}, 240.0),
    Check(
        "running states, vllm",
        _get_check_path("check_recurrent_states"),
        {"engine": "vllm", "models": ["falcon_h1"]},
        180.0,
    ),
)
"""Checks in the order in which they run: the most informative per second first."""


def run_checks(device: str, checks: Sequence[Check], tell: Tell, budget_s: float = BUDGET_S) -> list[Row]:
    """Run each check on `device` (`cpu` or `cuda:N`), one after the other.

    Args:
        device: the device.
        checks: the checks.
        tell: callback after each check, with all rows so far; the last row is new.
        budget_s: time for all of them, seconds; checks without time left are not run.
    """
    deadline_s = time.monotonic() + budget_s
    rows: list[Row] = []
    with _CheckProcesses(device, [check for check in checks if check.function]) as children:
        for check in checks:
            remaining_s = deadline_s - time.monotonic()
            if check.unbuilt:
                row = Row(check.name, Verdict.NOT_RUN, check.unbuilt, {}, 0.0)
            elif remaining_s <= 0:
                row = Row(check.name, Verdict.NOT_RUN, f"the {budget_s:.0f} s for all checks were over", {}, 0.0)
            else:
                row = children.run(check, min(check.limit_s, remaining_s))
            rows.append(row)
            tell(rows)
    return rows


def build_report(device: str, rows: Iterable[Row], earlier: Sequence[Mapping[str, Json]] = ()) -> dict[str, Json]:
    """Return the content of `doctor --gpu --json`: `earlier` rows and new `rows`, in the order of `CHECKS`."""
    order = {check.name: number for number, check in enumerate(CHECKS)}
    entries = [*((row["name"], row) for row in earlier), *((row.name, asdict(row)) for row in rows)]
    entries.sort(key=lambda entry: order.get(str(entry[0]), len(order)))
    return {"device": device, "rows": [row for _, row in entries]}


class _CheckProcesses:
    """Context manager of the checks' processes, in order; the next few already run their imports."""

    def __init__(self, device: str, checks: Sequence[Check]) -> None:
        self._device = device
        self._remaining = deque(checks)
        self._ready: deque[_CheckProcess] = deque()

    def __enter__(self) -> "_CheckProcesses":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._ready:
            child.end()

    def run(self, check: Check, limit_s: float) -> Row:
        """Run the next check."""
        # Keep this check and the next few started.
        while self._remaining and len(self._ready) <= MAX_PRESTARTED:
            self._ready.append(_CheckProcess(self._device, self._remaining.popleft()))
        child = self._ready.popleft()
        assert child.check == check
        try:
            return child.run(limit_s)
        finally:
            child.end()


class _CheckProcess:
    """Process of a check, which waits for a message before it begins."""

    def __init__(self, device: str, check: Check) -> None:
        self.check = check
        self._temporary_folder = tempfile.TemporaryDirectory(prefix="repl-rl-gpu-")
        self._folder = Path(self._temporary_folder.name)
        (self._folder / "place").mkdir()
        command = [
            sys.executable,
            "-P",
            "-m",
            CHILD,
            check.function,
            device.partition(":")[0],
            json.dumps(check.options),
        ]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, str(self._folder)], env=_build_environment(device), stdin=subprocess.PIPE, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip

    def run(self, limit_s: float) -> Row:
        """Start the check, wait for it, and return its row."""
        name, start_s = self.check.name, time.monotonic()
        try:
            self._process.communicate(GO, limit_s)
        except subprocess.TimeoutExpired:
            reason = f"it was not done after {limit_s:.0f} s and was ended; {self._describe_last_line()}"
            return Row(name, Verdict.FAILED, reason, {}, time.monotonic() - start_s, self._read_log())
        seconds = time.monotonic() - start_s
        # A check that crashes its process leaves no result file.
        result_file = self._folder / "told.json"
        if not result_file.is_file():
            reason = f"its process ended with {self._process.returncode}; {self._describe_last_line()}"
            return Row(name, Verdict.FAILED, reason, {}, seconds, self._read_log())
        result = json.loads(result_file.read_text(encoding="utf-8"))
        verdict = Verdict(result["verdict"])
        log = self._read_log() if verdict is Verdict.FAILED else ""
        return Row(name, verdict, result["why"], result["figures"], seconds, log)

    def end(self) -> None:
        """Kill the process and all that it started, and remove its files."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                # Stop it first, so that it starts no more processes while its descendants are listed.
                os.kill(self._process.pid, signal.SIGSTOP)
            kill_processes(list_descendants(self._process.pid))
        with suppress(ProcessLookupError):
            # Kill orphans of its process group too.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._temporary_folder.cleanup()

    def _read_log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-LOG_CHARS:]

    def _describe_last_line(self) -> str:
        lines = [line.strip() for line in self._read_log().splitlines() if line.strip()]
        return f"its last line: {lines[-1][:300]}" if lines else "it said nothing"


def _build_environment(device: str) -> dict[str, str]:
    """Return the environment of a process that sees only `device` and belongs to no distributed launch."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    device_type, _, number = device.partition(":")
    index = int(number or 0)
    # `device` counts among the GPUs that this process may see.
    chosen = "" if device_type == "cpu" else visible[index] if visible else str(index)
    return {**inherited, "CUDA_VISIBLE_DEVICES": chosen}
