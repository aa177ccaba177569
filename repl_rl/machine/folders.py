"""Folders of one process, and folders that are there whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from repl_rl.machine.alone import alone, mark
from repl_rl.machine.outputs import Output, followed


@contextmanager
def private_folder(root: Path, prefix: str) -> Iterator[Path]:
    """A folder in `root` that this process has for itself; it is removed at the end.

    One that a killed process left behind is removed at the next start: that process is gone, and so is its lock. A
    process of another container that shares `root` has no number here, but it has its lock.
    """
    for left in root.glob(f"{prefix}*"):
        pid = left.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not _alive(int(pid)):
            with suppress(OSError), alone(left):
                shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=root) as folder,
        alone(Path(folder)),
    ):
        yield Path(folder)


@contextmanager
def whole_folder(final: Path, replaces: Output | None = None) -> Iterator[Path]:
    """A folder to fill. It becomes `final` when the block ends well; else nothing of it is left, parents included.

    Args:
        final: where it goes.
        replaces: the kind of folder that is made. It takes the place of one of its kind that is there, also where a
            link leads. None: the first one's stays where two processes make `final` at a time.

    Raises:
        ConfigError: what is there is not of that kind.
    """
    if replaces is not None:
        final = followed(replaces.thing, final)
        replaces.refuse_other(final)
    missing = [parent for parent in final.parents if not parent.exists()]
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with private_folder(final.parent, ".unfinished-") as torn:
            made = torn / final.name
            made.mkdir()
            if replaces is not None:
                mark(made, replaces.verb)
            yield made
            if replaces is not None:
                replaces.refuse_other(final)  # again: it may have changed since
                take_place(made, final)
                return
            try:
                os.rename(made, final)
            except OSError:
                if not final.is_dir():
                    raise
    except BaseException:
        with suppress(OSError):
            for parent in missing:
                parent.rmdir()
        raise


def take_place(made: Path, final: Path) -> None:
    """Rename `made` to `final`; a folder that is there goes only then, and stays where that fails."""
    with private_folder(final.parent, ".unfinished-") as torn:
        if not final.exists():
            os.rename(made, final)
            return
        older = torn / "older"
        os.rename(final, older)
        try:
            os.rename(made, final)
        except OSError:
            os.rename(older, final)
            raise


def _alive(pid: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
