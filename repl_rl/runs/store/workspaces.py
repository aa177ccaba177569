"""Workspaces beside the trajectories that began with them: `workspaces/DIGEST.json`, each of them once."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from repl_rl.errors import StoreError
from repl_rl.machine.files import lies_in, write_whole
from repl_rl.record.setup import Setup

_FOLDER = "workspaces"
_MOST_BYTES = 256 << 20
"""More than a workspace may have."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredWorkspace:
    """A workspace that a record names. It is read when its content is asked for; equal digests are equal."""

    digest: str
    folder: Path | None
    """Where the trajectories lie; None: in no folder."""

    @property
    def content(self) -> bytes:
        """See `Setup.content`.

        Raises:
            StoreError: it is not stored here, or is not what its name says.
        """
        if self.folder is None:
            raise StoreError(
                f"the workspace {self.digest[:12]} was not stored with its trajectory; give the run's folder"
            )
        path = _path(self.folder, self.digest)
        there = os.path.lexists(path)
        if there and (not lies_in(self.folder, path) or not path.is_file() or path.stat().st_size > _MOST_BYTES):
            raise StoreError(f"the workspace {path} is no file of its run, or too large; copy it from its run")
        try:
            found = path.read_bytes()
        except OSError as error:
            raise StoreError(f"the workspace {path} cannot be read: {error.strerror}; copy it from its run") from error
        digest = hashlib.sha256(found).hexdigest()
        if digest != self.digest:
            raise StoreError(f"the workspace {path} is damaged: its digest is {digest[:12]}; copy it from its run")
        return found

    def __eq__(self, other: object) -> bool:
        return getattr(other, "digest", None) == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def keep(folder: Path, setup: Setup | None) -> None:
    """Store what a trajectory in `folder` begins with, if it is not there yet.

    Raises:
        StoreError: it is a stored one that is not there any more.
    """
    if setup is not None and not (path := _path(folder, setup.digest)).exists():
        write_whole(path, setup.content.decode())


def _path(folder: Path, digest: str) -> Path:
    return folder / _FOLDER / f"{digest}.json"
