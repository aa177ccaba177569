"""Options of an engine that a user can choose, and checks that need no heavy package."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from repl_rl.deprecations import keeps_old_names
from repl_rl.engine.base import Engine
from repl_rl.errors import ConfigError
from repl_rl.models.safetensors_index import validate_checkpoint_complete
from repl_rl.settings.value_bounds import AtLeast, check_fields

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KvOnSync = Literal["drop", "keep"]
"""Treatment of keys, values and recurrent states of open sessions when weights change."""
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
"""Names of the longest sequence in configurations of different models."""


@keeps_old_names
@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options that every engine gets when it is opened."""

    folder: Path
    """Model folder, as `save_pretrained` writes it."""
    context_tokens: Annotated[int | None, AtLeast(2)] = None
    """Longest sequence in tokens, prompt included. None means the limit in the model's config.json."""
    dtype: Dtype = "auto"
    """Dtype of weights and cache. auto is float32 on CPU, bfloat16 on a GPU."""
    max_sessions: Annotated[int, AtLeast(1)] = 256
    """Maximum number of open sessions (>= 1); another one waits until one is closed."""
    seed: int = 0
    """Seed of the engine's random stream, which sessions without a seed use."""
    forbidden_ids: frozenset[int] = frozenset()
    """Ids that are never sampled."""
    max_growth_tokens: Annotated[int | None, AtLeast(1)] = None
    """Maximum number of tokens that a session gains after its prompt, as far as its limits are known (>= 1). None means
    unknown."""
    kv_on_sync: KvOnSync = "drop"

    def __post_init__(self) -> None:
        check_fields(self)


@keeps_old_names
class EngineConfig(ABC):
    """Config of a kind of engine that a user can choose: a frozen dataclass whose fields are its options.

    To add a kind, write such a class in a new file. Then add it to the table in `repl_rl.engine`, or call
    `ENGINES.add(kind)`.
    """

    kind: ClassVar[str]
    about: ClassVar[str]

    @abstractmethod
    def open(self, opening: EngineOptions) -> AbstractAsyncContextManager[Engine]:
        """Open the engine for the duration of an `async with` block. Its processes are gone afterwards.

        Raises:
            ConfigError: a package or the model folder is missing, an option does not fit, or the model cannot forbid an
                id.
        """

    def check(self, opening: EngineOptions) -> None:
        """Reject a model that engines of this kind cannot sample from.

        This takes less than a second, except for imports of heavy packages, and happens before anything starts.

        Raises:
            ConfigError: as `open`, as far as the model folder shows it.
        """
        return

    def check_sync(self, folder: Path) -> None:
        """Reject a model for which engines of this kind cannot load new weights. It can be sampled, but not trained.

        Raises:
            ConfigError: the model cannot be trained with this engine.
        """
        return

    def describe_status(self) -> str:
        """Return a short description of its installed packages.

        Raises:
            ConfigError: a package is missing; the message ends with the remedy.
        """
        return "nothing to install"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a model, read from the config.json in its folder."""

    context_tokens: int


def read_model_folder(opening: EngineOptions) -> ModelInfo:
    """Check that the folder holds a model, and read its properties that engines need.

    Raises:
        ConfigError: the folder, a readable config.json or weights are missing, or a weight file is truncated. Or the
            context is longer than the model allows, or its length is unknown.
    """
    # The folder has a config and complete weights.
    folder = opening.folder
    remedy = "give a folder with config.json and model.safetensors, as save_pretrained writes it"
    if not folder.is_dir():
        raise ConfigError("model folder", str(folder), f"it does not exist; {remedy}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("model folder", str(folder), f"its config.json cannot be read ({error}); {remedy}") from error
    if not any(folder.glob("*.safetensors")):
        raise ConfigError("model folder", str(folder), f"it has no *.safetensors file; {remedy}")
    validate_checkpoint_complete(folder)
    if not isinstance(config, dict):
        raise ConfigError("model folder", str(folder), f"its config.json is no JSON object; {remedy}")
    # The context is the user's choice up to the model's limit, or else that limit.
    longest = read_max_context(config)
    context_tokens = opening.context_tokens or longest
    if context_tokens is None:
        raise ConfigError("context_tokens", None, f"config.json in {folder} has no context length; give a number")
    if longest is not None and context_tokens > longest:
        raise ConfigError("context_tokens", context_tokens, f"the model in {folder} takes at most {longest}")
    return ModelInfo(context_tokens=context_tokens)


def read_max_context(config: Mapping[str, object]) -> int | None:
    """Return the maximum number of tokens of a model with this config.json, which may be that of its text part.

    None means that the file does not give it, as for models without attention.
    """
    # A composite model has its lengths in the configuration of its text part.
    text = config.get("text_config")
    tables = [config, *([text] if isinstance(text, dict) else [])]
    return next(
        (int(str(table[name])) for table in tables for name in _CONTEXT_KEYS if table.get(name) is not None), None
    )
