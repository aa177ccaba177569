"""A tiny model of each family, made once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.models.zoo import ZOO

Made = Callable[[str], Path]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The folder of a family's model."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            family = next(family for family in ZOO if family.name == name)
            folders[name] = family.write(tmp_path_factory.mktemp("zoo") / "model")
        return folders[name]

    return folder
