"""Where a policy comes from: a folder, a name of the hub, a GGUF file or adapters; each becomes one kind of folder.

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
"""Given a line for the person who waits: before something slow, and where a cached copy is used instead."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A policy that was found."""

    folder: Path
    """Its weights, config and tokenizer."""
    reference: str
    """What finds it again: as it was given, but for a name of the hub, which has its commit."""
    fallback: str | None = None
    """Why a cached copy stands in for what the hub has now, the base of adapters included; None: none does."""


def resolve(model: str, place: Path, tell: Tell) -> Origin:
    """The policy that `model` means: builtin:quickstart, else what lies there, else NAME or NAME@REVISION of the hub.

    What has to be made of it (dequantised, merged) is made once, in a folder in `place`, whole or not at all.

    Raises:
        ConfigError: there is no such thing, or it cannot be had or read; nothing has been written then.
    """
    return _resolve(model, place, tell, ())


def _resolve(model: str, place: Path, tell: Tell, above: tuple[Path, ...]) -> Origin:
    if model == BUNDLED:
        return Origin(asset("policies/quickstart"), model)
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
    """`folder`, or where it holds adapters alone, one in which they are part of their base.

    `above`: the adapters that have this folder as their base.
    """
    if not holds_adapters(folder):
        return Origin(folder, reference)
    given = base_of(folder)
    beside = folder / given
    try:
        if folder.resolve() in above:
            raise ConfigError("model folder", str(folder), "these adapters are their own base; name another")
        # `../base` was written by who looked from the adapters; only a plain name may be one of the working folder.
        theirs = given.startswith(("./", "../")) or not Path(given).exists()
        here = str(beside) if beside.exists() and theirs else given
        base = _resolve(here, place, tell, (*above, folder.resolve()))
    except ConfigError as error:
        raise ConfigError(f"base of the adapters in {folder}", given, f"it cannot be had: {error}") from error
    return Origin(merge(folder, base.folder, place, tell), reference, base.fallback)
