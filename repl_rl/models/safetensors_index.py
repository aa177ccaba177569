"""Names and shapes in a folder of safetensors files, read without loading a weight."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from repl_rl.errors import ConfigError, EngineError

WeightShapes = Mapping[str, tuple[int, ...]]
"""Shape of each weight, by its name in the checkpoint."""

WHOLE = "model.safetensors"
"""File that holds a whole checkpoint."""
INDEX = "model.safetensors.index.json"
"""File that names the files of a checkpoint in several parts."""


def list_checkpoint_files(folder: Path) -> Sequence[Path]:
    """Return the files of the checkpoint in `folder`: the one that holds all of it, or those that its index names.

    Other files in the folder (`consolidated.safetensors`, adapters) hold the same weights for other programs, or do not
    belong to the checkpoint.

    Raises:
        EngineError: there is no checkpoint, or its index is unreadable or names a missing file.
    """
    if (folder / WHOLE).is_file():
        return (folder / WHOLE,)
    if (folder / INDEX).is_file():
        try:
            file_names = sorted(
                set(map(str, json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
            )
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise EngineError(f"{folder / INDEX} cannot be read ({error}); get it again") from error
        if missing := [name for name in file_names if not (folder / name).is_file()]:
            raise EngineError(f"{folder} lacks {missing[0]}, which its index names; get it again")
        return tuple(folder / name for name in file_names)
    raise EngineError(f"{folder} has no {WHOLE} and no {INDEX}; save the policy with save_pretrained first")


def read_checkpoint_shapes(folder: Path) -> WeightShapes:
    """Return the shape of every weight of the checkpoint in `folder`, by name.

    Raises:
        EngineError: there is no checkpoint, or one of its files is truncated.
    """
    return {name: shape for file in list_checkpoint_files(folder) for name, shape in _read_header(file).items()}


def validate_checkpoint_names(folder: Path, trained: WeightShapes, known: WeightShapes) -> None:
    """Check that `folder` has all weights that training changes, and none that the open model does not know.

    Args:
        folder: source of the new weights.
        trained: weights of the open model's checkpoint that the trainer writes.
        known: all weights of that checkpoint. Those that training does not change are optional.

    Raises:
        EngineError: a weight is missing, unknown, or has another shape.
    """
    shapes = read_checkpoint_shapes(folder)
    # A weight may be left out only if it is not trained; every weight that is there must have the known shape.
    allowed = {**known, **trained}
    mismatched = sorted(name for name in trained.keys() | shapes.keys() if shapes.get(name) != allowed.get(name))
    if mismatched:
        name = mismatched[0]
        raise EngineError(
            f"{folder} does not fit the open model: {len(mismatched)} weights differ, {name} is {shapes.get(name)} "
            f"there and {allowed.get(name)} here (None: absent); save the same model"
        )


def validate_checkpoint_complete(folder: Path) -> None:
    """Check the file sizes of the checkpoint in `folder`, since an interrupted download or copy leaves truncated files.

    Raises:
        ConfigError: the index cannot be read or names a missing file, or a file is truncated.
    """
    # A folder without either file may hold adapters or another layout, so check all of its files.
    known = any((folder / name).is_file() for name in (WHOLE, INDEX))
    try:
        for file in list_checkpoint_files(folder) if known else sorted(folder.glob("*.safetensors")):
            _read_header(file)
    except EngineError as error:
        raise ConfigError("model folder", str(folder), str(error)) from error


def _read_header(file: Path) -> WeightShapes:
    # Format: 8 bytes with the little-endian length of a JSON object of name -> dtype, shape, offsets; then the data.
    remedy = "it was cut short in a download or copy; get it again"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > size - 8:
                raise EngineError(f"{file} has {size} bytes, and its header takes {8 + length}; {remedy}")
            entries = json.loads(stream.read(length))
        weights = {name: entry for name, entry in entries.items() if name != "__metadata__"}
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in weights.items()}
        # The largest offset gives the size of the complete file.
        end = 8 + length + max((int(entry["data_offsets"][1]) for entry in weights.values()), default=0)
    except OSError as error:
        raise EngineError(f"{file} cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise EngineError(f"{file} is not a complete safetensors file ({error}); {remedy}") from error
    if size != end:
        raise EngineError(f"{file} has {size} bytes, and its header says {end}; {remedy}")
    return shapes
