"""Files that are there whole or not at all."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

Json = str | int | float | bool | None | Mapping[str, "Json"] | Sequence["Json"]
"""What a file of JSON holds."""


@contextmanager
def whole_file(final: Path) -> Iterator[Path]:
    """A path to write to. It takes the place of `final` when the block ends well; else nothing of it is left."""
    final.parent.mkdir(parents=True, exist_ok=True)
    # of this process alone: two that write the same file at a time each leave a whole one
    torn = final.with_name(f".{final.name}.{os.getpid()}.unfinished")
    torn.unlink(missing_ok=True)
    try:
        yield torn
        os.replace(torn, final)
    except BaseException:
        torn.unlink(missing_ok=True)
        raise


def lies_in(folder: Path, file: Path) -> bool:
    """False where `file` is a link, or lies below one, that leads out of `folder`."""
    return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder))


def write_whole(final: Path, text: str) -> None:
    """Write `text` as UTF-8, in place of an older file."""
    with whole_file(final) as torn:
        torn.write_text(text, encoding="utf-8")
