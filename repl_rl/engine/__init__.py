"""Inference engines, which sample ids. `open_engine` opens one; `repl_rl.engine.base` defines the interface."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from repl_rl.engine.backend_configs import RequestMode, ScriptedEngineConfig, Transformers, Vllm
from repl_rl.engine.base import Chunk, ChunkEnd, Engine, EngineSession, Sampling, Watch
from repl_rl.engine.config import Dtype, EngineConfig, EngineOptions, KvOnSync
from repl_rl.engine.scripted_engine import ScriptedEngine, ScriptedPolicy
from repl_rl.errors import ConfigError
from repl_rl.settings.component_registry import Registry

__all__ = [
    "ENGINES",
    "Chunk",
    "ChunkEnd",
    "Dtype",
    "Engine",
    "EngineConfig",
    "EngineOptions",
    "EngineSession",
    "KvOnSync",
    "RequestMode",
    "Sampling",
    "ScriptedEngine",
    "ScriptedEngineConfig",
    "ScriptedPolicy",
    "Transformers",
    "Vllm",
    "Watch",
    "open_engine",
]

ENGINES: Registry[EngineConfig] = Registry("engine", {kind.kind: kind for kind in (Vllm, Transformers)})
"""Registry of the engines that a setting can choose by name."""


def open_engine(
    kind: EngineConfig | str,
    *,
    model: str | Path,
    policy: ScriptedPolicy | None = None,
    context_tokens: int | None = None,
    dtype: Dtype = "auto",
    max_sessions: int = 256,
    seed: int = 0,
    forbidden_ids: frozenset[int] = frozenset(),
    growth_tokens: int | None = None,
    kv_on_sync: KvOnSync = "drop",
) -> AbstractAsyncContextManager[Engine]:
    """Open an engine for the duration of an `async with` block. Its processes are gone afterwards.

    Args:
        kind: `vllm`, `transformers`, `scripted`, or another name in `ENGINES`; or an engine config with options, such
            as `Vllm(cpu_threads=2)`.
        model: the model folder, as `save_pretrained` writes it; the scripted engine does not read it.
        policy: function from ids to the next ids, for `scripted` only.
        context_tokens: longest sequence in tokens, prompt included (>= 2). None means the limit in the model's
            config.json.
        dtype: of weights and cache; auto is float32 on CPU, bfloat16 on a GPU.
        max_sessions: maximum number of open sessions (>= 1); another one waits until one is closed. vLLM opens fewer if
            the expected lengths do not fit into its KV cache.
        seed: of the engine's random stream, used by sessions without a seed.
        forbidden_ids: ids that are never sampled; give `Renderer.forbidden_ids`. `Rollouts` rejects an engine whose ids
            differ from those of its renderer.
        growth_tokens: maximum number of ids that a session gains after its prompt (>= 1), see
            `RolloutLimits.max_growth_tokens`. It bounds the first estimate of the number of sessions that fit into the
            cache. None means unknown.
        kv_on_sync: treatment of keys, values and states of open sessions when weights change.

    Raises:
        ConfigError: `kind` is unknown, `policy` does not fit it, or the reasons of `EngineConfig.open`.
    """
    engine_options = EngineOptions(
        Path(model), context_tokens, dtype, max_sessions, seed, forbidden_ids, growth_tokens, kv_on_sync
    )
    if (policy is not None) != (kind == ScriptedEngineConfig.kind):
        raise ConfigError("policy of engine", kind, "give a policy with the engine 'scripted', and with no other")
    # The scripted engine needs no model, and no run can choose it, so the registry does not have it.
    if policy is not None:
        return ScriptedEngineConfig(policy).open(engine_options)
    if isinstance(kind, ScriptedEngineConfig):
        return kind.open(engine_options)
    return ENGINES.resolve(kind).open(engine_options)
