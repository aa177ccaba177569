"""Initial content of a console, as a record names it and a sandbox uses it."""

from typing import Protocol


class Setup(Protocol):
    """Content of a workspace under its digest: a task's own, or one that was stored with a run."""

    @property
    def digest(self) -> str:
        """SHA-256 of `content`, 64 lowercase hexadecimal digits."""

    @property
    def content(self) -> bytes:
        """The JSON that `repl_rl.tasks.Workspace` writes.

        Raises:
            StoreError: the stored content is missing or damaged.
        """

    def __hash__(self) -> int:
        """Return a hash that is equal for equal digests."""
