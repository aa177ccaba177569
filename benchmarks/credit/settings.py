"""Settings that are equal for all runs of an experiment."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from platform import python_version
from typing import Literal

from benchmarks.credit.conditions import BEGINNINGS, CONDITIONS, QUICKSTART, Beginning, Start
from repl_rl.errors import ConfigError
from repl_rl.rollout_config import RolloutConfig
from repl_rl.utils.installed_versions import collect_versions

TARGET = 0.8
"""Solve rate of training rollouts that counts as learned."""
WINDOW = 5
"""Steps of the running mean that is compared with `TARGET`."""
_BUNDLED = "builtin:quickstart"
REGIMES = "benchmarks/credit/regimes"
"""Folder of the shipped settings, one file per regime."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of every run of an experiment."""

    regime: str = ""
    """Name of these settings on pages; `--regime NAME` sets it with the other settings of that regime."""
    tokens: int = 40_000
    """Tokens that a run may sample in training, >= 1; it ends with the first step beyond them."""
    prompts_per_step: int = 8
    """Tasks per step, >= 1."""
    group_size: int = 8
    """Rollouts per task, >= 2."""
    learning_rate: float = 3e-4
    """Learning rate of AdamW after 5 steps of warm-up. It is constant, so that a run does not depend on its length."""
    rates: tuple[float, ...] = ()
    """Learning rates that each condition is tuned over, on separate seeds that no table has.

    By default all use learning_rate.
    """
    start: Start = "bundled"
    """Starting point of runs: bundled, failing, slipping or shown.

    bundled is the bundled policy. failing is that policy, fine-tuned on demonstrations in which many lines fail.
    slipping is fine-tuned to solve tasks of nine to eleven lines with silent slips, and trains on them. shown is a
    model that saw equally many demonstrations of the console or of fences.
    """
    model: str = _BUNDLED
    """Folder, .gguf file or hub name of that model; used with start = shown."""
    families: tuple[str, ...] = ()
    """Families of builtin:quickstart for its tasks, in equal shares; by default all. Used with start = shown."""
    held_out: int = 480
    """Held-out tasks of the evaluation after each run, >= 1."""
    agreement_tokens: int = 1024
    """Sampled tokens per batch for the agreement of gradients, >= 0; 0 disables it.

    Two batches are compared at the start, in the middle and at the end of each run. Their tokens do not count to the
    budget.
    """
    engine: Literal["vllm", "transformers"] = "vllm"
    """Inference engine: vllm, or transformers, which needs no vLLM."""
    sandbox: Literal["inprocess", "local"] = "inprocess"
    """Sandbox of lines: inprocess, in the worker itself, only for the bundled policy; or local, isolated consoles."""
    fenced_steps: int = 300
    """Fine-tuning steps that teach the bundled policy the fenced protocol, >= 2."""
    failing_steps: int = 120
    """Fine-tuning steps that teach the bundled policy to fail, >= 1; used with start = failing."""
    slipping_steps: int = 300
    """Fine-tuning steps that teach the bundled policy tasks of many lines, >= 3; used with start = slipping."""
    shown_steps: int = 16
    """Fine-tuning steps, 16 demonstrations each, that show a model either protocol, >= 3; used with start = shown."""
    transcripts: int = 0
    """Held-out tasks whose greedy rollouts are stored with every row, >= 0."""

    def __post_init__(self) -> None:
        least = {"tokens": 1, "prompts_per_step": 1, "group_size": 2, "held_out": 1}
        none = {"agreement_tokens": 0, "transcripts": 0}
        taught = {"fenced_steps": 2, "failing_steps": 1, "slipping_steps": 3, "shown_steps": 3}
        for name, floor in {**least, **none, **taught}.items():
            if getattr(self, name) < floor:
                raise ConfigError(name, getattr(self, name), f"give at least {floor}")
        for rate in (self.learning_rate, *self.rates):
            if not rate > 0:
                raise ConfigError("learning_rate or rates", rate, "it must be above 0")
        if len(self.rates) == 1 or len(set(self.rates)) < len(self.rates):
            raise ConfigError("rates", self.rates, "give several, and none twice; one for all is learning_rate")
        for name, unread in (("model", _BUNDLED), ("families", ())):
            if self.start != "shown" and getattr(self, name) != unread:
                raise ConfigError(name, getattr(self, name), f"start is {self.start!r}, which does not read it")
        for family in self.families:
            if family not in QUICKSTART:
                raise ConfigError("families", family, f"choose among {', '.join(QUICKSTART)}")

    @property
    def beginning(self) -> Beginning:
        """Starting point of the runs, with its tasks and limits."""
        return BEGINNINGS[self.start]


def base_of(settings: Settings) -> Path:
    """Return the folder of the policy before any fine-tuning.

    Raises:
        ConfigError: it cannot be loaded.
    """
    return RolloutConfig(model=settings.model).policy.folder


def header(settings: Settings, base: Path) -> dict[str, object]:
    """Return the common data of a file's rows: settings, versions and policy, and a fingerprint of them."""
    # The digest of the weights identifies the policy, wherever its folder is.
    about: dict[str, object] = {
        "settings": asdict(settings),
        "conditions": {condition.name: asdict(condition) for condition in CONDITIONS},
        "versions": {"python": python_version(), **collect_versions()},
        "policy": hashlib.sha256(b"".join(f.read_bytes() for f in sorted(base.glob("*.safetensors")))).hexdigest()[:16],
    }
    return {"fingerprint": hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16], **about}
