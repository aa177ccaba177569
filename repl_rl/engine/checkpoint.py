"""Reads the names and shapes in a folder of safetensors files without loading a weight."""

import json
from collections.abc import Mapping
from pathlib import Path

from repl_rl.errors import EngineError

Shapes = Mapping[str, tuple[int, ...]]


def checkpoint_shapes(folder: Path) -> Shapes:
    """Name -> shape of every weight in `folder`/*.safetensors.

    Raises:
        EngineError: there is no such file, or one of them is cut short.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} has no *.safetensors file; save the policy with save_pretrained first")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes.update(_header(file))
    return shapes


def refuse_other(folder: Path, expected: Shapes) -> None:
    """Check that `folder` has exactly the `expected` weights.

    Raises:
        EngineError: one is missing, unknown, or has another shape.
    """
    found = checkpoint_shapes(folder)
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise EngineError(
            f"{folder} does not fit the open model: {len(wrong)} weights differ, {name} is {found.get(name)} there and "
            f"{expected.get(name)} here (None: absent); save the same model"
        )


def _header(file: Path) -> Shapes:
    # the format: 8 bytes, little endian, with the length of a JSON object of name -> dtype, shape, offsets
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            entries = json.loads(stream.read(length))
    except ValueError as error:
        raise EngineError(f"{file} is not a complete safetensors file ({error}); save it again") from error
    return {name: tuple(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"}
