"""Reads the names and shapes in a folder of safetensors files without loading a weight."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from repl_rl.errors import EngineError

Shapes = Mapping[str, tuple[int, ...]]

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def checkpoint_files(folder: Path) -> Sequence[Path]:
    """The files of the checkpoint in `folder`: the one that holds all of it, or those that its index names.

    Others beside them (`consolidated.safetensors`, adapters) are the same weights for other readers, or none of it.

    Raises:
        EngineError: there is no such file, or the index is unreadable or names one that is not there.
    """
    if (folder / WHOLE).is_file():
        return (folder / WHOLE,)
    if (folder / INDEX).is_file():
        try:
            named = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise EngineError(f"{folder / INDEX} cannot be read ({error}); get it again") from error
        if lost := [name for name in named if not (folder / name).is_file()]:
            raise EngineError(f"{folder} lacks {lost[0]}, which its index names; get it again")
        return tuple(folder / name for name in named)
    raise EngineError(f"{folder} has no {WHOLE} and no {INDEX}; save the policy with save_pretrained first")


def checkpoint_shapes(folder: Path) -> Shapes:
    """Name -> shape of every weight of the checkpoint in `folder`.

    Raises:
        EngineError: there is none, or one of its files is cut short.
    """
    return {name: shape for file in checkpoint_files(folder) for name, shape in _header(file).items()}


def refuse_other(folder: Path, trained: Shapes, known: Shapes) -> None:
    """Check that `folder` has all weights that training changes, and none that the open model does not know.

    Args:
        folder: where weights come from.
        trained: what the trainer writes of the open model's checkpoint.
        known: all of that checkpoint: what training leaves alone may be missing or there.

    Raises:
        EngineError: one is missing, unknown, or has another shape.
    """
    found = checkpoint_shapes(folder)
    allowed = {**known, **trained}
    wrong = sorted(name for name in trained.keys() | found.keys() if found.get(name) != allowed.get(name))
    if wrong:
        name = wrong[0]
        raise EngineError(
            f"{folder} does not fit the open model: {len(wrong)} weights differ, {name} is {found.get(name)} there and "
            f"{allowed.get(name)} here (None: absent); save the same model"
        )


def _header(file: Path) -> Shapes:
    # the format: 8 bytes, little endian, with the length of a JSON object of name -> dtype, shape, offsets
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            entries = json.loads(stream.read(length))
    except (ValueError, OverflowError, MemoryError) as error:
        raise EngineError(f"{file} is not a complete safetensors file ({error}); save it again") from error
    return {name: tuple(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"}
