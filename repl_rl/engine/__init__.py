"""Inference engines: they sample ids. `open_engine` is the way in; the seam is in `repl_rl.engine.base`."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from repl_rl.engine.base import Chunk, ChunkEnd, Engine, EngineSession, Sampling, Watch
from repl_rl.engine.kinds import Drive, Scripted, Transformers, Vllm
from repl_rl.engine.options import Dtype, EngineKind, KvOnSync, Opening
from repl_rl.engine.scripted import Policy, ScriptedEngine
from repl_rl.errors import ConfigError
from repl_rl.settings.seams import Seam

__all__ = [
    "ENGINES",
    "Chunk",
    "ChunkEnd",
    "Drive",
    "Dtype",
    "Engine",
    "EngineKind",
    "EngineSession",
    "KvOnSync",
    "Opening",
    "Policy",
    "Sampling",
    "Scripted",
    "ScriptedEngine",
    "Transformers",
    "Vllm",
    "Watch",
    "open_engine",
]

ENGINES: Seam[EngineKind] = Seam("engine", {kind.kind: kind for kind in (Vllm, Transformers)})
"""Every engine that can be chosen by name."""


def open_engine(
    kind: EngineKind | str,
    *,
    model: str | Path,
    policy: Policy | None = None,
    context_tokens: int | None = None,
    dtype: Dtype = "auto",
    max_sessions: int = 256,
    seed: int = 0,
    forbidden_ids: frozenset[int] = frozenset(),
    growth_tokens: int | None = None,
    kv_on_sync: KvOnSync = "drop",
) -> AbstractAsyncContextManager[Engine]:
    """An engine, for the length of an `async with`; its processes are gone afterwards.

    Args:
        kind: `vllm`, `transformers`, `scripted`, or whatever else is among `ENGINES`; or one with options of its own,
            such as `Vllm(threads=2)`.
        model: the model folder, as `save_pretrained` writes it; the scripted engine does not read it.
        policy: of `scripted`: a function from ids to the next ids; other engines take none.
        context_tokens: longest sequence in tokens, prompt included (>= 2); None: what the model's config.json says.
        dtype: of weights and cache; auto is float32 on CPU, bfloat16 on a GPU.
        max_sessions: most sessions open at once (>= 1); opening one more waits until one is closed. vLLM opens fewer
            where the lengths that they are expected to reach do not fit into its cache.
        seed: of the engine's own random stream, used by sessions without a seed of their own.
        forbidden_ids: ids that are never sampled: give `Renderer.forbidden_ids`. `Rollouts` refuses an engine whose ids
            are not those of its renderer.
        growth_tokens: ids that a session can gain after its prompt (>= 1), `RolloutLimits.most_tokens`: it bounds the
            first guess of how many sessions fit into the cache. None: unknown.
        kv_on_sync: what becomes of keys, values and states of open sessions when weights change.

    Raises:
        ConfigError: unknown kind; and as `EngineKind.open`.
    """
    opening = Opening(Path(model), context_tokens, dtype, max_sessions, seed, forbidden_ids, growth_tokens, kv_on_sync)
    if (policy is not None) != (kind == Scripted.kind):
        raise ConfigError("policy of engine", kind, "give a policy with the engine 'scripted', and with no other")
    if policy is not None:
        return Scripted(policy).open(opening)
    if isinstance(kind, Scripted):
        return kind.open(opening)
    return ENGINES.chosen(kind).open(opening)
