"""What a person may choose about an engine, and the checks that need no heavy package."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from repl_rl.engine.base import Engine
from repl_rl.engine.checkpoint import refuse_incomplete
from repl_rl.errors import ConfigError
from repl_rl.settings.bounds import AtLeast, check_fields

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KvOnSync = Literal["drop", "keep"]
"""Treatment of keys, values and recurrent states of open sessions when weights change."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What every engine is told when it is opened."""

    folder: Path
    """The model, as `save_pretrained` writes it."""
    context_tokens: Annotated[int | None, AtLeast(2)] = None
    """Longest sequence in tokens, prompt included. None: what the model's config.json says."""
    dtype: Dtype = "auto"
    """Of weights and cache. auto is float32 on CPU, bfloat16 on a GPU."""
    max_sessions: Annotated[int, AtLeast(1)] = 256
    """Most sessions open at once (>= 1); opening one more waits until one is closed."""
    seed: int = 0
    """Of the engine's own random stream, used by sessions without a seed of their own."""
    forbidden_ids: frozenset[int] = frozenset()
    """Ids that are never sampled."""
    growth_tokens: Annotated[int | None, AtLeast(1)] = None
    """Tokens that a session can gain after its prompt, as far as its limits are known (>= 1). None: unknown."""
    kv_on_sync: KvOnSync = "drop"

    def __post_init__(self) -> None:
        check_fields(self)


class EngineKind(ABC):
    """A kind of engine that a person can choose: a frozen dataclass whose fields are its options.

    A new one is a file with such a class, and one line of the table in `repl_rl.engine`, or `ENGINES.add(kind)`.
    """

    kind: ClassVar[str]
    about: ClassVar[str]

    @abstractmethod
    def open(self, opening: Opening) -> AbstractAsyncContextManager[Engine]:
        """The engine, for the length of an `async with`; its processes are gone afterwards.

        Raises:
            ConfigError: a package or the model folder is missing, an option does not fit, or the model cannot forbid
                an id.
        """

    def check(self, opening: Opening) -> None:
        """Refuse a model that engines of this kind cannot sample from: within a second, but for the import of heavy
        packages, and before anything starts.

        Raises:
            ConfigError: as `open`, as far as the model's folder tells.
        """
        return

    def check_sync(self, folder: Path) -> None:
        """Refuse a model of which engines of this kind do not take new weights: it can be sampled, but not trained.

        Raises:
            ConfigError: it is one.
        """
        return

    def doctor(self) -> str:
        """What of it is installed, in a few words.

        Raises:
            ConfigError: a package is missing; the message ends with the remedy.
        """
        return "nothing of its own to install"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model folder says about itself, read from its config.json."""

    context_tokens: int


def read_model_folder(opening: Opening) -> ModelFacts:
    """Check that the folder holds a model and read what the engines need to know beforehand.

    Raises:
        ConfigError: there is no such folder, no readable config.json, no weights, or a file of them is cut short; the
            context is too long for it, or nobody says how long it may be.
    """
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
    refuse_incomplete(folder)
    if not isinstance(config, dict):
        raise ConfigError("model folder", str(folder), f"its config.json is no JSON object; {remedy}")
    longest = longest_context(config)
    context_tokens = opening.context_tokens or longest
    if context_tokens is None:
        raise ConfigError(
            "context_tokens", None, f"the model in {folder} does not say how many it takes; give a number"
        )
    if longest is not None and context_tokens > longest:
        raise ConfigError("context_tokens", context_tokens, f"the model in {folder} takes at most {longest}")
    return ModelFacts(context_tokens=context_tokens)


_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")


def longest_context(config: Mapping[str, object]) -> int | None:
    """Most tokens that a model with this config.json takes, that of its text part if it has several; None: it does not
    say, as models without attention do not."""
    text = config.get("text_config")
    parts = [config, *([text] if isinstance(text, dict) else [])]
    return next((int(str(part[name])) for part in parts for name in _LENGTHS if part.get(name) is not None), None)
