"""Workspaces next to their trajectories, as `workspaces/DIGEST.json`, each stored once."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from repl_rl.errors import StoreError
from repl_rl.machine.files import lies_in, write_whole
from repl_rl.record.setup import Setup

_FOLDER = "workspaces"
_MOST_BYTES = 256 << 20
"""Read limit in bytes; more than a workspace may have."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredWorkspace:
    """Workspace that a record names. Its content is read on first use; workspaces with equal digests are equal."""

    digest: str
    folder: Path | None
    """Folder of the trajectories; None means that the record is in no folder."""

    @property
    def content(self) -> bytes:
        """Content of the workspace; see `Setup.content`.

        Raises:
            StoreError: it is not stored here, or does not match its digest.
        """
        if self.folder is None:
            raise StoreError(
                f"the workspace {self.digest[:12]} was not stored with its trajectory; give the run's folder"
            )
        path = _path(self.folder, self.digest)
        there = os.path.lexists(path)
        # The folder may come from a stranger: follow no link out of it and read no oversized file.
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
    """Store the workspace of a trajectory in `folder`, if it is not stored yet.

    Raises:
        StoreError: it is a stored workspace whose file no longer exists.
    """
    if setup is not None and not (path := _path(folder, setup.digest)).exists():
        write_whole(path, setup.content.decode())


def _path(folder: Path, digest: str) -> Path:
    return folder / _FOLDER / f"{digest}.json"
