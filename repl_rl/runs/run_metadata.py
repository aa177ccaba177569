"""Readers for the settings, per-step metrics and summary of a run folder."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from repl_rl.errors import ConfigError, StoreError
from repl_rl.settings import bounded_toml
from repl_rl.settings.migrate_run_settings import rename_recorded
from repl_rl.utils.atomic_files import Json, is_inside

RUNS = Path("runs")
"""Default folder of runs."""
MOST_BYTES = 256 << 20
"""Largest file of a run folder that is read as a whole, bytes; a run of a million steps writes less."""
CONFIG, METRICS, SUMMARY = "config.toml", "metrics.jsonl", "summary.json"
"""Files of a run folder: its settings, one row of metrics per step, and its result."""


def parse_finite_json(text: str) -> object:
    """Parse JSON and replace non-finite numbers by None, because JavaScript's JSON has none.

    Raises:
        ValueError, RecursionError: the text is not JSON, or too deeply nested to be written again.
    """
    # Dumping once more finds values that are nested too deeply for the report.
    value: object = json.loads(text, parse_constant=lambda _: None, parse_float=_parse_finite_float)
    json.dumps(value)
    return value


def _parse_finite_float(text: str) -> float | None:
    return value if math.isfinite(value := float(text)) else None


def is_run_folder(run: Path) -> bool:
    """Return True if a training made the folder; an evaluation has settings too, but no `trainer` section.

    Raises:
        StoreError: its settings cannot be read.
    """
    return (run / "trajectories").is_dir() or "trainer" in read_settings(run)


def validate_run_folder(run: Path) -> None:
    """Raise StoreError for a folder that no training made.

    Raises:
        StoreError: it is not a run folder, or its settings cannot be read.
    """
    if not is_run_folder(run):
        raise StoreError(f"{str(run)!r} is no run folder; give one with config.toml and trajectories/")


def read_settings(run: Path) -> Mapping[str, object]:
    """Return the settings in `config.toml`, empty if the file does not exist.

    Raises:
        StoreError: it cannot be read.
    """
    if (text := read_text(run / CONFIG, max_bytes=bounded_toml.MOST_BYTES)) is None:
        return {}
    try:
        settings = bounded_toml.parse_toml(text)
        # Dump once as a check: settings may be nested too deeply for code that walks them.
        json.dumps(settings, default=str)
        return rename_recorded(settings)
    except (ConfigError, ValueError, RecursionError) as error:
        raise StoreError(f"{str(run / CONFIG)!r} cannot be read: {error}") from error


def read_text(file: Path, errors: str = "strict", max_bytes: int = MOST_BYTES) -> str | None:
    """Return the text of a file of a run folder, or None if it does not exist. The folder may come from a stranger.

    Args:
        file: the file.
        errors: treatment of bytes that are not UTF-8, as in `bytes.decode`.
        max_bytes: largest size of the file, bytes.

    Raises:
        StoreError: it is a link that leads out of the folder, is larger than `max_bytes`, or cannot be read.
    """
    if not is_inside(file.parent, file):
        raise StoreError(f"{str(file)!r} is a link that leads out of its folder; it is not followed")
    if not file.is_file():
        return None
    try:
        if (size := file.stat().st_size) > max_bytes:
            raise StoreError(f"{str(file)!r} has {size:,} bytes; at most {max_bytes:,} are read")
        return file.read_text(encoding="utf-8", errors=errors)
    except (OSError, ValueError) as error:
        raise StoreError(f"{str(file)!r} cannot be read: {error}") from error


def read_whole_lines(file: Path) -> Iterator[str]:
    """Yield the complete lines of a file; an unterminated last line of a killed writer is skipped.

    Raises:
        StoreError: as `read_text`.
    """
    text = read_text(file, errors="replace") or ""
    yield from text[: text.rfind("\n") + 1].split("\n")[:-1]


def read_metric_rows(run: Path) -> list[dict[str, Json]]:
    """Return the rows of `metrics.jsonl`, one per step. Lines that are not JSON objects are skipped.

    Non-finite numbers become None.

    Raises:
        StoreError: the file cannot be read.
    """
    rows: list[dict[str, Json]] = []
    for line in read_whole_lines(run / METRICS):
        try:
            # A torn or foreign line must not hide the other steps.
            row = parse_finite_json(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def read_summary(run: Path) -> dict[str, Json] | None:
    """Return the content of `summary.json`, or None if it does not exist yet.

    Raises:
        StoreError: it cannot be read.
    """
    file = run / SUMMARY
    if (text := read_text(file)) is None:
        return None
    try:
        summary = parse_finite_json(text)
    except (ConfigError, ValueError, RecursionError) as error:
        raise StoreError(f"{str(file)!r} cannot be read: {error}") from error
    if not isinstance(summary, dict):
        raise StoreError(f"{str(file)!r} cannot be read: it holds no object")
    return summary
