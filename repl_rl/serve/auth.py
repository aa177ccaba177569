"""API keys from a file or an environment variable, never from the command line, where `ps` would show them."""

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from repl_rl.errors import ConfigError

VARIABLE = "REPL_RL_API_KEYS"
"""Environment variable of API keys, with commas or white space between them."""
_MIN_KEY_CHARS = 16
"""Least length of a key, characters. Shorter ones could be guessed."""


class ApiKeys:
    """API keys, stored as digests. Without keys, every client has access."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        """Store the digests of the keys.

        Raises:
            ConfigError: a key is short enough to guess, or no header can hold it. The message does not show it.
        """
        unique_keys = list(dict.fromkeys(keys))
        for number, key in enumerate(unique_keys, 1):
            if len(key) < _MIN_KEY_CHARS:
                raise ConfigError(f"API key {number}, characters", len(key), f"give at least {_MIN_KEY_CHARS}")
            if not (key.isascii() and key.isprintable()):
                raise ConfigError(f"API key {number}", "not printable ASCII", "no header can hold it; make another")
        self._digests = [_compute_digest(key) for key in unique_keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find_owner(self, header: str | None) -> str | None:
        """Return a name for the sender of this `Authorization` header, or None without a valid key.

        Without configured keys the name is "". All keys are compared in constant time.
        """
        if not self._digests:
            return ""
        scheme, _, key = (header or "").partition(" ")
        key_digest = _compute_digest(key.strip())
        # Compare with every key, so that the duration does not depend on the one that matches.
        matches = [hmac.compare_digest(key_digest, digest) for digest in self._digests]
        return key_digest.hex()[:16] if scheme.lower() == "bearer" and any(matches) else None


def read_keys(file: Path | None) -> ApiKeys:
    """Load the keys of `file`, one per line, and of the environment variable.

    Raises:
        ConfigError: the file cannot be read or has no key, or a key is invalid.
    """
    keys = os.environ.get(VARIABLE, "").replace(",", " ").split()
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            remedy = "give a text file with one key per line"
            raise ConfigError("keys", str(file), f"it cannot be read: {error}; {remedy}") from error
        # Skip empty lines and comments.
        file_keys = [line for line in lines if line and not line.startswith("#")]
        if not file_keys:
            raise ConfigError("keys", str(file), "it has no key; write one per line")
        keys += file_keys
    return ApiKeys(keys)


def _compute_digest(key: str) -> bytes:
    """Return the digest of a key. Text of a header that has no UTF-8 form is replaced."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
