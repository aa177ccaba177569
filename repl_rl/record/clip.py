"""The middle of a long text gives way to a marker."""

TEXT_CHARS = 4000
"""Characters of one text that a person is shown."""


def clip(text: str, most: int = TEXT_CHARS) -> str:
    """`text`, or where it has more than `most` characters its two ends, with a visible mark of what is left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters not shown ...]\n{text[len(text) - half :]}"
