"""Trajectory's workspace in the form of the report: shortened, and as text only."""

import base64
import json
from functools import lru_cache

from repl_rl.errors import StoreError
from repl_rl.machine.files import Json
from repl_rl.record.clip import clip
from repl_rl.record.setup import Setup
from repl_rl.tasks.workspace import size_of

_PART_CHARS = 1000
"""Most characters per value, file and program; the store keeps all of them."""
_MOST_PARTS = 20


def drawn(setup: Setup) -> dict[str, Json]:
    """Return the digest and a list of parts, each with its name, its size, and the beginning and end of its text."""
    try:
        return {"digest": setup.digest, "parts": _parts(setup)}
    except (StoreError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return {"digest": setup.digest, "parts": [["not readable", "", _legible(str(error))]]}


# The rollouts of a group share their workspace.
@lru_cache(maxsize=256)
def _parts(setup: Setup) -> list[Json]:
    said = json.loads(setup.content)
    parts: list[Json] = [_part(name, size_of(value), json.dumps(value)) for name, value in said["values"].items()]
    for path, data in said["files"].items():
        content = base64.b64decode(data)
        parts.append(_part(f"file {path}", f"{len(content):,} bytes", content.decode("utf-8", "backslashreplace")))
    if said["preload"]:
        parts.append(_part("imported", "", ", ".join(said["preload"])))
    if said["lines"]:
        parts.append(_part("lines", f"{len(said['lines']):,}", "\n".join(said["lines"])))
    if len(parts) > _MOST_PARTS:
        parts = [*parts[:_MOST_PARTS], [f"{len(parts) - _MOST_PARTS} more", "", ""]]
    return parts


def _part(name: str, size: str, text: str) -> list[Json]:
    return [_legible(name), size, _legible(text)]


def _legible(text: str) -> str:
    return clip(text, _PART_CHARS).encode("utf-8", "backslashreplace").decode("utf-8")
