"""Parser of TOML from files that a stranger may have written: bounded in size and in the depth of keys."""

import re
import tomllib
from collections.abc import Mapping

MOST_BYTES = 1 << 20
"""Maximum size of a settings file, bytes. A usual file has a few kB, and most of it is a recorded prompt."""
MOST_PARTS = 32
"""Largest number of parts in a dotted key, tables included. No setting has more than four."""
MOST_LETTERS = 256
"""Longest dotted key, characters, tables included."""
MOST_BITS = 64
"""Largest integer, bits. TOML promises no more."""
_NO_KEYS = re.compile(
    r'"""(?:[^\\]|\\(?:.|\Z))*?(?:"{3,5}|\Z)'
    r"|'''.*?(?:'{3,5}|\Z)"
    r'|"[^"\\\n]*(?:\\.[^"\\\n]*)*"?'
    r"|'[^'\n]*'?"
    r"|#[^\n]*",
    re.DOTALL,
)
"""Pattern for a string or a comment. It also matches an unterminated string, so that no text is searched twice."""
_LONG_KEY = re.compile(rf"(?<![\w-])(?:[\w-]+[ \t]*\.[ \t]*){{{MOST_PARTS}}}", re.ASCII)
"""Key with more than `MOST_PARTS` parts, where a letter replaces each text."""


class TooLong(ValueError):
    """TOML that is too large, or has a key or an integer that is too long."""


def parse_toml(text: str) -> dict[str, object]:
    """Parse TOML in a time that is proportional to its length.

    Raises:
        TooLong: the text is too large, or a key or an integer is too long.
        ValueError: the text is not TOML.
        RecursionError: values are nested too deeply.
    """
    # A text of fewer characters can have more bytes, at most four times as many.
    if len(text) > MOST_BYTES:
        raise TooLong(f"it has more than {MOST_BYTES:,} bytes")
    # tomllib's time is quadratic in the number of parts, so check it before.
    if _LONG_KEY.search(_NO_KEYS.sub(_replace, text)):
        raise TooLong(f"a key has more than {MOST_PARTS} parts")
    found = tomllib.loads(text)
    _validate_bounds(found)
    return found


def _replace(found: re.Match[str]) -> str:
    """Return one letter for a text, which may be a part of a key, and nothing for a comment."""
    return "" if found[0].startswith("#") else "t"


def _validate_bounds(value: object, parts: int = 0, letters: int = 0) -> None:
    """Raise TooLong for a key that code cannot join, or an integer that Python cannot print, in a bounded time."""
    if isinstance(value, list):
        for item in value:
            _validate_bounds(item)
    elif isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise TooLong(f"an integer has more than {MOST_BITS} bits")
    elif isinstance(value, Mapping):
        for key, one in value.items():
            if parts == MOST_PARTS:
                raise TooLong(f"a key has more than {MOST_PARTS} parts")
            if letters + len(key) > MOST_LETTERS:
                raise TooLong(f"a key has more than {MOST_LETTERS} characters")
            _validate_bounds(one, parts + 1, letters + len(key) + 1)
