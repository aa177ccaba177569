"""Bound on what a compressed file may unpack to."""

MOST_RECORD_BYTES = 32 << 20
"""Longest record that is read, bytes.

A trajectory of a million tokens is smaller. Compressed, such a record may have a thousandth of these bytes.
"""
MOST_RATIO = 100
"""Most bytes that are unpacked per byte on disk, beyond one record. Text does not compress that well."""


def most_unpacked(size: int) -> int:
    """Return the most bytes that are unpacked of `size` bytes on disk."""
    return MOST_RECORD_BYTES + MOST_RATIO * size


def beyond(most: int) -> str:
    """Return the reason to stop at a file that unpacks to more than `most` bytes."""
    return f"it unpacks to more than {most:,} bytes, {MOST_RATIO} times what is on disk; the rest is not read"
