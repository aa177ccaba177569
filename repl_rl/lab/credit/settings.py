"""What one experiment is, apart from how many seeds it has: equal for all of its runs."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from platform import python_version
from typing import Literal

from repl_rl.errors import ConfigError
from repl_rl.lab.credit.beginnings import BEGINNINGS, QUICKSTART, Beginning, Start
from repl_rl.lab.credit.conditions import CONDITIONS
from repl_rl.machine.versions import versions
from repl_rl.world import World

TARGET = 0.8
"""Solve rate of training rollouts that counts as learned."""
WINDOW = 5
"""Steps of the running mean that is held against `TARGET`."""
_BUNDLED = "builtin:quickstart"
REGIMES = "lab/credit/regimes"
"""Folder of the shipped settings, one file a regime."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Equal for every run of an experiment."""

    regime: str = ""
    """What pages call these settings; `--regime NAME` sets it with the others of that regime."""
    tokens: int = 40_000
    """Tokens that a run may sample in training, >= 1; it ends with the first step beyond them."""
    prompts_per_step: int = 8
    """Tasks in a step, >= 1."""
    group_size: int = 8
    """Rollouts of each task, >= 2."""
    learning_rate: float = 3e-4
    """Of AdamW after 5 steps of warm-up; it stays, so that the end of a run does not depend on when it comes."""
    rates: tuple[float, ...] = ()
    """Learning rates that each condition is tuned over, on seeds of its own that no table holds; none: all have
    learning_rate."""
    start: Start = "bundled"
    """What runs start from: the bundled policy, or that one taught by demonstrations in which many lines fail; or to
    solve tasks of nine to eleven lines, with silent slips, on which it is trained then; or a model that was shown the
    console, or fences, by equally many demonstrations of the tasks."""
    model: str = _BUNDLED
    """Folder, .gguf file or hub name of that model; read with start = shown."""
    families: tuple[str, ...] = ()
    """Families of builtin:quickstart that its tasks are of, in equal shares; none: all. Read with start = shown."""
    held_out: int = 480
    """Held-out tasks of the evaluation after each run, >= 1."""
    agreement_tokens: int = 1024
    """Sampled tokens of each of two batches whose gradients are compared at the start, in the middle and at the end of
    each run, >= 0, beside the budget; 0: none are."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """What samples: vllm, or transformers, which needs no vLLM."""
    sandbox: Literal["inprocess", "local"] = "inprocess"
    """Where lines run: in the worker itself, fit for the bundled policy alone, or in isolated consoles."""
    fenced_steps: int = 300
    """Steps of fine-tuning that teach the bundled policy the fenced protocol, >= 2."""
    failing_steps: int = 120
    """Steps of fine-tuning that teach the bundled policy to fail, >= 1; read with start = failing."""
    slipping_steps: int = 300
    """Steps of fine-tuning that teach the bundled policy tasks of many lines, >= 3; read with start = slipping."""
    shown_steps: int = 16
    """Steps of fine-tuning, 16 demonstrations each, that show a model either way, >= 3; read with start = shown."""
    transcripts: int = 0
    """Held-out tasks whose greedy rollouts are kept with every row, >= 0."""

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
        """What runs start from, with its tasks and limits."""
        return BEGINNINGS[self.start]


def base_of(settings: Settings) -> Path:
    """The policy as it is before anything is taught.

    Raises:
        ConfigError: it cannot be had.
    """
    return World(model=settings.model).policy.folder


def header(settings: Settings, base: Path) -> dict[str, object]:
    """What rows of one file have in common: settings, versions and policy, and a short name of all that."""
    about: dict[str, object] = {
        "settings": asdict(settings),
        "conditions": {condition.name: asdict(condition) for condition in CONDITIONS},
        "versions": {"python": python_version(), **versions()},
        "policy": hashlib.sha256(b"".join(f.read_bytes() for f in sorted(base.glob("*.safetensors")))).hexdigest()[:16],
    }
    return {"fingerprint": hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16], **about}
