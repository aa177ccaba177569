"""Regular expressions with one group that users provide: for calls, blocks and answers."""

import re

from repl_rl.errors import ConfigError

_BRACED = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*"
BOXED = rf"\\boxed\{{({_BRACED})\}}"
"""Answer in LaTeX's \\boxed{}, which may contain braces to a depth of two, such as \\frac{\\sqrt{2}}{3}."""


def one_group(name: str, pattern: str, flags: re.RegexFlag = re.DOTALL) -> re.Pattern[str]:
    """Compile the regular expression of option `name`.

    Raises:
        ConfigError: it is not a regular expression, or does not have exactly one group.
    """
    try:
        compiled = re.compile(pattern, flags)
    except re.error as error:
        raise ConfigError(name, pattern, f"it is no regular expression: {error}") from error
    if compiled.groups != 1:
        raise ConfigError(name, pattern, f"it has {compiled.groups} groups; give exactly one")
    return compiled


def one_place(name: str, frame: str) -> str:
    """Return the frame of option `name`, after a check that it has one place for a text.

    Raises:
        ConfigError: it does not contain `{}` exactly once.
    """
    if frame.count("{}") != 1:
        raise ConfigError(name, frame, "mark the place of the text with one {}")
    return frame


def framed(frame: str, text: str) -> str:
    """Return `frame` with `text` in its place. Braces in `text` stay as they are."""
    # Not `str.format`, because the frame may contain other braces.
    before, _, after = frame.partition("{}")
    return before + text + after


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the group of the last match, without surrounding white space. None means that there is no match."""
    found = pattern.findall(text)
    return str(found[-1]).strip() if found else None
