"""What a console was prepared with, as a record names it and a sandbox takes it."""

from typing import Protocol


class Setup(Protocol):
    """The content of a workspace under its name: a task's own, or one that was stored with a run."""

    @property
    def digest(self) -> str:
        """SHA-256 of `content`, 64 lowercase hexadecimal digits."""

    @property
    def content(self) -> bytes:
        """The JSON that `repl_rl.tasks.Workspace` writes.

        Raises:
            StoreError: it was stored, and is not there any more or is damaged.
        """

    def __hash__(self) -> int:
        """Equal digests are equal."""
