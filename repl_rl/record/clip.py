"""Shortening of long texts: a marker replaces the middle."""

TEXT_CHARS = 4000
"""Longest text that is shown to a person in full, characters."""


def clip(text: str, most: int = TEXT_CHARS) -> str:
    """Return `text`, or its two ends around a visible marker if it has more than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters not shown ...]\n{text[len(text) - half :]}"
