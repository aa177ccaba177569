"""What every verb that plays rollouts needs: a policy, tasks, an engine, a sandbox."""

import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from repl_rl.engine import EngineOptions, open_engine
from repl_rl.errors import ConfigError
from repl_rl.origin import BUNDLED, Origin, resolve
from repl_rl.rollout import Rollouts
from repl_rl.rollout.limits import RolloutLimits
from repl_rl.rollout.renderer import Overshoot, Renderer
from repl_rl.samplers import load_sampler
from repl_rl.sandbox import DockerOptions, Limits, open_sandbox

QUICKSTART = "builtin:quickstart"
"""The bundled tasks."""
_OF_VLLM = ("kv_cache_gib", "block_size", "threads", "drive", "sleep", "verbose")
"""Engine options that `transformers` does not read."""


@dataclass(frozen=True)
class Setup:
    """The policy and the world that it acts in."""

    model: str = BUNDLED
    """The policy: a folder (weights, config, tokenizer; or PEFT adapters), a .gguf file, or owner/name[@revision] of
    the hub; builtin:quickstart is the bundled tiny one."""
    tasks: str = QUICKSTART
    """Where tasks come from: builtin:NAME, a JSONL or Parquet file, dataset:NAME, gsm8k:FILE or math:FILE."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """What samples: vllm, or transformers, which needs no vLLM."""
    sandbox: Literal["local", "docker", "gateway", "unsafe"] = "local"
    """Where lines run. `unsafe` isolates nothing: use it only for a policy whose every line you would run yourself.
    `gateway` is not in this version."""
    preload: str = ""
    """Modules that every console has imported already, so that they cost it nothing: names with commas between."""
    sampler: str = "repl"
    """How a rollout goes: a shipped sampler, or module:name of a class, an instance or a function without arguments."""
    prompt: str = "bare"
    """Prompt template: bare, base, few_shot, chat or chat_few_shot."""
    overshoot: Overshoot = "forbid"
    """What to do with tokens that have text after a newline: forbid (probability 0 in sampler and trainer alike), carry
    that text into the next line, or refuse a vocabulary that has them."""
    concurrency: int = 128
    """Rollouts under way at once, and consoles kept ready for them, >= 1."""
    seed: int = 0
    """Seeds tasks, rollouts and training, >= 0."""
    rollout: RolloutLimits = field(default_factory=RolloutLimits)
    limits: Limits = field(default_factory=Limits)
    docker: DockerOptions = field(default_factory=DockerOptions)
    engine_options: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError("concurrency", self.concurrency, "give at least 1")
        if self.seed < 0:
            raise ConfigError("seed", self.seed, "give 0 or more")
        if self.sandbox != "docker" and self.docker != DockerOptions():
            raise ConfigError("docker", self.docker, "it has no effect without --sandbox docker; leave it out")
        for name, instead in (("seed", "--seed"), ("max_sessions", "--concurrency")):
            if getattr(self.engine_options, name) != getattr(EngineOptions(), name):
                raise ConfigError(f"engine_options.{name}", getattr(self.engine_options, name), f"give {instead}")
        for name in _OF_VLLM if self.engine != "vllm" else ():
            value = getattr(self.engine_options, name)
            if value != getattr(EngineOptions(), name):
                raise ConfigError(f"engine_options.{name}", value, "only the engine vllm reads it; leave it out")

    @property
    def models(self) -> Path:
        """Where the folders are that are made of GGUF files and adapters: beside the runs."""
        return Path("runs/.models")

    @cached_property
    def policy(self) -> Origin:
        """Where the policy comes from; it is looked for, downloaded or made once.

        Raises:
            ConfigError: there is none, or it cannot be had.
        """
        return resolve(self.model, self.models, lambda line: print(line, file=sys.stderr, flush=True))

    @property
    def model_folder(self) -> Path:
        """Where the policy lies. Raises as `policy` does."""
        return self.policy.folder

    async def open(self, stack: AsyncExitStack) -> Rollouts:
        """Open engine and sandbox on `stack`. Whatever a person can mend is refused before the slow parts start."""
        sampler = load_sampler(self.sampler)
        renderer = Renderer.from_folder(self.model_folder, self.overshoot)
        renderer.prompt("", self.prompt)
        containers = self.docker if self.sandbox == "docker" else None
        sandbox = await stack.enter_async_context(
            open_sandbox(
                self.sandbox,
                limits=self.limits,
                preload=[name.strip() for name in self.preload.split(",") if name.strip()],
                warm=self.concurrency,
                containers=containers,
            )
        )
        options = replace(self.engine_options, seed=self.seed, max_sessions=self.concurrency)
        opening = open_engine(
            self.engine, model=self.model_folder, options=options, forbidden_ids=renderer.forbidden_ids
        )
        engine = await stack.enter_async_context(opening)
        return Rollouts(
            engine, sandbox, renderer, sampler, self.rollout, self.prompt, seed=self.seed, concurrency=self.concurrency
        )
