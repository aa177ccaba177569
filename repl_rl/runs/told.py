"""What a run folder says of itself: its settings, a row of figures a step, and how it ended."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from repl_rl.errors import StoreError
from repl_rl.machine.files import Json

RUNS = Path("runs")
"""Where runs are looked for, and made, unless another folder is named."""
CONFIG, METRICS, SUMMARY = "config.toml", "metrics.jsonl", "summary.json"


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
    file = run / CONFIG
    try:
        return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise StoreError(f"{str(file)!r} cannot be read: {error}") from error


def whole_lines(file: Path) -> Iterator[str]:
    """The lines of a file that ends where its writer was stopped: without a last one that has no end."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    yield from text[: text.rfind("\n") + 1].split("\n")[:-1]


def rows_of(run: Path) -> list[dict[str, Json]]:
    """The rows of `metrics.jsonl`, a step each; lines that are none are left out."""
    found: list[dict[str, Json]] = []
    for line in whole_lines(run / METRICS):
        try:
            row = json.loads(line)
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
    if not file.is_file():
        return None
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{str(file)!r} cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise StoreError(f"{str(file)!r} cannot be read: it holds no object")
    return said
