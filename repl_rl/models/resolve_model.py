"""Resolution of a policy's source (a folder, a model of the hub, a GGUF file or adapters) to a folder.

That folder is what `save_pretrained` writes: config.json, *.safetensors, the tokenizer. Renderer, engine and trainer
read nothing else.

`is_bundled_kind` recognizes the bundled policy, and policies trained from it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.models.convert_gguf import convert_gguf
from repl_rl.models.hub import HubName, download_model
from repl_rl.models.merge_adapters import has_only_adapters, merge_adapters_into_folder, read_base_model
from repl_rl.utils.package_data import find_asset

__all__ = ["BUNDLED", "LogLine", "ResolvedModel", "is_bundled_kind", "resolve_model"]

BUNDLED = "builtin:quickstart"
"""Name of the policy that the package contains."""
LogLine = Callable[[str], None]
"""Callback for a progress line to the user: before slow work, and when a cached copy is used instead."""
_SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
"""Keys of config.json that give the shape of a policy."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Policy that was found or made."""

    folder: Path
    """Folder of its weights, config and tokenizer."""
    reference: str
    """Reference that finds it again: the given text; for a model of the hub, its name with the commit."""
    fallback: str | None = None
    """Reason why a possibly outdated cached copy of the model, or of its adapters' base, is used.

    None means that no such copy is used.
    """


def resolve_model(model: str, cache_folder: Path, log: LogLine) -> ResolvedModel:
    """Find or make the policy `model`: builtin:quickstart, an existing path, or NAME or NAME@REVISION of the hub.

    A converted policy (dequantized or merged) is made once, in a folder in `cache_folder`, atomically.

    Raises:
        ConfigError: it does not exist, or cannot be loaded or read; nothing is written then.
    """
    return _resolve(model, cache_folder, log, ())


def is_bundled_kind(folder: Path) -> bool:
    """Return True if config.json has the bundled policy's shape and tokenizer.json its vocabulary.

    Every checkpoint of a run and every policy of `repl-rl sft` has both, in all versions. No pretrained model has this
    vocabulary, because it was made for the bundled policy (`repl_rl.sft.create_random_model`). A folder that cannot
    be read gives False.
    """
    bundled = _read_identity(find_asset("policies/quickstart"))
    return bundled is not None and _read_identity(folder) == bundled


def _resolve(model: str, cache_folder: Path, log: LogLine, ancestors: tuple[Path, ...]) -> ResolvedModel:
    if model == BUNDLED:
        return ResolvedModel(find_asset("policies/quickstart"), model)
    # A path wins over a name of the hub.
    path = Path(model)
    if path.is_file():
        return ResolvedModel(convert_gguf(path, cache_folder, log), model)
    if path.is_dir():
        return _merge_if_adapters(path, model, cache_folder, log, ancestors)
    # Neither a file nor a folder: a model of the hub.
    name = HubName.parse(model)
    if name is None:
        remedy = "give a folder with weights, config and tokenizer, a .gguf file, or a model of the hub as owner/name"
        raise ConfigError("model folder", model, f"it does not exist; {remedy}")
    copy = download_model(name, log)
    merged = _merge_if_adapters(copy.folder, str(copy.hub_name), cache_folder, log, ancestors)
    return replace(merged, fallback=copy.fallback_reason or merged.fallback)


def _merge_if_adapters(
    folder: Path, reference: str, cache_folder: Path, log: LogLine, ancestors: tuple[Path, ...]
) -> ResolvedModel:
    """Return `folder`, or if it holds only adapters, a folder in which they are merged into their base.

    `ancestors`: the adapters whose base this folder is.
    """
    if not has_only_adapters(folder):
        return ResolvedModel(folder, reference)
    base_name = read_base_model(folder)
    adjacent = folder / base_name
    # Adapters may name adapters as their base, so a cycle is possible.
    try:
        if folder.resolve() in ancestors:
            remedy = "its adapters have themselves as their base; name a base model in adapter_config.json"
            raise ConfigError("model folder", str(folder), remedy)
        # `./base` and `../base` are relative to the adapters. A plain name may also be in the working folder.
        is_adjacent = base_name.startswith(("./", "../")) or not Path(base_name).exists()
        source = str(adjacent) if adjacent.exists() and is_adjacent else base_name
        base = _resolve(source, cache_folder, log, (*ancestors, folder.resolve()))
    except ConfigError as error:
        raise ConfigError(f"base of the adapters in {folder}", base_name, f"it cannot be loaded: {error}") from error
    return ResolvedModel(merge_adapters_into_folder(folder, base.folder, cache_folder, log), reference, base.fallback)


def _read_identity(folder: Path) -> object:
    """Return the shape and the vocabulary that identify the bundled policy, or None if they cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        added = [(token["id"], token["content"]) for token in tokenizer["added_tokens"]]
        return [config.get(name) for name in _SHAPE], tokenizer["model"]["vocab"], added
    # The files may have any content.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
