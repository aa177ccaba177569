"""What one experiment is, apart from how many seeds it has: equal for all of its runs."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from platform import python_version
from typing import Literal

from repl_rl.errors import ConfigError
from repl_rl.lab.credit.conditions import SHAPINGS
from repl_rl.machine.assets import asset
from repl_rl.machine.versions import versions
from repl_rl.rollout.limits import RolloutLimits

TARGET = 0.8
"""Solve rate of training rollouts that counts as learned."""
WINDOW = 5
"""Steps of the running mean that is held against `TARGET`."""
TASKS = "builtin:quickstart"
TRAIN_TASKS = 4096
LINE_LIMITS = RolloutLimits()
FENCED_LIMITS = RolloutLimits(max_line_tokens=128)
"""A block counts as one line and holds several."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Equal for every run of an experiment."""

    tokens: int = 40_000
    """Tokens that a run may sample in training, >= 1; it ends with the first step beyond them."""
    prompts_per_step: int = 8
    """Tasks in a step, >= 1."""
    group_size: int = 8
    """Rollouts of each task, >= 2."""
    learning_rate: float = 3e-4
    """Of AdamW after 5 steps of warm-up; it stays, so that the end of a run does not depend on when it comes."""
    held_out: int = 480
    """Held-out tasks of the evaluation after each run, >= 1."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """What samples: vllm, or transformers, which needs no vLLM."""
    sandbox: Literal["inprocess", "local"] = "inprocess"
    """Where lines run: in the worker itself, fit for the bundled policy alone, or in isolated consoles."""
    fenced_steps: int = 300
    """Steps of fine-tuning that teach the bundled policy the fenced protocol, >= 2."""

    def __post_init__(self) -> None:
        least = {"tokens": 1, "prompts_per_step": 1, "group_size": 2, "held_out": 1, "fenced_steps": 2}
        for name, floor in least.items():
            if getattr(self, name) < floor:
                raise ConfigError(name, getattr(self, name), f"give at least {floor}")
        if not self.learning_rate > 0:
            raise ConfigError("learning_rate", self.learning_rate, "it must be above 0")


def policy_folder() -> Path:
    """The bundled policy, which every run starts from."""
    return asset("policies/quickstart")


def header(settings: Settings) -> dict[str, object]:
    """What rows of one file have in common: settings, versions and policy, and a short name of all that."""
    about: dict[str, object] = {
        "settings": asdict(settings),
        "shapings": {name: asdict(table) for name, table in SHAPINGS.items()},
        "versions": {"python": python_version(), **versions()},
        "policy": hashlib.sha256((policy_folder() / "model.safetensors").read_bytes()).hexdigest()[:16],
    }
    return {"fingerprint": hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16], **about}
