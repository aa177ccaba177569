"""What a person may choose about an engine, and the checks that need no heavy package."""

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from repl_rl.errors import ConfigError


class Drive(StrEnum):
    """How the vllm engine is driven."""

    SESSION = "session"
    """One streaming-input request a rollout; its keys and values stay in the engine between lines."""
    REQUEST = "request"
    """A new request a line; only the prefix cache is kept between lines."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Knobs of every engine; an engine ignores none of those that it names in its own docstring."""

    context_tokens: int | None = None
    """Longest sequence in tokens, prompt included. None: what the model's config.json says."""
    dtype: str = "auto"
    """Of weights and cache: auto, float32, bfloat16 or float16. auto is float32 on CPU, bfloat16 on a GPU."""
    seed: int = 0
    """Of the engine's own random stream, used by sessions without a seed of their own."""
    max_sessions: int = 256
    """Most sessions open at once (>= 1); opening one more waits until one is closed."""
    kv_cache_gib: int | None = None
    """vllm: memory for keys and values, in GiB (>= 1). None: 1 on CPU, what vLLM takes by default on a GPU."""
    block_size: int | None = None
    """vllm: ids that share a block of keys and values, a power of two >= 16. None: 32 on CPU, where vLLM's own 128 is
    longer than most prompts, so that nothing of them is shared; vLLM's choice on a GPU."""
    threads: int | None = None
    """vllm on CPU: threads of the engine's process (>= 1). None: all cores but one, at least 1."""
    drive: Drive = Drive.SESSION
    """vllm: how it is driven."""
    sleep: bool = False
    """vllm on a GPU that it shares with the trainer: leave its memory to the update, from rollouts to weight sync."""
    verbose: bool = False
    """vllm: show its log from INFO upwards; otherwise only errors."""

    def __post_init__(self) -> None:
        for name in ("max_sessions", "kv_cache_gib", "threads"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, value, "give at least 1")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError("dtype", self.dtype, "choose auto, float32, bfloat16 or float16")
        if self.block_size is not None and (self.block_size < 16 or self.block_size & (self.block_size - 1)):
            raise ConfigError("block_size", self.block_size, "give a power of two, at least 16")
        if self.context_tokens is not None and self.context_tokens < 2:
            raise ConfigError("context_tokens", self.context_tokens, "give at least 2: a prompt id and a sampled one")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model folder says about itself, read from its config.json."""

    context_tokens: int
    tied: bool
    """The output layer is the input embedding."""


def read_model_folder(folder: Path, options: EngineOptions) -> ModelFacts:
    """Check that `folder` holds a model and read what the engines need to know beforehand.

    Raises:
        ConfigError: there is no such folder, no readable config.json, no weights, or the context is too long for it.
    """
    remedy = "give a folder with config.json and model.safetensors, as save_pretrained writes it"
    if not folder.is_dir():
        raise ConfigError("model folder", str(folder), f"it does not exist; {remedy}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("model folder", str(folder), f"its config.json cannot be read ({error}); {remedy}") from error
    if not any(folder.glob("*.safetensors")):
        raise ConfigError("model folder", str(folder), f"it has no *.safetensors file; {remedy}")
    longest = int(config.get("max_position_embeddings", options.context_tokens or 2048))
    context_tokens = options.context_tokens or longest
    if context_tokens > longest:
        raise ConfigError("context_tokens", context_tokens, f"the model in {folder} takes at most {longest}")
    return ModelFacts(context_tokens=context_tokens, tied=bool(config.get("tie_word_embeddings", False)))
