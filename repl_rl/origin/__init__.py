"""Sources of a policy: a folder, a model of the hub, a GGUF file or adapters. Each becomes the same kind of folder.

That folder is what `save_pretrained` writes: config.json, *.safetensors, the tokenizer. Renderer, engine and trainer
read nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.machine.assets import asset
from repl_rl.origin.adapters import base_of, holds_adapters, merge
from repl_rl.origin.gguf import dequantise
from repl_rl.origin.hub import HubName, download

__all__ = ["BUNDLED", "Origin", "Tell", "resolve"]

BUNDLED = "builtin:quickstart"
Tell = Callable[[str], None]
"""Callback for a progress line to the user: before slow work, and when a cached copy is used instead."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Policy that was found or made."""

    folder: Path
    """Folder of its weights, config and tokenizer."""
    reference: str
    """Reference that finds it again: the given text; for a model of the hub, its name with the commit."""
    fallback: str | None = None
    """Reason why a cached copy is used instead of the hub, for the base of adapters too; None means that none is."""


def resolve(model: str, place: Path, tell: Tell) -> Origin:
    """Find or make the policy `model`: builtin:quickstart, an existing path, or NAME or NAME@REVISION of the hub.

    A converted policy (dequantized or merged) is made once, in a folder in `place`, atomically.

    Raises:
        ConfigError: it does not exist, or cannot be loaded or read; nothing is written then.
    """
    return _resolve(model, place, tell, ())


def _resolve(model: str, place: Path, tell: Tell, above: tuple[Path, ...]) -> Origin:
    if model == BUNDLED:
        return Origin(asset("policies/quickstart"), model)
    # A path wins over a name of the hub.
    path = Path(model)
    if path.is_file():
        return Origin(dequantise(path, place, tell), model)
    if path.is_dir():
        return _merged(path, model, place, tell, above)
    name = HubName.of(model)
    if name is None:
        remedy = "give a folder with weights, config and tokenizer, a .gguf file, or a model of the hub as owner/name"
        raise ConfigError("model folder", model, f"it is not there; {remedy}")
    copy = download(name, tell)
    merged = _merged(copy.folder, str(copy.name), place, tell, above)
    return replace(merged, fallback=copy.fallback or merged.fallback)


def _merged(folder: Path, reference: str, place: Path, tell: Tell, above: tuple[Path, ...]) -> Origin:
    """Return `folder`, or if it holds only adapters, a folder in which they are merged into their base.

    `above`: the adapters whose base this folder is.
    """
    if not holds_adapters(folder):
        return Origin(folder, reference)
    given = base_of(folder)
    beside = folder / given
    # Adapters may name adapters as their base, so a cycle is possible.
    try:
        if folder.resolve() in above:
            raise ConfigError("model folder", str(folder), "these adapters are their own base; name another")
        # `./base` and `../base` are relative to the adapters. A plain name may also be in the working folder.
        theirs = given.startswith(("./", "../")) or not Path(given).exists()
        here = str(beside) if beside.exists() and theirs else given
        base = _resolve(here, place, tell, (*above, folder.resolve()))
    except ConfigError as error:
        raise ConfigError(f"base of the adapters in {folder}", given, f"it cannot be had: {error}") from error
    return Origin(merge(folder, base.folder, place, tell), reference, base.fallback)
