"""What a run folder says of itself: its settings, a row of figures a step, and how it ended."""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from repl_rl.errors import StoreError
from repl_rl.machine.files import Json, lies_in

RUNS = Path("runs")
"""Where runs are looked for, and made, unless another folder is named."""
MOST_BYTES = 256 << 20
"""Largest file of a run folder that is read as a whole: a million steps make less."""
CONFIG, METRICS, SUMMARY = "config.toml", "metrics.jsonl", "summary.json"


def finite_json(text: str) -> object:
    """JSON in which numbers that are not finite are None: a page of JavaScript reads no others.

    Raises:
        ValueError, RecursionError: it is no JSON, or too deep to be written again.
    """
    found: object = json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
    json.dumps(found)
    return found


def _finite(text: str) -> float | None:
    return value if math.isfinite(value := float(text)) else None


def is_run(run: Path) -> bool:
    """Whether a training made that folder: an evaluation has settings too, but none of a trainer.

    Raises:
        StoreError: its settings cannot be read.
    """
    return (run / "trajectories").is_dir() or "trainer" in settings_of(run)


def refuse_foreign(run: Path) -> None:
    """Refuse a folder that no training made.

    Raises:
        StoreError: it is none, or its settings cannot be read.
    """
    if not is_run(run):
        raise StoreError(f"{str(run)!r} is no run folder; give one with config.toml and trajectories/")


def settings_of(run: Path) -> Mapping[str, object]:
    """What `config.toml` says; nothing where there is none.

    Raises:
        StoreError: it cannot be read.
    """
    if (text := text_of(run / CONFIG)) is None:
        return {}
    try:
        found = tomllib.loads(text)
        json.dumps(found, default=str)  # it may be too deep for those who walk through it
        return found
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{str(run / CONFIG)!r} cannot be read: {error}") from error


def text_of(file: Path, errors: str = "strict") -> str | None:
    """The text of a file of a run folder, which may be a stranger's; None: there is no such file.

    Raises:
        StoreError: it is a link that leads out of the folder, is larger than any run makes it, or cannot be read.
    """
    if not lies_in(file.parent, file):
        raise StoreError(f"{str(file)!r} is a link that leads out of its folder; it is not followed")
    if not file.is_file():
        return None
    try:
        if (size := file.stat().st_size) > MOST_BYTES:
            raise StoreError(f"{str(file)!r} has {size:,} bytes; at most {MOST_BYTES:,} are read")
        return file.read_text(encoding="utf-8", errors=errors)
    except (OSError, ValueError) as error:
        raise StoreError(f"{str(file)!r} cannot be read: {error}") from error


def whole_lines(file: Path) -> Iterator[str]:
    """The lines of a file that ends where its writer was stopped: without a last one that has no end.

    Raises:
        StoreError: as `text_of`.
    """
    text = text_of(file, errors="replace") or ""
    yield from text[: text.rfind("\n") + 1].split("\n")[:-1]


def rows_of(run: Path) -> list[dict[str, Json]]:
    """The rows of `metrics.jsonl`, a step each; lines that are none are left out. What is not finite is None.

    Raises:
        StoreError: the file cannot be read.
    """
    found: list[dict[str, Json]] = []
    for line in whole_lines(run / METRICS):
        try:
            row = finite_json(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            found.append(row)
    return found


def summary_of(run: Path) -> dict[str, Json] | None:
    """What `summary.json` says; None: there is none yet.

    Raises:
        StoreError: it cannot be read.
    """
    file = run / SUMMARY
    if (text := text_of(file)) is None:
        return None
    try:
        said = finite_json(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{str(file)!r} cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise StoreError(f"{str(file)!r} cannot be read: it holds no object")
    return said
