"""Fault injection into small, real runs at random moments, as a test of recovery.

A run is `repl-rl train` in a separate process, with the bundled policy. A fault strikes once the run has started. Then
the run continues by itself, or is started again with `--resume`. Either way it must finish, with every step logged
once, in order, with every rollout stored once, and with no process left.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from benchmarks.faults.strikes import STRIKES, Strike, Victim
from repl_rl.errors import ConfigError
from repl_rl.trajectory.trajectory import Trajectory

Tell = Callable[[str], None]
Read = Callable[[Path], Iterable[Trajectory]]
"""Function that reads a folder of stored rollouts."""
PROMPTS, GROUP = 4, 4
"""Groups per step, and rollouts per group."""
_BEGUN_S = 300.0
"""Timeout of a run's first step, seconds."""
_ENDED_S = 600.0
"""Timeout of a whole run, seconds."""
_LEFT_S = 30.0
"""Timeout for processes of an ended run, seconds."""
_LOOK_S = 0.1
_FIRST = b"What a training that `repl-rl bench faults` struck has printed:\n"
"""First line of a log, by which it is recognized."""
_MARK = "REPL_RL_FAULTS"
"""Environment variable that marks a run and all processes that it starts."""


@dataclass(frozen=True)
class FaultsConfig:
    """Faults to inject, and the run that gets them."""

    out: Path = Path("runs/faults")
    """Folder of the runs; an older run of the same name is replaced."""
    faults: tuple[str, ...] = ()
    """Names of faults, such as sigkill engine; by default all that can be injected here."""
    engine: str = "transformers"
    """Inference engine, unless the fault needs another one: transformers, which starts sooner, or vllm."""
    steps: int = 6
    """Steps of each run, >= 2."""
    strikes: int = 1
    """Number of faults per run, at most one per step, >= 1; fewer if the run ends before."""
    seed: int | None = None
    """Seed of the random moments, which is printed; none means another seed each time."""

    def __post_init__(self) -> None:
        for name, floor in (("steps", 2), ("strikes", 1)):
            if getattr(self, name) < floor:
                raise ConfigError(name, getattr(self, name), f"give at least {floor}")
        unknown = sorted(set(self.faults) - set(STRIKES))
        if unknown:
            raise ConfigError("faults", " ".join(unknown), f"choose among {', '.join(STRIKES)}")


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a run."""

    survived: bool | None
    """True if the run recovered; None means that the fault could not be injected here."""
    what: str
    struck_at_s: Sequence[float] = ()
    """Delays of the faults, in seconds after a logged step."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """Counts of faults in `summary.json`."""


def run_faults(config: FaultsConfig, tell: Tell, read: Read) -> dict[str, object]:
    """Inject each fault, and return the content of `bench faults --json`."""
    seed = random.SystemRandom().randrange(1_000_000) if config.seed is None else config.seed
    tell(f"seed {seed}")
    found: dict[str, object] = {}
    for name in config.faults or tuple(STRIKES):
        one = _tried(config, name, STRIKES[name], random.Random(f"{seed} {name}"), read)
        word = {True: "survived", False: "NOT survived", None: "not tried"}[one.survived]
        tell(f"{name}: {word}: {one.what}")
        told = {"survived": one.survived, "what": one.what}
        found[name] = {**told, "struck_at_s": list(one.struck_at_s), "faults": dict(one.faults)}
    return {"seed": seed, "steps": config.steps, "faults": found}


def log_file(out: Path, name: str) -> Path:
    """Return the log file of the run that gets the fault `name`."""
    return out / f"{name}.log"


def is_log(file: Path) -> bool:
    """Return True if the file is a log of such a run."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(_FIRST)) == _FIRST
    except OSError:
        return False


def _tried(config: FaultsConfig, name: str, strike: Strike, dice: random.Random, read: Read) -> Found:
    without = (strike.engine or config.engine) == "vllm" and find_spec("vllm") is None
    reason = "vLLM is not installed" if without else strike.missing()
    if reason:
        return Found(None, reason)
    run = SmallRun(config, name, strike, read)
    try:
        return run.play(dice)
    finally:
        run.end()


class SmallRun:
    """One run that gets a fault."""

    def __init__(self, config: FaultsConfig, name: str, strike: Strike, read: Read) -> None:
        self._steps, self._strikes, self._strike = config.steps, config.strikes, strike
        self._read = read
        self._out = config.out.absolute()
        self.folder = self._out / name
        self._log = log_file(self._out, name)
        engine, sandbox = strike.engine or config.engine, strike.sandbox
        self._command = [
            *(sys.executable, "-P", "-m", "repl_rl.cli", "train", "--name", name, "--out", str(self._out)),
            *("--engine", engine, "--sandbox", sandbox, "--concurrency", "16", "--train-tasks", "64"),
            *("--eval-tasks", "8", "--trainer.steps", str(config.steps), "--trainer.prompts-per-step", str(PROMPTS)),
            # Save the state after every step, so that a resume loses little.
            *("--trainer.group-size", str(GROUP), "--checkpoint.every-s", "0"),
            *("--checkpoint.max-time-share", "1.0"),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._struck_at_s: list[float] = []
        self._mark = f"{os.getpid()} {name}"

    def play(self, dice: random.Random) -> Found:
        """Start the run, inject the faults, wait for its end, and check its results."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._out.mkdir(parents=True, exist_ok=True)
        self._log.write_bytes(_FIRST)
        self._begin()
        for _ in range(self._strikes):
            # A random moment after the next logged step, so that every part of a step is hit in the long run.
            wait_s = dice.uniform(0, self._strike.within_s)
            if not self._reached(self._rows + 1) or self._ended(wait_s) is not None:
                break
            self._struck_at_s.append(round(wait_s, 2))
            # A fault with exit codes ends the run, which is then resumed; any other must be survived.
            problem = self._strike.blow(Victim(self._pid, self.folder, dice))
            if problem:
                return self._found(problem)
            if self._strike.resumes and (problem := self._again()):
                return self._found(problem)
        code = self._ended(_ENDED_S)
        if not self._struck_at_s:
            return self._found(f"it ended with {code} before it could be struck: {self._last_words()}")
        return self._found("" if code == 0 else f"it ended with {code}: {self._last_words()}")

    @property
    def _pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _begin(self) -> None:
        marked = {**os.environ, _MARK: self._mark}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, "--resume"], env=marked, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _again(self) -> str:
        """Wait for the promised exit code, and start the run again. Return an error, or ""."""
        code = self._ended(_ENDED_S)
        if code not in self._strike.codes:
            return f"it ended with {code}, not {self._strike.codes[0]}: {self._last_words()}"
        self._strike.mend(self.folder)
        self._begin()
        return ""

    def _ended(self, within_s: float) -> int | None:
        """Return the exit code, or None if the process still runs after `within_s`."""
        assert self._process is not None
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    @property
    def _rows(self) -> int:
        """Number of logged steps."""
        rows = self.folder / "metrics.jsonl"
        return rows.read_bytes().count(b"\n") if rows.is_file() else 0

    def _reached(self, step: int) -> bool:
        """Wait until `step` steps are logged. Return False if the run ends before or takes too long."""
        deadline = time.monotonic() + _BEGUN_S
        while self._rows < step and time.monotonic() < deadline:
            if self._ended(_LOOK_S) is not None:
                return False
        return self._rows >= step

    def _last_words(self) -> str:
        said = self._log.read_text(errors="replace").strip().splitlines()[1:]
        return next((line for line in reversed(said) if line.startswith("repl-rl:")), said[-1] if said else "nothing")

    def _found(self, problem: str) -> Found:
        summary = self.folder / "summary.json"
        counted = json.loads(summary.read_text()).get("faults", {}) if summary.is_file() else {}
        problem = problem or self._incomplete() or self._left()
        what = problem or (
            f"{self._strike.about}; struck {len(self._struck_at_s)} times of {self._strikes}; {self._steps} steps, "
            f"{self._steps * PROMPTS * GROUP} rollouts, all there"
        )
        return Found(not problem, what, self._struck_at_s, counted)

    def _incomplete(self) -> str:
        """Return a description of missing or duplicate steps and rollouts, or ""."""
        steps = [json.loads(line)["step"] for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        if steps != list(range(1, self._steps + 1)):
            return f"metrics.jsonl has steps {steps}"
        played: list[Trajectory] = list(self._read(self.folder / "trajectories"))
        wanted = self._steps * PROMPTS * GROUP
        if len({t.id for t in played}) != wanted or len(played) != wanted:
            return f"{len(played)} rollouts are stored, {len({t.id for t in played})} of them different, for {wanted}"
        failed = sum(t.failure is not None for t in played)
        return f"{failed} places of groups stayed empty" if failed else ""

    def _left(self) -> str:
        """Return a description of remaining processes, or "". They get some time to end.

        Processes in a console's namespaces do not have the mark, so they are not found.
        """
        deadline = time.monotonic() + _LEFT_S
        while mine := [entry.name for entry in Path("/proc").iterdir() if self._marked(entry)]:
            if time.monotonic() > deadline:
                return f"processes {' '.join(mine)} are left"
            time.sleep(_LOOK_S)
        return ""

    def _marked(self, process: Path) -> bool:
        try:
            return f"{_MARK}={self._mark}".encode() in (process / "environ").read_bytes().split(b"\0")
        # Not a process, another user's, or already gone.
        except OSError:
            return False

    def end(self) -> None:
        """Kill the process if it still runs, and remove the cause of the fault."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._strike.mend(self.folder)
