"""Files that are written atomically."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

Json = str | int | float | bool | None | Mapping[str, "Json"] | Sequence["Json"]
"""Values that a JSON file can hold."""


@contextmanager
def whole_file(final: Path) -> Iterator[Path]:
    """Yield a path to write to, which replaces `final` if the block succeeds. Otherwise it is removed."""
    final.parent.mkdir(parents=True, exist_ok=True)
    # The name belongs to this process alone, so that of two concurrent writers each leaves a complete file.
    torn = final.with_name(f".{final.name}.{os.getpid()}.unfinished")
    torn.unlink(missing_ok=True)
    try:
        yield torn
        os.replace(torn, final)
    except BaseException:
        torn.unlink(missing_ok=True)
        raise


def lies_in(folder: Path, file: Path) -> bool:
    """Return True if `file` lies in `folder` after links are resolved."""
    return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder))


def write_whole(final: Path, text: str) -> None:
    """Write `text` as UTF-8 atomically, in place of an older file."""
    with whole_file(final) as torn:
        torn.write_text(text, encoding="utf-8")
